"""Links that complete the catalogue: each against its formula, or the property it is made for."""

import pytest
import scipy.optimize
import torch

import moduli as mo
from m.first_order import close, formula, run
from moduli import m, optim

F64 = torch.float64


def _vector(*numbers):
    return torch.tensor(numbers, dtype=F64)


# ---------------------------------------------------------------------- links on what others remember


def test_links_see_a_copy_of_what_is_remembered():
    plain, seen = m.Adam(), m.Adam(exp_avg_tfm=m.Mul(100.0), exp_avg_sq_tfm=m.Mul(7.0))
    w = torch.zeros(3, dtype=F64)
    for k in range(4):
        u = _vector(1.0, -2.0, 3.0) * (k + 1)
        for link in (plain, seen):
            optim.step_tensors(link, [u.clone()], params=[w])
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(plain.state[w][key], seen.state[w][key], rtol=0, atol=0)


def test_identity_links_change_nothing():
    pairs = [
        (m.Adam(), m.Adam(exp_avg_tfm=m.Identity(), exp_avg_sq_tfm=m.Identity())),
        (m.Adam(amsgrad=True), m.Adam(amsgrad=True, exp_avg_sq_tfm=m.Identity())),
        (m.Adan(), m.Adan(m_tfm=m.Identity(), v_tfm=m.Identity(), n_tfm=m.Identity())),
        (m.Adagrad(), m.Adagrad(accumulator_tfm=m.Identity())),
        (m.RMSprop(), m.RMSprop(exp_avg_sq_tfm=m.Identity())),
        (m.FullMatrixAdagrad(), m.FullMatrixAdagrad(accumulator_tfm=m.Identity())),
        (
            m.FullMatrixAdagrad(concat_params=False),
            m.FullMatrixAdagrad(concat_params=False, accumulator_tfm=m.Identity()),
        ),
        (m.ClipValueByEMA(), m.ClipValueByEMA(exp_avg_tfm=m.Identity())),
        (m.AdaHessian(seed=0), m.AdaHessian(seed=0, exp_avg_tfm=m.Identity(), D_exp_avg_sq_tfm=m.Identity())),
        (m.SophiaH(seed=0), m.SophiaH(seed=0, exp_avg_tfm=m.Identity(), D_exp_avg_tfm=m.Identity())),
        (m.ESGD(seed=0), m.ESGD(seed=0, Hz_sq_acc_tfm=m.Identity())),
        (m.SOAP(precond_freq=3), m.SOAP(precond_freq=3, inner=m.Identity())),
    ]
    for plain, seen in pairs:
        close(run(lambda _, link=plain: [link, m.LR(0.01)]), run(lambda _, link=seen: [link, m.LR(0.01)]))


def test_the_largest_second_moment_is_what_links_see():
    w = torch.zeros(1, dtype=F64)
    link = m.Adam(beta1=0.0, beta2=0.5, amsgrad=True, debias=False, eps=0.0, exp_avg_sq_tfm=m.Mul(4.0))
    optim.step_tensors(link, [_vector(8.0)], params=[w])
    out = optim.step_tensors(link, [_vector(1.0)], params=[w])[0]
    torch.testing.assert_close(out, 1 / (4 * _vector(32.0)).sqrt())


def test_links_over_all_parameters_work_on_a_moment():
    # One norm over all tensors: the links see all of them at once.
    tensors = [_vector(3.0), _vector(4.0)]
    params = [torch.zeros(1, dtype=F64), torch.zeros(1, dtype=F64)]
    link = m.Adam(beta1=0.0, beta2=0.0, eps=0.0, debias=False, exp_avg_tfm=m.Normalize(dim="global"))
    out = optim.step_tensors(link, tensors, params=params)
    torch.testing.assert_close(out[0], _vector(0.6 / 3))
    torch.testing.assert_close(out[1], _vector(0.8 / 4))


