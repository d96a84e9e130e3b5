"""Adaptive links against torch and against the papers' formulas."""

import pytest
import torch

import moduli as mo
from m.first_order import F64, close, doubles, formula, run
from moduli import m, optim

FUSE = pytest.mark.parametrize("fuse", ["auto", False])


@FUSE
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_is_torchs(fuse, amsgrad):
    ours = run(lambda p: [m.Adam(eps=1e-3, amsgrad=amsgrad), m.LR(0.05)], fuse=fuse)
    close(ours, run(lambda p: torch.optim.Adam(p, 0.05, eps=1e-3, amsgrad=amsgrad)))


@FUSE
@pytest.mark.parametrize("centered", [False, True])
def test_rmsprop_is_torchs(fuse, centered):
    ours = run(lambda p: [m.RMSprop(smoothing=0.9, centered=centered), m.LR(0.05)], fuse=fuse)
    close(ours, run(lambda p: torch.optim.RMSprop(p, 0.05, alpha=0.9, centered=centered)))


@FUSE
def test_rmsprop_with_debias_and_amsgrad(fuse):
    def update(x, g, memory, t):
        memory["v"] = 0.9 * memory.get("v", 0) + 0.1 * g**2
        memory["top"] = torch.maximum(memory.get("top", torch.zeros_like(g)), memory["v"])
        return 0.05 * g / ((memory["top"] / (1 - 0.9**t)).sqrt() + 1e-8)

    ours = run(lambda p: [m.RMSprop(smoothing=0.9, debias=True, amsgrad=True), m.LR(0.05)], fuse=fuse)
    close(ours, run(formula(update)))


def test_rmsprop_from_the_first_update_and_inner():
    def update(x, g, memory, t):
        memory["v"] = 0.9 * memory.get("v", g**2) + 0.1 * g**2
        memory["m"] = 0.8 * memory.get("m", 0) + 0.2 * g
        return 0.05 * memory["m"] / (memory["v"].sqrt() + 1e-8)

    ours = run(lambda p: [m.RMSprop(smoothing=0.9, init="update", inner=m.EMA(0.8)), m.LR(0.05)])
    close(ours, run(formula(update)))


@FUSE
def test_adagrad_is_torchs(fuse):
    ours = run(lambda p: [m.Adagrad(lr_decay=0.1, initial_accumulator_value=0.2), m.LR(0.05)], fuse=fuse)
    close(ours, run(lambda p: torch.optim.Adagrad(p, 0.05, lr_decay=0.1, initial_accumulator_value=0.2)))


@FUSE
def test_lion_is_its_paper(fuse):
    def update(x, g, memory, t):
        before = memory.get("m", torch.zeros_like(g))
        memory["m"] = 0.99 * before + 0.01 * g
        return 0.01 * (0.9 * before + 0.1 * g).sign()

    close(run(lambda p: [m.Lion(), m.LR(0.01)], fuse=fuse, steps=40), run(formula(update), steps=40))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: m.Lion(beta2=0.0), "Lion: beta2"),
        (lambda: m.RMSprop(smoothing=1.5), "RMSprop: smoothing"),
        (lambda: m.RMSprop(init="update", debias=True), "no bias"),
        (lambda: m.Adagrad(eps=-1.0), "Adagrad: eps"),
    ],
)
def test_refuses(make, says):
    with pytest.raises(ValueError, match=says):
        make()


# ---------------------------------------------------------------------- matrices


def _root(matrix, exponent, reg=1e-12):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag((values + reg) ** exponent) @ vectors.T


MATRIX = ((4, 4),)


def test_shampoo_is_its_paper():
    def update(x, g, memory, t):
        memory["L"] = memory.get("L", 0) + g @ g.T
        memory["R"] = memory.get("R", 0) + g.T @ g
        return 0.1 * _root(memory["L"], -0.25) @ g @ _root(memory["R"], -0.25)

    ours = run(lambda p: [m.Shampoo(precond_freq=1, init="zeros"), m.LR(0.1)], shapes=MATRIX)
    close(ours, run(formula(update), shapes=MATRIX), 1e-8)


