"""Line searches, quasi-Newton, conjugate gradient, second-order, least-squares and difference links beyond the common laws."""

import math

import numpy as np
import pytest
import torch

import moduli as mo
from moduli import m
from moduli.m.line_search._base import run_trials
from moduli.m.line_search._strong_wolfe import more_thuente_trials

D = torch.float64


def _quadratic(n=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(n, n, generator=generator, dtype=D)
    A = A @ A.T + torch.eye(n, dtype=D)
    b = torch.randn(n, generator=generator, dtype=D)
    return A, b, torch.linalg.solve(A, b)


def _rosenbrock(w):
    return (100 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2).sum()


def _start(n=10):
    return torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=D).repeat(n // 2))


# ---------------------------------------------------------------------------------------------- line searches


@pytest.mark.parametrize("c2", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("first", [1e-3, 0.1, 1.0, 10.0, 1e3])
@pytest.mark.parametrize(
    "phi",
    [
        lambda a: (-a / (a * a + 2), (a * a - 2) / (a * a + 2) ** 2),
        lambda a: ((a + 0.004) ** 5 - 2 * (a + 0.004) ** 4, 5 * (a + 0.004) ** 4 - 8 * (a + 0.004) ** 3),
        lambda a: ((a - 3) ** 2, 2 * (a - 3)),
        lambda a: (math.cosh(a - 1) if a < 300 else math.inf, math.sinh(a - 1) if a < 300 else math.inf),
    ],
)
def test_a_strong_wolfe_step_satisfies_both_conditions(phi, first, c2):
    loss, slope = phi(0.0)
    search = more_thuente_trials(loss, slope, first, c1=1e-4, c2=c2, most=1e10, maxiter=60, width=1e-12)
    a, good = run_trials(search, phi)[:2]
    assert good
    assert phi(a)[0] <= loss + 1e-4 * a * slope
    assert abs(phi(a)[1]) <= c2 * abs(slope)


def test_the_accepted_evaluation_is_reused_only_for_fixed_closures():
    for fixed in (False, True):
        w = _start()
        opt = mo.Optimizer([w], m.LBFGS(), m.StrongWolfe())
        calls = [0]

        def loss(w=w, calls=calls):
            calls[0] += 1
            return _rosenbrock(w)

        for _ in range(30):
            opt.step(mo.closure(loss, fixed=fixed))
        assert calls[0] == opt.num_evaluations
        if fixed:
            with_carry = calls[0]
    assert with_carry <= calls[0] * 1.0
    assert with_carry < 45


def test_reusing_the_evaluation_changes_nothing_else():
    points = []
    for fixed in (False, True):
        w = _start()
        opt = mo.Optimizer([w], m.LBFGS(), m.StrongWolfe())
        for _ in range(20):
            opt.step(mo.closure(lambda w=w: _rosenbrock(w), fixed=fixed))
        points.append(w.data.clone())
    assert torch.equal(*points)


def test_an_uphill_direction_is_not_followed():
    class Uphill(mo.optim.Module):
        def apply(self, objective):
            objective.updates = [-g for g in objective.get_grads()]
            return objective

    for search in (m.StrongWolfe(), m.StrongWolfe(plus_minus=True), m.Backtracking()):
        w = torch.nn.Parameter(torch.tensor([3.0], dtype=D))
        opt = mo.Optimizer([w], Uphill(), search)
        first = opt.step(mo.closure(lambda w=w: (w**2).sum()))
        assert (w**2).sum() < first


def test_a_closure_that_fails_restores_the_parameters():
    w = _start()
    before, calls = w.data.clone(), [0]

    def loss():
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("no")
        return _rosenbrock(w)

    with pytest.raises(RuntimeError, match="no"):
        mo.Optimizer([w], m.StrongWolfe()).step(mo.closure(loss))
    assert torch.equal(w.data, before)


# ---------------------------------------------------------------------------------------------- quasi-Newton

SECANT = ["BFGS", "DFP", "SR1", "PSB", "SSVM", "Horisho", "BroydenGood", "BroydenBad", "McCormick", "Pearson", "ICUM",
          "Greenstadt1", "Greenstadt2", "LBFGS", "LSR1"]  # fmt: skip


@pytest.mark.parametrize("name", SECANT)
def test_the_secant_equation(name):
    A, b, _ = _quadratic()
    w = torch.nn.Parameter(torch.ones(6, dtype=D))
    link = getattr(m, name)()
    opt = mo.Optimizer([w], link, m.StrongWolfe())
    closure = mo.closure(lambda: 0.5 * w @ A @ w - b @ w, fixed=True)
    points = []
    for _ in range(4):
        points.append(w.data.clone())
        opt.step(closure)
    s = points[-1] - points[-2]
    objective = mo.optim.Objective([w], closure)
    H = link.get_H(objective)
    if name in ("BroydenGood", "BroydenBad", "McCormick", "Pearson", "ICUM", "Greenstadt1", "Greenstadt2"):
        solved = H.solve(A @ s)
        torch.testing.assert_close(solved, s, rtol=1e-6, atol=1e-8)
    else:
        torch.testing.assert_close(H.matvec(s), A @ s, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["BFGS", "DFP", "SR1", "BroydenGood", "BroydenBad", "McCormick"])
def test_updates_of_the_hessian_and_of_its_inverse_agree(name):
    A, b, _ = _quadratic()
    matrices = []
    for inverse in (True, False):
        w = torch.nn.Parameter(torch.ones(6, dtype=D))
        link = getattr(m, name)(inverse=inverse)
        opt = mo.Optimizer([w], link, m.LR(0.05))
        for _ in range(6):
            opt.step(mo.closure(lambda w=w: 0.5 * w @ A @ w - b @ w))
        matrix = link.state[w]["matrix"]
        matrices.append(matrix if not inverse else torch.linalg.inv(matrix))
    torch.testing.assert_close(matrices[0], matrices[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [4, 10, 20, 37])
def test_the_compact_form_is_the_two_loop_recursion(n):
    w = _start(n + n % 2)
    link = m.LBFGS(history_size=5)
    opt = mo.Optimizer([w], link, m.StrongWolfe())
    closure = mo.closure(lambda: _rosenbrock(w), fixed=True)
    pairs = []
    last = None
    for _ in range(15):
        x = w.data.clone()
        g = torch.func.grad(_rosenbrock)(x)
        if last is not None:
            pairs.append((x - last[0], g - last[1]))
        last = (x, g)
        q = g.clone()
        alphas = []
        for s, y in reversed(pairs[-5:]):
            a = (s @ q) / (s @ y)
            q -= a * y
            alphas.append(a)
        if pairs:
            q *= (pairs[-1][0] @ pairs[-1][1]) / (pairs[-1][1] @ pairs[-1][1])
        for (s, y), a in zip(pairs[-5:], reversed(alphas), strict=True):
            q += s * (a - (y @ q) / (s @ y))
        opt.step(closure)
        if pairs:
            moved = x - w.data
            cosine = (moved @ q) / (moved.norm() * q.norm())
            assert abs(cosine - 1) < 1e-10


def test_the_numpy_and_torch_forms_agree(monkeypatch):
    from moduli.m import _vectors
    from moduli.m.quasi_newton import _lbfgs

    ends = []
    for small, wide in ((10_000, 10_000), (10_000, 0), (0, 0)):
        monkeypatch.setattr(_vectors, "SMALL", small)
        monkeypatch.setattr(_lbfgs, "_WIDE", wide)
        w = _start()
        opt = mo.Optimizer([w], m.LBFGS(), m.StrongWolfe())
        for _ in range(12):
            opt.step(mo.closure(lambda w=w: _rosenbrock(w), fixed=True))
        ends.append(w.data.clone())
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-9, atol=1e-11)


def test_bfgs_and_lbfgs_with_all_pairs_are_one_method():
    ends = []
    for link in (m.BFGS(init_scale=1.0, scale_first=False), m.BFGS(init_scale=1.0, inverse=False, scale_first=False)):
        w = _start(4)
        opt = mo.Optimizer([w], link, m.StrongWolfe())
        for _ in range(8):
            opt.step(mo.closure(lambda w=w: _rosenbrock(w), fixed=True))
        ends.append(w.data.clone())
    torch.testing.assert_close(*ends, rtol=1e-7, atol=1e-9)


# ---------------------------------------------------------------------------------------------- conjugate gradients


@pytest.mark.parametrize("name", ["FletcherReeves", "PolakRibiere", "HestenesStiefel", "DaiYuan", "LiuStorey",
                                  "ConjugateDescent", "DYHS", "HagerZhang"])  # fmt: skip
def test_on_a_quadratic_directions_are_conjugate_and_n_steps_are_enough(name):
    A, b, best = _quadratic(5)

    class Exact(mo.optim.Module):
        """Steps to the exact minimum along the update."""

        def apply(self, objective):
            (u,), (g,) = objective.get_updates(), objective.get_grads()
            directions.append(u.clone())
            objective.updates = [u * ((g @ u) / (u @ A @ u))]
            return objective

    directions = []
    w = torch.nn.Parameter(torch.zeros(5, dtype=D))
    opt = mo.Optimizer([w], getattr(m, name)(), Exact())
    for _ in range(5):
        opt.step(mo.closure(lambda: 0.5 * w @ A @ w - b @ w))
    torch.testing.assert_close(w.data, best, rtol=1e-6, atol=1e-7)
    for i in range(4):
        assert abs(directions[i] @ A @ directions[i + 1]) < 1e-8 * (directions[i] @ A @ directions[i])


# ---------------------------------------------------------------------------------------------- second order


@pytest.mark.parametrize("method", ["batched_autograd", "autograd", "gfd_central", "fd"])
def test_newton_solves_a_quadratic_at_once(method):
    A, b, best = _quadratic()
    parts = [torch.nn.Parameter(torch.ones(2, 2, dtype=D)), torch.nn.Parameter(torch.ones(2, dtype=D))]
    opt = mo.Optimizer(parts, m.Newton(hessian_method=method, h=1e-3))

    def loss():
        x = torch.cat([p.reshape(-1) for p in parts])
        return 0.5 * x @ A @ x - b @ x

    opt.step(mo.closure(loss))
    params = torch.cat([p.detach().reshape(-1) for p in parts])
    torch.testing.assert_close(params, best, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [m.Newton, m.NewtonCG, lambda: m.TrustCG(m.Newton()), lambda: m.Dogleg(m.Newton()),
                                  lambda: m.NystromPCG(seed=0), m.SubspaceNewton])  # fmt: skip
def test_unused_and_linear_parameters(make):
    w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=D))
    unused = torch.nn.Parameter(torch.ones(2, dtype=D))
    linear = torch.nn.Parameter(torch.ones(1, dtype=D))
    opt = mo.Optimizer([unused, w, linear], make(), m.Backtracking())
    closure = mo.closure(lambda: (w**2).sum() + 0.1 * linear.sum())
    first = float(opt.step(closure))
    for _ in range(5):
        last = float(opt.step(closure))
    assert last < first
    assert torch.equal(unused.data, torch.ones(2, dtype=D))
    assert torch.isfinite(w).all()