def test_soap_keeps_its_mean_inside_or_outside():
    # Matrices, of which a first update sees all directions: of those that it does not see, rounding chooses the basis.
    ends = [
        run(lambda _, p=p: [m.SOAP(precond_freq=3, proj_exp_avg=p), m.LR(0.01)], steps=20, shapes=((3, 4), (3, 3)))
        for p in (True, False, None)
    ]
    close(ends[0], ends[1], 1e-9)
    close(ends[0], ends[2], 1e-9)


def test_inner_links_of_soap_come_before_its_moments():
    adam = m.Adam(beta1=0.95, beta2=0.95, eps=1e-4)
    expected = run(lambda _: [m.SOAPBasis(adam, inner=m.EMA(0.5)), m.LR(0.01)])
    for outside in (True, False):
        link = m.SOAP(inner=m.EMA(0.5), eps=1e-4, proj_exp_avg=not outside)
        close(run(lambda _, link=link: [link, m.LR(0.01)]), expected, 1e-9)


# ---------------------------------------------------------------------- momentum


def test_cautious_with_two_chains():
    u = _vector(1.0, -2.0, 3.0, 4.0)
    halves = m.IntermoduleCautious(m.Identity(), m.Mul(m.Fill(1.0)), normalize=True)
    torch.testing.assert_close(optim.step_tensors(halves, [u.clone()])[0], u)
    against = m.Sub(2.5)  # agrees about the last two only
    for mode, expected in (
        ("zero", _vector(0.0, -2.0, 3.0, 4.0)),
        ("grad", _vector(-1.5, -2.0, 3.0, 4.0)),
        ("backtrack", _vector(-1.0, -2.0, 3.0, 4.0)),
    ):
        link = m.IntermoduleCautious(m.Identity(), against, mode=mode)
        torch.testing.assert_close(optim.step_tensors(link, [u.clone()])[0], expected)
    link = m.IntermoduleCautious(m.Identity(), against, normalize=True)
    torch.testing.assert_close(optim.step_tensors(link, [u.clone()])[0], _vector(0.0, -2.0, 3.0, 4.0) / 0.75)
    with pytest.raises(ValueError, match="normalize"):
        m.IntermoduleCautious(m.Identity(), against, normalize=True, mode="grad")


def test_cosine_of_two_chains():
    tensors = [_vector(3.0, 0.0), _vector(4.0)]
    out = optim.step_tensors(m.ScaleModulesByCosineSimilarity(m.Identity(), m.Sign()), [t.clone() for t in tensors])
    cosine = 7 / (5 * 2**0.5)
    close(out, [t * cosine for t in tensors])


# ---------------------------------------------------------------------- adaptive


def test_flips_are_taken_back_or_waited_for():
    for backtrack, expected in ((True, [2.0, -2.0, -1.0, -3.0]), (False, [2.0, 0.0, -1.0, -3.0])):
        link, w = m.BacktrackOnSignChange(backtrack=backtrack), torch.zeros(1)
        out = [optim.step_tensors(link, [torch.tensor([u])], params=[w])[0].item() for u in (2.0, -1.0, -1.0, -3.0)]
        assert out == expected


def test_signs_of_gradients_can_decide():
    link, w = m.BacktrackOnSignChange(use_grad=True), torch.zeros(1)
    out = [
        optim.step_tensors(link, [torch.tensor([u])], params=[w], grads=[torch.tensor([g])])[0].item()
        for u, g in ((2.0, 1.0), (3.0, -1.0))
    ]
    assert out == [2.0, -2.0]


def test_dual_norm_and_size_as_orthogonalize_does_them():
    u = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    for first, second in (
        (m.Orthogonalize(dual_norm_correction=True), [m.Orthogonalize(), m.DualNormCorrection()]),
        (m.Orthogonalize(adjust_lr=True), [m.Orthogonalize(), m.MuonAdjustLR()]),
    ):
        a = optim.step_tensors(first, [u.clone()], grads=[u])
        close(a, optim.step_tensors(second, [u.clone()], grads=[u]))
    vector = _vector(1.0, 2.0)
    for link in (m.DualNormCorrection(), m.MuonAdjustLR()):
        close(optim.step_tensors(link, [vector.clone()], grads=[vector]), [vector])