def test_shampoo_with_memory_debiases_what_it_accumulated():
    def update(x, g, memory, t):
        memory["L"] = 0.9 * memory.get("L", 0) + 0.1 * g @ g.T
        memory["R"] = 0.9 * memory.get("R", 0) + 0.1 * g.T @ g
        if t % 3 == 1:
            memory["roots"] = [_root(memory[key] / (1 - 0.9**t), -0.25, 1e-3) for key in "LR"]
        return 0.1 * memory["roots"][0] @ g @ memory["roots"][1]

    ours = run(lambda p: [m.Shampoo(precond_freq=3, beta=0.9, init="zeros", reg=1e-3), m.LR(0.1)], shapes=MATRIX)
    close(ours, run(formula(update), shapes=MATRIX), 1e-8)


def test_shampoo_of_three_axes_and_of_a_vector():
    shapes = ((3, 3, 3), (4,))

    def update(x, g, memory, t):
        k = g.dim()
        out = g
        for axis in range(k):
            flat = g.movedim(axis, 0).reshape(g.shape[axis], -1)
            memory[axis] = memory.get(axis, 0) + flat @ flat.T
            root = _root(memory[axis], -1 / (2 * k), 1e-3)
            out = torch.einsum("ij,j...->i...", root, out.movedim(axis, 0)).movedim(0, axis)
        return 0.1 * out

    ours = run(
        lambda p: [m.Shampoo(precond_freq=1, merge_small=False, reg=1e-3, init="zeros"), m.LR(0.1)], shapes=shapes
    )
    close(ours, run(formula(update), shapes=shapes), 1e-8)


def test_shampoo_merging_keeps_matrices_and_long_or_unit_axes_work():
    link = m.Shampoo(max_dim=12, init="zeros")
    params = [torch.zeros(6, 5), torch.zeros(4, 3, 2, 2), torch.zeros(1, 7, 1), torch.zeros(20, 3), torch.zeros(30)]
    grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) for p in params]
    out = optim.step_tensors(link, [g.clone() for g in grads], params=params)
    assert [o.shape for o in out] == [p.shape for p in params]
    assert [link.state[p]["shape"] for p in params] == [(6, 5), (4, 12), (7,), (20, 3), (30,)]
    assert [link.state[p]["axes"] for p in params] == [[0, 1], [0, 1], [0], [1], []]
    # the axis that is too long takes no part, so that the other has the whole power
    torch.testing.assert_close(out[3].T @ out[3], torch.eye(3), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out[4], grads[4].sign(), rtol=1e-3, atol=1e-3)


def test_shampoo_inner_is_used():
    links = lambda inner: lambda p: [m.Shampoo(inner=inner()), m.LR(0.1)]  # noqa: E731
    plain, inner = run(links(lambda: None), shapes=MATRIX), run(links(m.EMA), shapes=MATRIX)
    assert not torch.allclose(plain[0], inner[0])


def soap(every, beta=0.95):
    """SOAP, written out; of a step size of 0.05."""

    def update(x, g, memory, t):
        if t == 1:  # the step that makes the basis is skipped
            memory.update(L=(1 - beta) * g @ g.T, R=(1 - beta) * g.T @ g, m=torch.zeros_like(g), v=torch.zeros_like(g))
            memory["QL"], memory["QR"] = (torch.linalg.eigh(memory[key])[1].flip(-1) for key in "LR")
            return torch.zeros_like(g)
        t = t - 1
        # momentum is kept unrotated here and rotated at every step
        memory["m"] = 0.95 * memory["m"] + 0.05 * g
        rotated, mean = (memory["QL"].T @ a @ memory["QR"] for a in (g, memory["m"]))
        memory["v"] = 0.95 * memory["v"] + 0.05 * rotated**2
        scaled = (mean / (1 - 0.95**t)) / ((memory["v"] / (1 - 0.95**t)).sqrt() + 1e-8)
        out = memory["QL"] @ scaled @ memory["QR"].T
        memory["L"] = beta * memory["L"] + (1 - beta) * g @ g.T
        memory["R"] = beta * memory["R"] + (1 - beta) * g.T @ g
        if t % every == 0:
            for key, axis in (("L", 0), ("R", 1)):
                C, Q = memory[key], memory["Q" + key]
                order = torch.diag(Q.T @ C @ Q).argsort(descending=True)
                memory["orders"] = memory.get("orders", 0) + (order.tolist() != sorted(order.tolist()))
                memory["v"] = memory["v"].index_select(axis, order)
                memory["Q" + key] = torch.linalg.qr(C @ Q[:, order])[0]
        return 0.05 * out

    return update