def test_a_saddle_is_left_with_absolute_eigenvalues():
    w = torch.nn.Parameter(torch.tensor([1.0, 0.1], dtype=D))
    opt = mo.Optimizer([w], m.Newton(eigval_fn=torch.abs), m.Backtracking())
    for _ in range(30):
        loss = opt.step(mo.closure(lambda: w[0] ** 2 - w[1] ** 2 + 0.25 * w[1] ** 4))
    assert abs(float(loss) + 1.0) < 1e-6


@pytest.mark.parametrize("method", ["autograd", "batched_autograd"])
def test_hutchinson_draws_n_samples_vectors(method):
    A, b, _ = _quadratic()
    spreads = []
    for count in (1, 64):
        estimates = []
        for seed in range(40):
            w = torch.nn.Parameter(torch.ones(6, dtype=D))
            objective = mo.optim.Objective([w], mo.closure(lambda w=w: 0.5 * w @ A @ w - b @ w))
            generator = torch.Generator().manual_seed(seed)
            estimates.append(
                objective.hutchinson_hessian(n_samples=count, hvp_method=method, generator=generator)[0][0]
            )
        stacked = torch.stack(estimates)
        spreads.append(stacked.std(0).mean())
        error = (stacked.mean(0) - A.diagonal()).abs().max()
        assert error < 6 * stacked.std(0).max() / math.sqrt(40)  # unbiased within confidence bounds
    assert spreads[1] < spreads[0] / 5  # the expected ratio is an eighth