@pytest.mark.parametrize("steps", [1, 2, 5, 8])
@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (8, 16), (8, 12), (8, 8)])
def test_wide_matrices_are_orthogonalised_as_others(shape, steps):
    # Through the small side or not: the same iteration, written out.
    u = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=F64)
    x = u / u.norm()
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    close(optim.step_tensors(m.Orthogonalize(steps=steps), [u.clone()]), [x], 1e-9)
    single = optim.step_tensors(m.Orthogonalize(steps=steps), [u.float()])[0]
    torch.testing.assert_close(single.double(), x, rtol=1e-3, atol=1e-3)


def test_what_momentum_sam_trains_is_heavy_ball_with_gradients_beside_it():
    scale = _vector(1.0, 10.0)
    w = torch.nn.Parameter(_vector(3.0, 1.0))
    link = m.MSAMMomentum(0.02, momentum=0.8, rho=0.1)
    opt = mo.Optimizer([w], link)
    trained, velocity = w.detach().clone(), torch.zeros(2, dtype=F64)
    for _ in range(15):
        gradient = scale * w.detach()
        opt.step(mo.closure(lambda: (scale * w.square()).sum() / 2))
        velocity = 0.8 * velocity + gradient
        trained = trained - 0.02 * velocity
        torch.testing.assert_close(w.detach() + 0.1 * velocity / velocity.norm(), trained)


def test_momentum_sam_with_links_is_the_one_with_momentum():
    first = run(lambda _: [m.MSAMMomentum(0.02, rho=0.1)])
    close(first, run(lambda _: [m.MSAM([m.HeavyBall(0.9), m.LR(0.02)], rho=0.1)]))


def test_aegd_is_its_formula_and_its_energy_falls():
    w = torch.nn.Parameter(_vector(2.0, -1.0))
    link = m.AEGD(lr=0.3, c=2.0)
    opt = mo.Optimizer([w], link)
    x, r = w.detach().clone(), None
    for _ in range(10):
        f = (x.square() * _vector(1.0, 5.0)).sum()
        v = 2 * _vector(1.0, 5.0) * x / (2 * (f + 2).sqrt())
        r = ((f + 2).sqrt() if r is None else r) / (1 + 0.6 * v * v)
        x = x - 0.6 * r * v
        before = link.state[w].get("energy", torch.full((2,), torch.inf, dtype=F64)).clone()
        opt.step(mo.closure(lambda: (w.square() * _vector(1.0, 5.0)).sum()))
        torch.testing.assert_close(w.detach(), x)
        assert (link.state[w]["energy"] <= before).all()


def test_aegd_refuses_a_negative_root():
    w = torch.nn.Parameter(_vector(2.0))
    opt = mo.Optimizer([w], m.AEGD(c=1.0))
    with pytest.raises(ValueError, match="c above"):
        opt.step(mo.closure(lambda: w.sum() - 10))
    assert w.item() == 2.0


def test_adaptive_heavy_ball_is_as_near_as_gradients_reach_on_quadratics():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(5, 5, generator=generator, dtype=F64)
    A = root @ root.mT + torch.eye(5, dtype=F64)
    w = torch.nn.Parameter(torch.randn(5, generator=generator, dtype=F64))
    opt = mo.Optimizer([w], m.AdaptiveHeavyBall())
    gradients = []
    for _ in range(5):
        gradients.append(A @ w.detach())
        opt.step(mo.closure(lambda: w @ A @ w / 2))
        # The way to the optimum, at zero, has no part along any gradient so far: no point in their span is nearer.
        assert (torch.stack(gradients) @ w.detach()).abs().max() < 1e-9
    assert w.detach().abs().max() < 1e-7  # so that n steps are enough


# ---------------------------------------------------------------------- second order


def _bumpy(x):
    return (x.cosh() * _vector(1.0, 2.0, 0.5)).sum() + 0.3 * (x[0] * x[1]).sin() + 0.2 * (x[1] - x[2]) ** 4