@pytest.mark.parametrize("every", [1, 3])
def test_soap_is_its_paper(every):
    ours = run(lambda p: [m.SOAP(precond_freq=every), m.LR(0.05)], shapes=MATRIX)
    close(ours, run(formula(soap(every)), shapes=MATRIX), 1e-7)


@pytest.mark.parametrize("inside", [True, False])
def test_soap_puts_its_moments_in_the_order_of_the_eigenvalues(inside):
    """Gradients whose large directions become the small ones, so that eigenvectors change places."""
    generator, memory = torch.Generator().manual_seed(0), {}
    link, update, w = (
        m.SOAP(precond_freq=1, shampoo_beta=0.5, proj_exp_avg=inside),
        soap(1, 0.5),
        torch.zeros(3, 3).double(),
    )
    scale, orders = torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64), 0
    for t in range(1, 13):
        g = torch.randn(3, 3, generator=generator, dtype=torch.float64) * scale[:, None] * scale
        scale = scale.flip(0) if t % 4 == 0 else scale
        before = memory.get("orders", 0)
        expected = update(w, g, memory, t)
        orders += memory.get("orders", 0) > before
        found = optim.step_tensors(link, [g.clone()], params=[w])[0]
        close([0.05 * found], [expected], 1e-7)
    assert orders > 1


def test_soap_in_a_fixed_basis_is_adam():
    # max_dim below every axis: nothing is rotated
    def update(x, g, memory, t):
        if t == 1:
            return torch.zeros_like(g)
        memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
        memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * g * g
        return 0.05 * memory["m"] / (1 - 0.9 ** (t - 1)) / ((memory["v"] / (1 - 0.999 ** (t - 1))).sqrt() + 1e-8)

    ours = run(lambda p: [m.SOAP(max_dim=1, beta1=0.9, beta2=0.999), m.LR(0.05)])
    close(ours, run(formula(update)))


def test_soap_skips_the_step_that_makes_the_basis():
    """In its own eigenbasis an update is its singular values, and Adam would make all of them one: 65 instead of 16."""
    generator = torch.Generator().manual_seed(0)
    link, w = m.SOAP(), [torch.zeros(64, 64)]
    first, second = (torch.randn(64, 64, generator=generator) * 1e-3 for _ in range(2))
    assert not optim.step_tensors(link, [first.clone()], params=w)[0].any()
    out = optim.step_tensors(link, [second.clone()], params=w)[0]
    # Adam's first step of a gradient that the basis knows nothing of: every number in the basis is 1 or -1.
    torch.testing.assert_close(out.norm(), torch.tensor(64.0), rtol=1e-3, atol=0)
    assert (out * second).sum() / out.norm() / second.norm() > 0.7


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (3, 4, 2)])
@pytest.mark.parametrize("method", ["svd", "eigh", "polarexpress", "newtonschulz"])
def test_orthogonalize_is_the_polar_factor(shape, method):
    u = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    steps = 5 if method == "newtonschulz" else 12
    out = optim.step_tensors(m.Orthogonalize(method=method, steps=steps), [u.clone()])[0]
    matrices, found = u.flatten(1), out.flatten(1)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    if method == "newtonschulz":
        values = torch.linalg.svdvals(found)
        assert values.min() > 0.6
        assert values.max() < 1.3
        # the singular vectors are the update's own
        core = left.mT @ found @ right.mT
        close([core], [torch.diag_embed(torch.diagonal(core, dim1=-2, dim2=-1))], 1e-8)
    else:
        close([found], [left @ right], 1e-8)