def test_equilibration_does_not_grow_with_the_number_of_draws():
    w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=D))
    link = m.ESGD(seed=0, update_freq=1, distribution="rademacher", damping=0.0)
    opt = mo.Optimizer([w], link, m.LR(0.0))
    for _ in range(7):
        opt.step(mo.closure(lambda: w[0] ** 2 + 9 * w[1] ** 2))
        state = link.state[w]
        torch.testing.assert_close((state["Hz_sq"] / state["draws"]).sqrt(), torch.tensor([2.0, 18.0], dtype=D))


def test_the_natural_gradient_changes_every_sample_alike():
    w = torch.nn.Parameter(torch.randn(6, dtype=D, generator=torch.Generator().manual_seed(0)))
    X = torch.randn(3, 6, dtype=D, generator=torch.Generator().manual_seed(1))
    before = X @ w.detach()
    mo.Optimizer([w], m.NaturalGradient(reg=0.0), m.LR(0.25)).step(mo.closure(lambda: X @ w))
    torch.testing.assert_close(before - X @ w.detach(), torch.full((3,), 0.25, dtype=D))


# ---------------------------------------------------------------------------------------------- least squares


def test_gauss_newton_is_least_squares_and_its_loss_is_half_the_square():
    generator = torch.Generator().manual_seed(0)
    J, y = torch.randn(8, 3, dtype=D, generator=generator), torch.randn(8, dtype=D, generator=generator)
    w = torch.nn.Parameter(torch.zeros(3, dtype=D))
    opt = mo.Optimizer([w], m.GaussNewton(reg=0.0))
    loss = opt.step(mo.closure(lambda: J @ w - y))
    torch.testing.assert_close(loss, 0.5 * (y @ y))
    torch.testing.assert_close(w.data, torch.linalg.lstsq(J, y.unsqueeze(1)).solution.squeeze(1))