def _parts(x):
    return torch.func.grad(_bumpy)(x), torch.func.hessian(_bumpy)(x)


def _two_points(x):
    g, H = _parts(x)
    y = x - torch.linalg.solve(H, g)
    return x - torch.linalg.solve(H, g + _parts(y)[0])


def _three_points(x):
    g, H = _parts(x)
    y = x - torch.linalg.solve(H, g)
    g, H = _parts(y)
    return y - torch.linalg.solve(H, g + _parts(y - torch.linalg.solve(H, g))[0])


def _three_points_again(x):
    g, H = _parts(x)
    inverse = torch.linalg.inv(H)
    y = x - inverse @ g
    g, other = _parts(y)
    M = (2 * torch.eye(3, dtype=F64) - inverse @ other) @ inverse
    z = y - M @ g
    return z - M @ _parts(z)[0]


def _five_points(x):
    g, H = _parts(x)
    y = x - torch.linalg.solve(H, g)
    z = y - 4 * torch.linalg.solve(H + 2 * _parts((x + y) / 2)[1] + _parts(y)[1], _parts(y)[0])
    return z - 4 * torch.linalg.solve(H + 2 * _parts((x + z) / 2)[1] + _parts(z)[1], _parts(z)[0])


@pytest.mark.parametrize(
    ("link", "step"),
    [
        (m.TwoPointNewton, _two_points),
        (m.SixthOrder3P, _three_points),
        (m.SixthOrder3PM2, _three_points_again),
        (m.SixthOrder5P, _five_points),
    ],
)
def test_steps_with_several_points_are_their_formulas(link, step):
    x = _vector(0.5, -0.3, 0.7)
    for method in ("batched_autograd", "func"):
        w = torch.nn.Parameter(x.clone())
        opt = mo.Optimizer([w], link(derivatives_method=method))
        expected = x
        for _ in range(2):
            opt.step(mo.closure(lambda w=w: _bumpy(w)))
            expected = step(expected)
            torch.testing.assert_close(w.detach(), expected, rtol=1e-10, atol=1e-10)


def test_orders_of_convergence():
    # From twice as near a step of order p ends 2^p times as near; the optimum of cosh(x) + x is at -asinh(1).
    optimum = -torch.asinh(_vector(1.0))

    def error(link, distance):
        w = torch.nn.Parameter(optimum + distance)
        mo.Optimizer([w], link()).step(mo.closure(lambda: (w.cosh() + w).sum()))
        return float((w.detach() - optimum).abs())

    for link, order in ((m.Newton, 2), (m.TwoPointNewton, 3), (m.SixthOrder3P, 6), (m.SixthOrder3PM2, 6)):
        ratio = error(link, 0.2) / error(link, 0.1)
        assert ratio > 2 ** (order - 0.5), link


def test_the_inverse_gets_better_by_one_product_a_step():
    A = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=F64)
    w = torch.nn.Parameter(_vector(3.0, 1.0))
    link = m.InverseFreeNewton()
    opt = mo.Optimizer([w], link)
    Y = A / (torch.linalg.matrix_norm(A, 1) * torch.linalg.matrix_norm(A, float("inf")))
    for _ in range(8):
        opt.step(mo.closure(lambda: w @ A @ w / 2))
        torch.testing.assert_close(link.state[w]["Y"], Y)
        Y = Y @ (2 * torch.eye(2, dtype=F64) - A @ Y)
    torch.testing.assert_close(link.state[w]["Y"], torch.linalg.inv(A), rtol=1e-6, atol=1e-6)


def test_an_inverse_that_no_longer_fits_is_begun_again():
    w, scale = torch.nn.Parameter(_vector(1.0)), [1.0]
    link = m.InverseFreeNewton()
    opt = mo.Optimizer([w], link)
    for scale[0] in (1.0, 1.0, 100.0, 100.0, 100.0):
        opt.step(mo.closure(lambda: scale[0] * w.square().sum() / 2))
    torch.testing.assert_close(link.state[w]["Y"], torch.tensor([[0.01]], dtype=F64), rtol=1e-3, atol=0)