def test_orthogonalize_by_qr_and_its_factors():
    u = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out = optim.step_tensors(m.Orthogonalize(method="qr"), [u.clone()])[0]
    close([out.T @ out], [torch.eye(4, dtype=torch.float64)])
    exact = optim.step_tensors(m.Orthogonalize(method="svd"), [u.clone()])[0]
    close(optim.step_tensors(m.Orthogonalize(method="svd", adjust_lr=True), [u.clone()]), [exact * 0.2 * 6**0.5])
    nuclear = torch.linalg.matrix_norm(u, "nuc")
    close(optim.step_tensors(m.Orthogonalize(method="svd", dual_norm_correction=True), [u.clone()]), [exact * nuclear])


def test_orthogonalize_leaves_vectors_and_switched_off_groups():
    u = [torch.tensor([3.0, 4.0]), torch.tensor(2.0), torch.ones(1, 3), torch.diag(torch.tensor([2.0, 3.0]))]
    close(optim.step_tensors(m.Orthogonalize(), [x.clone() for x in u[:3]]), u[:3])
    close(optim.step_tensors(m.Orthogonalize(orthogonalize=False), [u[3].clone()]), u[3:])
    assert torch.equal(optim.step_tensors(m.Orthogonalize(), [torch.zeros(3, 3)])[0], torch.zeros(3, 3))


@pytest.mark.parametrize("shape", [(5,), (4, 4), (6, 3)])
def test_psgd_whitens(shape):
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-1, 1, shape[0], dtype=torch.float64).reshape(-1, *[1] * (len(shape) - 1))
    link, param, out = m.PSGDKronWhiten(seed=1, lr_preconditioner=0.05), torch.zeros(shape, dtype=torch.float64), []
    for t in range(1500):
        u = torch.randn(shape, generator=generator, dtype=torch.float64) * scales
        whitened = optim.step_tensors(link, [u], params=[param])[0]
        if t >= 700:
            out.append(whitened)
    rows = torch.stack(out).reshape(len(out), shape[0], -1)
    variance = rows.square().mean((0, 2))
    assert ((variance > 0.6) & (variance < 1.6)).all(), variance


def test_psgd_bounds_its_result():
    link = m.PSGDKronWhiten(grad_clip_max_amp=0.5, seed=0)
    out = optim.step_tensors(link, [torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) * 100])[0]
    assert out.square().mean().sqrt() <= 0.5 + 1e-6


def test_full_matrix_adagrad_is_its_paper():
    def update(x, g, memory, t):
        flat = g.reshape(-1)
        memory["A"] = memory.get("A", torch.eye(len(flat), dtype=g.dtype)) + torch.outer(flat, flat)
        return 0.1 * (_root(memory["A"], -0.5) @ flat).reshape(g.shape)

    ours = run(lambda p: [m.FullMatrixAdagrad(), m.LR(0.1)], shapes=((3, 2),))
    close(ours, run(formula(update), shapes=((3, 2),)), 1e-9)


def test_ggt_is_the_full_matrix_of_its_history():
    def update(x, g, memory, t):
        history = memory.setdefault("h", [])
        history.append(g.reshape(-1))
        M = torch.stack(history[-4:], 1)
        return 0.1 * (_root(M @ M.T, -0.5, 1e-2) @ (g.reshape(-1) + 1)).reshape(g.shape)

    class Plus(optim.TensorTransform):
        def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
            return tensor + 1

    # the inner link moves the update out of the span of the history; that part is kept
    ours = run(lambda p: [m.GGT(history_size=4, damping=1e-2, inner=Plus()), m.LR(0.1)], shapes=((3, 2),))
    close(ours, run(formula(update), shapes=((3, 2),)), 1e-8)


# ---------------------------------------------------------------------- pointwise and closures