def test_underdetermined_least_squares_takes_the_shortest_step():
    generator = torch.Generator().manual_seed(0)
    J, y = torch.randn(3, 8, dtype=D, generator=generator), torch.randn(3, dtype=D, generator=generator)
    w = torch.nn.Parameter(torch.zeros(8, dtype=D))
    for links in ([m.GaussNewton(reg=1e-12)], [m.LevenbergMarquardt(m.GaussNewton(), y=0.5, init=1e8)]):
        w.data.zero_()
        mo.Optimizer([w], *links).step(mo.closure(lambda: J @ w - y))
        assert (J @ w.detach() - y).norm() < 1e-3
    w.data.zero_()
    mo.Optimizer([w], m.GaussNewton(reg=0.0)).step(mo.closure(lambda: J @ w - y))
    torch.testing.assert_close(w.data, torch.linalg.pinv(J) @ y, rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------------------------------------- gradients from values


@pytest.mark.parametrize(("formula", "order"), [("forward", 1), ("backward", 1), ("central", 2), ("forward3", 2),
                                                ("backward3", 2), ("forward4", 3), ("central4", 4)])  # fmt: skip
def test_the_order_of_difference_formulas(formula, order):
    def error(h):
        w = torch.nn.Parameter(torch.tensor([[0.3, -0.7], [1.1, 0.2]], dtype=D))
        exact = torch.cos(w.detach()) + torch.exp(w.detach())
        opt = mo.Optimizer([w], m.FDM(h=h, formula=formula))
        before = w.data.clone()
        opt.step(mo.closure(lambda: (torch.sin(w) + torch.exp(w)).sum()))
        return float(((before - w.data) - exact).abs().max())

    measured = math.log2(error(4e-2) / error(2e-2))
    assert abs(measured - order) < 0.25


@pytest.mark.parametrize("name", ["SPSA", "RDSA", "RandomizedFDM", "MeZO", "ForwardGradient", "GaussianSmoothing"])
def test_random_differences_are_unbiased(name):
    w = torch.nn.Parameter(torch.tensor([0.5, -1.0, 2.0], dtype=D))
    target = 2 * w.detach()
    opt = mo.Optimizer([w], getattr(m, name)(seed=0, n_samples=50), m.LR(1.0))
    estimates = []
    for _ in range(60):
        before = w.data.clone()
        opt.step(mo.closure(lambda: (w**2).sum()))
        estimates.append(before - w.data)
        w.data.copy_(before)
    estimates = torch.stack(estimates)
    bias = (estimates.mean(0) - target).abs()
    assert bool((bias < 5 * estimates.std(0) / math.sqrt(60) + 1e-3).all())


def test_mezo_stores_no_directions():
    w = torch.nn.Parameter(torch.ones(5, dtype=D))
    link = m.MeZO(seed=0)
    mo.Optimizer([w], link, m.LR(0.1)).step(mo.closure(lambda: (w**2).sum()))
    assert not link.state[w]


# ---------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: m.LBFGS(history_size=0), "history_size"),
        (lambda: m.LBFGS(damping="huber"), "damping"),
        (lambda: m.BFGS(init_scale=-1), "init_scale"),
        (lambda: m.PSB(inverse=True), "no rule"),
        (lambda: m.Newton(damping=-1), "damping"),
        (lambda: m.Newton(hessian_method="guess"), "hessian_method"),
        (lambda: m.NewtonCG(solver="lu"), "solver"),
        (lambda: m.StrongWolfe(c1=0.9, c2=0.1), "c1"),
        (lambda: m.Backtracking(beta=2), "beta"),
        (lambda: m.Backtracking(condition="wolfe"), "condition"),
        (lambda: m.TrustCG(m.Newton(), nplus=0.5), "nplus"),
        (lambda: m.LevenbergMarquardt(m.Newton(), y=2), "y is 2"),
        (lambda: m.GaussNewton(reg=-1), "reg"),
        (lambda: m.FDM(formula="sideways"), "formula"),
        (lambda: m.SPSA(n_samples=0), "n_samples"),
        (lambda: m.ConjugateGradient("newton"), "rule"),
        (lambda: m.AdaHessian(distribution="cauchy"), "distribution"),
        (lambda: m.ShorR(alpha=1.5), "alpha"),
        (lambda: m.SSVM(switch=7), "switch"),
    ],
)
def test_wrong_arguments_are_refused_by_name(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_complex_parameters_with_lbfgs_and_their_error_with_newton():
    w = torch.nn.Parameter(torch.tensor([1 + 2j, -1j], dtype=torch.complex128))
    opt = mo.Optimizer([w], m.LBFGS(), m.StrongWolfe())
    for _ in range(15):
        opt.step(mo.closure(lambda: ((w - 1).abs() ** 2).sum() + (w.real**4).sum(), fixed=True))
    assert float(w.detach().imag.abs().max()) < 1e-6
    with pytest.raises(TypeError, match="real parameters"):
        mo.Optimizer([w], m.Newton()).step(mo.closure(lambda: (w.abs() ** 2).sum()))


def test_scipy_agrees_on_the_minimum():
    scipy = pytest.importorskip("scipy.optimize")
    x0 = np.array([-1.2, 1.0] * 3)
    theirs = scipy.minimize(scipy.rosen, x0, jac=scipy.rosen_der, method="BFGS", options={"gtol": 1e-10}).x
    w = torch.nn.Parameter(torch.tensor(x0))
    opt = mo.Optimizer([w], m.BFGS(), m.StrongWolfe())
    for _ in range(80):
        opt.step(mo.closure(lambda: _rosenbrock(w), fixed=True))
    np.testing.assert_allclose(w.detach().numpy(), theirs, atol=1e-8)


@pytest.mark.parametrize("start", [(-1.1, 2.5), (-1.5, 2.3), (0.5, 3.0), (2.0, -1.0)])
@pytest.mark.parametrize("search", [m.StrongWolfe, m.Backtracking])
def test_newton_cg_leaves_regions_of_negative_curvature(start, search):
    """If the inner iteration ended at negative curvature, steps would be plain descent: 150 of them from the first start."""
    w = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    opt = mo.Optimizer([w], m.NewtonCG(), search())
    for _ in range(40):
        opt.step(mo.closure(lambda: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2))
    assert torch.allclose(w.detach(), torch.ones(2, dtype=torch.float64), atol=1e-6)


def test_newton_cg_steps_along_negative_curvature_by_its_absolute_value():
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    mo.Optimizer([w], m.NewtonCG(reg=0.0)).step(mo.closure(lambda: 2 * w[0] ** 2 - 0.5 * w[1] ** 2))
    # By hand: p = b = (4, -1), pHp = 63, r = b - 17/63 H b; then p' = r + |r|²/|b|² b has negative curvature.
    b, H = torch.tensor([4.0, -1.0], dtype=torch.float64), torch.diag(torch.tensor([4.0, -1.0], dtype=torch.float64))
    x = (b @ b) / (b @ H @ b) * b
    r = b - H @ x
    p = r + (r @ r) / (b @ b) * b
    assert p @ H @ p < 0
    assert torch.allclose(1 - w.detach(), x + (p @ b) / abs(p @ H @ p) * p)