def test_matrix_momentum_is_its_formula():
    A = torch.tensor([[4.0, 1.0], [1.0, 3.0]], dtype=F64)
    for method in ("autograd", "fd_central"):
        w = torch.nn.Parameter(_vector(3.0, 1.0))
        opt = mo.Optimizer([w], m.MatrixMomentum(0.02, mu=0.1, hvp_method=method))
        x, before = w.detach().clone(), None
        for _ in range(6):
            s = torch.zeros_like(x) if before is None else x - before
            before, x = x, x - (0.02 * A @ x - (s - 0.1 * A @ s))
            opt.step(mo.closure(lambda w=w: w @ A @ w / 2))
            torch.testing.assert_close(w.detach(), x, rtol=1e-8, atol=1e-8)


def test_adaptive_matrix_momentum_measures_curvature():
    w = torch.nn.Parameter(_vector(3.0))
    link = m.MatrixMomentum(0.02, mu=0.5, adaptive=True)
    opt = mo.Optimizer([w], link)
    for _ in range(3):
        opt.step(mo.closure(lambda: 4 * w.square().sum()))
    assert link.state[w]["radius"] == pytest.approx(1 / 8)


def test_subspace_newton_by_eigenvalues_is_saddle_free():
    A = torch.diag(_vector(2.0, -1.0))
    w = torch.nn.Parameter(_vector(1.0, 1.0))
    opt = mo.Optimizer([w], m.SubspaceNewton(sketch_type="orthonormal", sketch_size=2, eigval_fn=torch.abs, seed=0))
    opt.step(mo.closure(lambda: w @ A @ w / 2))
    torch.testing.assert_close(w.detach(), _vector(0.0, 2.0), rtol=1e-9, atol=1e-9)  # away from the saddle