@FUSE
def test_rprop_is_torchs(fuse):
    ours = run(lambda p: [m.Rprop(alpha=0.05, backtrack=False)], fuse=fuse, steps=30)
    close(ours, run(lambda p: torch.optim.Rprop(p, 0.05), steps=30))


def test_rprop_takes_the_last_step_back():
    link, w = m.Rprop(alpha=1.0), torch.zeros(1)
    signs, moves = [1.0, 1.0, -1.0, -1.0], []
    for sign in signs:
        moves.append(optim.step_tensors(link, [torch.tensor([sign])], params=[w])[0].item())
    assert moves == pytest.approx([1.0, 1.2, -1.2, -0.6])


@FUSE
def test_adan_is_its_paper(fuse):
    def update(x, g, memory, t):
        d = g - memory.get("g", g)
        memory["g"] = g.clone()
        memory["m"] = 0.98 * memory.get("m", 0) + 0.02 * g
        memory["v"] = 0.92 * memory.get("v", 0) + 0.08 * d
        memory["n"] = 0.99 * memory.get("n", 0) + 0.01 * (g + 0.92 * d) ** 2
        mean, change, square = memory["m"] / (1 - 0.98**t), memory["v"] / (1 - 0.92**t), memory["n"] / (1 - 0.99**t)
        return 0.05 * (mean + 0.92 * change) / (square.sqrt() + 1e-8)

    close(run(lambda p: [m.Adan(), m.LR(0.05)], fuse=fuse), run(formula(update)))


@FUSE
@pytest.mark.parametrize("dim", ["global", None])
def test_orthograd_is_orthogonal_and_keeps_the_norm(fuse, dim):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((3, 2), (4,))]
    u = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in params]
    out = optim.step_tensors(m.OrthoGrad(dim=dim, eps=0.0), [x.clone() for x in u], params=params)
    groups = [list(range(2))] if dim == "global" else [[0], [1]]
    for group in groups:
        x, a, b = (torch.cat([tensors[i].reshape(-1) for i in group]) for tensors in (params, u, out))
        assert (x @ b).abs() < 1e-12
        assert b.norm().item() == pytest.approx(a.norm().item(), rel=1e-10)
    links = lambda p: [m.OrthoGrad(dim=dim), m.LR(0.05)]  # noqa: E731
    close(run(links, fuse=fuse), run(links, fuse=False))


@FUSE
@pytest.mark.parametrize("dim", ["global", None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (7,)])
def test_orthograd_scales_no_rounding_of_an_update_along_the_weights(fuse, dim, dtype, shape):
    # A parameter of one number, as the bias of one output, has no part across itself.
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        start = torch.randn(shape, generator=generator).to(dtype)
        for across in (0.0, 1e-7, 1e-3):
            w = torch.nn.Parameter(start.clone())
            w.grad = (0.37 * start + across * torch.randn(shape, generator=generator)).to(dtype)
            mo.Optimizer([w], m.OrthoGrad(dim=dim), m.LR(1.0), fuse=fuse).step()
            assert w.dtype is dtype
            moved = (w.detach().double() - start.double()).norm()
            assert moved <= 1.1 * w.grad.double().norm()


@pytest.mark.parametrize("p", [2.0, 4.0, float("inf")])
def test_sam_is_its_paper(p):
    w, other = (torch.nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in ([3.0, -1.0], [0.5]))
    loss = lambda: (w**4).sum() + (other**3).sum() * w.sum()  # noqa: E731
    start = [w.detach().clone(), other.detach().clone()]
    grads = torch.autograd.grad(loss(), [w, other])
    flat = torch.cat(grads)
    q = 1.0 if p == float("inf") else p / (p - 1)
    shift = flat.sign() * flat.abs() ** (q - 1) / flat.abs().pow(q).sum() ** (1 / p)
    assert torch.linalg.vector_norm(shift, p).item() == pytest.approx(1.0)
    w.data += 0.1 * shift[:2]
    other.data += 0.1 * shift[2:]
    expected = [x - 0.01 * g for x, g in zip(start, torch.autograd.grad(loss(), [w, other]), strict=True)]
    w.data, other.data = start[0].clone(), start[1].clone()
    mo.Optimizer([w, other], m.SAM(rho=0.1, p=p), m.LR(0.01)).step(mo.closure(loss))
    close([w.detach(), other.detach()], expected)