def test_a_damped_sketch_is_the_damped_system():
    A = torch.diag(_vector(4.0, 1.0, 0.25))
    g = A @ _vector(1.0, 1.0, 1.0)
    for more, system in (
        ({"damping": 0.5}, A + 0.6 * torch.eye(3, dtype=F64)),
        ({"rdamping": 0.5}, A + 2.1 * torch.eye(3, dtype=F64)),
        ({"truncate": 1}, torch.diag(_vector(4.1, 0.1, 0.1))),
        ({"eigv_tol": 0.2}, torch.diag(_vector(4.1, 1.1, 0.1))),
    ):
        w = torch.nn.Parameter(_vector(1.0, 1.0, 1.0))
        opt = mo.Optimizer([w], m.NystromSketchAndSolve(rank=3, reg=0.1, seed=0, **more))
        opt.step(mo.closure(lambda w=w: w @ A @ w / 2))
        torch.testing.assert_close(w.detach(), 1 - torch.linalg.solve(system, g), rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------- quasi-Newton


def _pairs(link, n=4, steps=4, after=None):
    """A link on a quadratic, with the pairs it has seen."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(n, n, generator=generator, dtype=F64)
    A = root @ root.mT + torch.eye(n, dtype=F64)
    w = torch.nn.Parameter(torch.randn(n, generator=generator, dtype=F64))
    opt = mo.Optimizer([w], link, *([] if after is None else [after]))
    points = []
    for _ in range(steps):
        points.append(w.detach().clone())
        opt.step(mo.closure(lambda: w @ A @ w / 2, fixed=True))
    X = torch.stack(points)
    S = X[1:] - X[:-1]
    return A, S, S @ A, w


def test_fletcher_is_bfgs():
    ends = [_pairs(link, steps=6, after=m.StrongWolfe())[3].detach() for link in (m.FletcherVMM(), m.BFGS())]
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_thomas_obeys_the_secant_equation():
    link = m.ThomasOptimalMethod()
    _, S, Y, w = _pairs(link, steps=5, after=m.LR(0.05))
    torch.testing.assert_close(link.state[w]["matrix"] @ Y[-1], S[-1])


def test_projected_newton_learns_the_inverse_in_n_pairs():
    link = m.ProjectedNewtonRaphson()
    A, S, Y, w = _pairs(link, steps=5, after=m.StrongWolfe(c2=0.01))
    learnt = link.state[w]["learnt"]
    torch.testing.assert_close(learnt @ Y.mT, S.mT, rtol=1e-6, atol=1e-6)  # all pairs at once
    torch.testing.assert_close(learnt, torch.linalg.inv(A), rtol=1e-4, atol=1e-4)


def test_corrected_gradients_have_no_part_along_the_last_step():
    link = m.GradientCorrection()
    w = torch.nn.Parameter(_vector(3.0, 1.0))
    scale = _vector(1.0, 5.0)
    before = w.detach().clone()
    opt = mo.Optimizer([w], link, m.LR(0.1))
    opt.step(mo.closure(lambda: (scale * w.square()).sum() / 2))
    s, here = w.detach() - before, w.detach().clone()
    opt.step(mo.closure(lambda: (scale * w.square()).sum() / 2))
    assert abs(torch.dot(here - w.detach(), s).item()) < 1e-12


def test_lsr1_forgets_and_scales():
    w = torch.nn.Parameter(_vector(30.0, 40.0))
    link = m.LSR1(scale_first=True, ptol_restart=True, gtol_restart=True)
    opt = mo.Optimizer([w], link, m.LR(1.0))
    opt.step(mo.closure(lambda: w.square().sum() / 2))
    torch.testing.assert_close(w.detach(), _vector(30.0, 40.0) * (1 - 1 / 50))
    opt.step(mo.closure(lambda: (w.square() * _vector(1.0, 3.0)).sum() / 2))
    assert len(link.state[w]["s"]) == 1
    opt.param_groups[0]["lr"] = 0.0
    for _ in range(3):
        opt.step(mo.closure(lambda: w.square().sum() / 2))
    assert not link.state[w]["s"]


# ---------------------------------------------------------------------- line searches


def test_bisection_goes_down_or_up_from_the_last_length():
    for init, end in ((8.0, 0.5), (0.0625, 0.5)):
        w = torch.nn.Parameter(_vector(3.0))
        link = m.AdaptiveBisection(init=init)
        mo.Optimizer([w], link).step(mo.closure(lambda w=w: w.square().sum()))
        assert link.global_state["last"] == end
        assert w.item() == 0.0


def test_bisection_stays_where_nothing_is_lower():
    w = torch.nn.Parameter(_vector(0.0))
    mo.Optimizer([w], m.Fill(1.0), m.AdaptiveBisection()).step(mo.closure(lambda: w.square().sum()))
    assert w.item() == 0.0


@pytest.mark.parametrize(
    "settings", [{}, {"method": "golden"}, {"bounds": (0.0, 5.0)}, {"prev_init": True, "maxiter": 50}]
)
def test_scipys_searches_find_the_minimum_along_the_line(settings):
    w = torch.nn.Parameter(_vector(3.0, 1.0))
    x, g = w.detach().clone(), _vector(6.0, 6.0)
    best = scipy.optimize.minimize_scalar(lambda a: float((((x - a * g) ** 2) * _vector(1.0, 3.0)).sum())).x
    mo.Optimizer([w], m.ScipyMinimizeScalar(**settings)).step(mo.closure(lambda: w[0] ** 2 + 3 * w[1] ** 2))
    torch.testing.assert_close(w.detach(), x - best * g, rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------------- gradients from values


def test_one_measurement_is_unbiased_and_scales_with_one_over_h():
    w = torch.nn.Parameter(_vector(0.3, -0.2))
    link = m.SPSA1(h=0.1, n_samples=4000, seed=0)
    opt = mo.Optimizer([w], link, m.LR(1.0))
    before = w.detach().clone()
    opt.step(mo.closure(lambda: w.square().sum()))
    torch.testing.assert_close(before - w.detach(), 2 * before, rtol=0.2, atol=0.1)
    ends = []
    for h in (0.1, 0.2):
        x = torch.nn.Parameter(_vector(0.0))
        mo.Optimizer([x], m.SPSA1(h=h, seed=0)).step(mo.closure(lambda x=x: x.sum() * 0 + 1))
        ends.append(abs(x.item()))
    assert ends == pytest.approx([10.0, 5.0])


def test_coordinates_take_turns():
    seen = {}
    for index in ("cyclic", "cyclic2", "random"):
        w, x = torch.nn.Parameter(_vector(3.0, 2.0)), torch.nn.Parameter(_vector(1.0))
        opt = mo.Optimizer([w, x], m.CD(index=index, seed=0), m.LR(0.1))
        order = []
        for _ in range(6):
            before = torch.cat([w.detach().clone(), x.detach().clone()])
            opt.step(mo.closure(lambda w=w, x=x: w.square().sum() + x.square().sum()))
            moved = (torch.cat([w.detach(), x.detach()]) - before).abs()
            assert int((moved > 0).sum()) == 1
            order.append(int(moved.argmax()))
        seen[index] = order
    assert seen["cyclic"] == [0, 1, 2, 0, 1, 2]
    assert seen["cyclic2"] == [0, 1, 2, 1, 0, 1]
    assert set(seen["random"]) <= {0, 1, 2}


def test_slopes_of_coordinates_are_differences():
    w = torch.nn.Parameter(_vector(3.0))
    mo.Optimizer([w], m.CD(grad=True)).step(mo.closure(lambda: w.square().sum()))
    assert w.item() == pytest.approx(-3.0)
    w = torch.nn.Parameter(_vector(3.0))
    mo.Optimizer([w], m.CD(grad=True, threepoint=False, h=0.5)).step(mo.closure(lambda: w.square().sum()))
    assert w.item() == pytest.approx(3.0 - 6.5)


def test_a_coordinate_at_its_minimum_waits_and_looks_nearer():
    w = torch.nn.Parameter(_vector(0.0))
    link = m.CD(h=0.1)
    mo.Optimizer([w], link).step(mo.closure(lambda: w.square().sum()))
    assert w.item() == 0.0
    assert link.state[w]["h"].item() == pytest.approx(0.05)


def test_coordinate_descent_refuses_complex_numbers():
    w = torch.nn.Parameter(torch.ones(1, dtype=torch.complex128))
    with pytest.raises(TypeError, match="real"):
        mo.Optimizer([w], m.CD()).step(mo.closure(lambda: w.abs().sum()))


def test_residuals_for_any_links():
    w = torch.nn.Parameter(_vector(3.0, 1.0))
    A = torch.tensor([[1.0, 2.0], [0.0, 1.0], [1.0, 1.0]], dtype=F64)
    mo.Optimizer([w], m.SumOfSquares(), m.LR(0.1)).step(mo.closure(lambda: A @ w - 1))
    x = _vector(3.0, 1.0)
    torch.testing.assert_close(w.detach(), x - 0.1 * A.mT @ (A @ x - 1))


# ---------------------------------------------------------------------- chance


def test_dropped_updates():
    u = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=F64)
    out = optim.step_tensors(m.Dropout(0.25, seed=0), [u.clone()])[0]
    kept = out != 0
    torch.testing.assert_close(out[kept], u[kept])
    assert abs(float(kept.double().mean()) - 0.75) < 0.05
    grafted = optim.step_tensors(m.Dropout(0.25, graft=True, seed=0), [u.clone()])[0]
    torch.testing.assert_close(grafted.norm(), u.norm())
    assert optim.step_tensors(m.Dropout(1.0, graft=True), [u.clone()])[0].abs().max() == 0


def test_dropped_weights_have_the_gradient_of_what_is_left():
    w = torch.nn.Parameter(torch.ones(500, dtype=F64))
    opt = mo.Optimizer([w], m.WeightDropout(0.3, seed=0), m.LR(1.0))
    opt.step(mo.closure(lambda: w.square().sum() / 2))
    assert set(w.tolist()) == {0.0, 1.0}  # kept weights had gradient one, dropped ones none; both were put back
    assert abs(float((w == 1).double().mean()) - 0.3) < 0.07


def test_noise_on_weights_is_relative_to_their_size():
    for relative, size in ((True, 0.3), (False, 0.1)):
        w = torch.nn.Parameter(torch.full((400,), 3.0, dtype=F64))
        opt = mo.Optimizer(
            [w], m.PerturbWeights(alpha=0.1, relative=relative, distribution="rademacher", seed=0), m.LR(1.0)
        )
        opt.step(mo.closure(lambda w=w: w.square().sum() / 2))
        torch.testing.assert_close(w.detach().abs(), torch.full_like(w, size))


def test_weights_return_to_what_was_stored():
    w = torch.nn.Parameter(torch.ones(1000, dtype=F64))
    link = m.RandomReinitialize(p_reinit=1.0, p_weights=0.4, seed=0, reset=True)
    ema = m.EMA(0.9)
    opt = mo.Optimizer([w], ema, m.LR(0.1), link)
    opt.step(mo.closure(lambda: w.sum()))
    assert abs(float((w == 1).double().mean()) - 0.4) < 0.06
    assert not ema.state or not ema.state[w]
    again = m.RandomReinitialize(p_reinit=0.0, store_every=2, beta=0.5)
    opt = mo.Optimizer([w], m.LR(0.1), again)
    first = w.detach().clone()
    points = []
    for _ in range(3):
        points.append(w.detach().clone())
        opt.step(mo.closure(lambda: w.sum()))
    torch.testing.assert_close(again.state[w]["stored"], (first + points[2]) / 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: m.AEGD(lr=-0.1), "lr"),
        (lambda: m.MSAMMomentum(0.1, momentum=1.0), "momentum"),
        (lambda: m.MSAM(m.LR(0.1), rho=-1.0), "rho"),
        (lambda: m.TwoPointNewton(derivatives_method="x"), "derivatives_method"),
        (lambda: m.InverseFreeNewton(hessian_method="x"), "hessian_method"),
        (lambda: m.MatrixMomentum(0.1, hvp_method="x"), "hvp_method"),
        (lambda: m.MatrixMomentum(0.1, adapt_freq=0), "adapt_freq"),
        (lambda: m.AdaptiveBisection(nplus=1.0), "nplus"),
        (lambda: m.AdaptiveBisection(nminus=1.0), "nminus"),
        (lambda: m.ScipyMinimizeScalar(method="x"), "method"),
        (lambda: m.ScipyMinimizeScalar(method="bounded"), "bounds"),
        (lambda: m.SPSA1(h=0.0), "h is"),
        (lambda: m.CD(index="x"), "index"),
        (lambda: m.Dropout(1.5), "p is"),
        (lambda: m.WeightDropout(-0.5), "p is"),
        (lambda: m.PerturbWeights(distribution="x"), "distribution"),
        (lambda: m.RandomReinitialize(p_reinit=2.0), "p_reinit"),
        (lambda: m.SubspaceNewton(truncate=0), "truncate"),
        (lambda: m.SubspaceNewton(eigv_tol=1.0), "eigv_tol"),
        (lambda: m.NystromSketchAndSolve(damping=-1.0), "damping"),
        (lambda: m.NystromPCG(eigv_tol=1.0), "eigv_tol"),
    ],
)
def test_arguments_are_checked(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_formula_of_momentum_sam_with_decay_and_nesterov():
    def update(x, g, memory, t):
        before = memory.get("v", torch.zeros_like(g))
        v = memory["v"] = 0.5 * before + 0.5 * g
        return 0.1 * (0.5 * g + 0.5 * v + 0.01 * x)

    # Without a perturbation.
    close(
        run(lambda _: [m.MSAMMomentum(0.1, momentum=0.5, rho=0.0, weight_decay=0.01, nesterov=True, lerp=True)]),
        run(formula(update)),
    )