def test_asam_does_not_see_the_scale_of_weights():
    # f(a b) with a scaled up and b down is the same function, and must be as sharp.
    def sharp(a0, b0):
        a, b = (torch.nn.Parameter(torch.tensor([v], dtype=torch.float64)) for v in (a0, b0))
        objective = optim.Objective([a, b], mo.closure(lambda: ((a * b - 3) ** 2).sum()))
        return m.ASAM(rho=0.1).apply(objective).get_loss(backward=False).item()

    assert sharp(1.0, 2.0) == pytest.approx(sharp(10.0, 0.2))
    assert sharp(1.0, 2.0) > 1.0


@pytest.mark.parametrize("layerwise", [True, False])
def test_adagrad_norm_is_its_paper(layerwise):
    params = [torch.zeros(2), torch.zeros(1)]
    link, total = m.AdagradNorm(layerwise=layerwise), [0.0, 0.0]
    for u in ([torch.tensor([3.0, 4.0]), torch.tensor([2.0])], [torch.tensor([1.0, 0.0]), torch.tensor([1.0])]):
        out = optim.step_tensors(link, [x.clone() for x in u], params=params)
        sizes = [x.square().sum().item() for x in u]
        total = [t + (size if layerwise else sum(sizes)) for t, size in zip(total, sizes, strict=True)]
        close(out, [x / t**0.5 for x, t in zip(u, total, strict=True)], 1e-6)
    debiased = optim.step_tensors(m.AdagradNorm(beta=0.9), [torch.tensor([3.0, 4.0])])
    close(debiased, [torch.tensor([0.6, 0.8])], 1e-6)


def test_adopt_clips_by_the_fourth_root_of_the_steps_before():
    link, w = m.ADOPT(beta1=0.0), [torch.zeros(1, dtype=torch.float64)]
    sizes = [optim.step_tensors(link, [torch.full_like(w[0], u)], params=w)[0].item() for u in (1.0, 1e3, -1e5, 1e7)]
    assert sizes == pytest.approx([0.0, 1.0, -(2**0.25), 3**0.25])


def test_what_full_matrix_adagrad_keeps_has_memory_of_its_own():
    param = torch.nn.Parameter(torch.ones(3))
    link = m.FullMatrixAdagrad(accumulator_tfm=m.Mul(2.0))
    optimizer = mo.Optimizer([param], link, m.LR(0.1))
    param.grad = torch.ones(3)
    optimizer.step()
    kept = [value for state in link.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert len({tensor.data_ptr() for tensor in kept}) == len(kept) == 2


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
    vector = doubles(1.0, 2.0)
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
    scale = doubles(1.0, 10.0)
    w = torch.nn.Parameter(doubles(3.0, 1.0))
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
    w = torch.nn.Parameter(doubles(2.0, -1.0))
    link = m.AEGD(lr=0.3, c=2.0)
    opt = mo.Optimizer([w], link)
    x, r = w.detach().clone(), None
    for _ in range(10):
        f = (x.square() * doubles(1.0, 5.0)).sum()
        v = 2 * doubles(1.0, 5.0) * x / (2 * (f + 2).sqrt())
        r = ((f + 2).sqrt() if r is None else r) / (1 + 0.6 * v * v)
        x = x - 0.6 * r * v
        before = link.state[w].get("energy", torch.full((2,), torch.inf, dtype=F64)).clone()
        opt.step(mo.closure(lambda: (w.square() * doubles(1.0, 5.0)).sum()))
        torch.testing.assert_close(w.detach(), x)
        assert (link.state[w]["energy"] <= before).all()


def test_aegd_refuses_a_negative_root():
    w = torch.nn.Parameter(doubles(2.0))
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
