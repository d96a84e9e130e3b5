"""Orthogonalising links, low-rank projections, QKClip and eight-bit states, beyond the laws for every link."""

import copy
import io

import pytest
import torch

import moduli as mo
from m.first_order import close, formula, run
from moduli import m, optim, presets

F64 = torch.float64


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_kernels_of_convolutions_are_matrices_with_a_row_per_output():
    u = randn(5, 3, 2, 2)
    for link, wanted in (
        (m.Orthogonalize(method="svd"), 1.0),
        (m.Orthogonalize(method="svd", adjust_lr=True), 0.2 * 12**0.5),
    ):
        out = optim.step_tensors(link, [u.clone()])[0].flatten(1)
        left, _, right = torch.linalg.svd(u.flatten(1), full_matrices=False)
        close([out], [left @ right * wanted])
    depthwise = optim.step_tensors(m.Orthogonalize(method="svd"), [randn(6, 1, 3, 3)])[0].flatten(1)
    close([depthwise @ depthwise.T], [torch.eye(6, dtype=F64)])
    batch = optim.step_tensors(m.Orthogonalize(method="svd", flatten=False), [u.clone()])[0]
    close([batch[:, :, 0, 1].T @ batch[:, :, 0, 1]], [torch.eye(3, dtype=F64)])


def test_polar_express_has_two_spellings_and_is_more_exact_than_newton_schulz():
    u = randn(8, 6)
    one, two = (optim.step_tensors(m.Orthogonalize(method=k), [u.clone()]) for k in ("polar_express", "polarexpress"))
    assert torch.equal(one[0], two[0])
    left, _, right = torch.linalg.svd(u, full_matrices=False)
    newton = optim.step_tensors(m.Orthogonalize(), [u.clone()])[0]
    assert (one[0] - left @ right).norm() < 0.6 * (newton - left @ right).norm()


@pytest.mark.parametrize("shape", [(24, 96), (96, 24), (24, 24)])
@pytest.mark.parametrize("method", ["newtonschulz", "polar_express"])
def test_products_in_bfloat16_are_those_in_single_precision_to_a_few_percent(method, shape):
    u = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    wide = optim.step_tensors(m.Orthogonalize(method=method), [u.clone()])[0]
    narrow = optim.step_tensors(m.Orthogonalize(method=method, dtype="bfloat16"), [u.clone()])[0]
    assert narrow.dtype == torch.float32
    difference = (narrow - wide).norm() / wide.norm()
    assert 1e-4 < difference < 0.04  # the precision differs, the matrix does not


def test_bfloat16_is_refused_where_nothing_is_multiplied_in_it():
    with pytest.raises(ValueError, match="method='svd' can't be computed in torch.bfloat16"):
        optim.step_tensors(m.Orthogonalize(method="svd", dtype="bfloat16"), [torch.randn(3, 3)])
    with pytest.raises(ValueError, match="complex matrices"):
        optim.step_tensors(m.Orthogonalize(dtype="bfloat16"), [torch.randn(3, 3, dtype=torch.complex64)])
    with pytest.raises(ValueError, match="float16"):
        m.Orthogonalize(dtype="float16")


def test_polar_express_maps_singular_values_as_its_paper():
    """The reference iterates on singular values with the coefficients of the authors' Listing 1 and their safety factor 1.01."""
    table = (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
    u = randn(6, 8)
    left, s, right = torch.linalg.svd(u, full_matrices=False)
    x = s / (1.01 * s.norm())
    for a, b, c in table:
        x = a / 1.01 * x + b / 1.01**3 * x**3 + c / 1.01**5 * x**5
    out = optim.step_tensors(m.Orthogonalize(method="polar_express"), [u.clone()])[0]
    torch.testing.assert_close(out, left @ torch.diag(x) @ right, rtol=0, atol=1e-10)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(6, 4)
        self.hidden = torch.nn.Linear(4, 4, bias=False)
        self.conv = torch.nn.Conv1d(4, 4, 3)
        self.gate = torch.nn.Linear(4, 1, bias=False)
        self.lm_head = torch.nn.Linear(4, 6, bias=False)


@pytest.mark.parametrize("name", ["muon", "normuon", "dion"])
def test_muon_leaves_embeddings_heads_vectors_and_thin_matrices_to_adam(name):
    torch.manual_seed(0)
    net = Model()
    for i, param in enumerate(net.parameters()):
        param.grad = randn(*param.shape, seed=i, dtype=torch.float32)
    adam = copy.deepcopy(net)
    before = copy.deepcopy(net)
    for mine, theirs in zip(net.parameters(), adam.parameters(), strict=True):
        theirs.grad = mine.grad.clone()
    mo.Optimizer(net, getattr(presets, name)(1e-2)).step()
    torch.optim.Adam(adam.parameters(), 1e-3 if name == "dion" else 1e-2).step()
    matrices = {"hidden.weight", "conv.weight"}
    for (key, mine), theirs, old in zip(net.named_parameters(), adam.parameters(), before.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6) == (key not in matrices), key
        assert not torch.equal(mine, old)


def test_split_takes_functions_of_name_and_owner():
    net = torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Linear(2, 2))
    seen = {}

    def is_embedding(tensor, name, owner):
        seen[name] = type(owner).__name__
        return isinstance(owner, torch.nn.Embedding)

    opt = mo.Optimizer(net, m.Split(is_embedding, m.LR(1.0), m.LR(0.0)))
    before = copy.deepcopy(net)
    opt.step(mo.closure(lambda: net(torch.arange(3)).sum()))
    assert seen == {"0.weight": "Embedding", "1.weight": "Linear", "1.bias": "Linear"}
    assert not torch.equal(net[0].weight, before[0].weight)
    assert torch.equal(net[1].weight, before[1].weight)
    with pytest.raises(TypeError, match=r"\(tensor, name, owner\)"):
        m.Split(lambda a, b: True, m.LR(1.0))


@pytest.mark.parametrize("warmup", [0, 5, 30])
@pytest.mark.parametrize("r", [0, 2])
def test_schedule_free_is_the_official_rule(warmup, r):
    def update(x, g, memory, t):
        if t == 1:
            memory.update(z=x.clone(), v=torch.zeros_like(x), lr_max=0.0, total=0.0)
        lr = 0.05 * (t / warmup if t < warmup else 1.0)
        memory["lr_max"] = max(lr, memory["lr_max"])
        weight = t**r * memory["lr_max"] ** 2
        memory["total"] += weight
        c = weight / memory["total"]
        memory["v"] = 0.999 * memory["v"] + 0.001 * g * g
        scaled = g / ((memory["v"] / (1 - 0.999**t)).sqrt() + 1e-8) + 0.1 * x
        y = x + c * (memory["z"] - x) + lr * (0.9 * (1 - c) - 1) * scaled
        memory["z"] = memory["z"] - lr * scaled
        return x - y

    links = lambda p: [  # noqa: E731
        m.Adam(beta1=0.0),
        m.WeightDecay(0.1),
        m.LR(0.05),
        m.ScheduleFree(0.9, r=r, warmup=warmup),
    ]
    close(run(links, steps=15), run(formula(update), steps=15))
    if r == 0:
        preset = lambda p: presets.schedule_free(0.05, weight_decay=0.1, warmup=warmup)  # noqa: E731
        close(run(preset, steps=15), run(formula(update), steps=15))


def test_prodigy_decays_weights_by_the_estimate():
    one, two = ([torch.nn.Parameter(torch.full((3,), 4.0, dtype=F64))] for _ in range(2))
    plain = mo.Optimizer(one, presets.prodigy(d0=0.1))
    decayed = mo.Optimizer(two, presets.prodigy(d0=0.1, weight_decay=0.5))
    for params, opt in ((one, plain), (two, decayed)):
        params[0].grad = torch.ones(3, dtype=F64)
        opt.step()
    # The decay is decoupled: moments do not include it, and the first step decays by d0 times the decay.
    close([one[0].detach() - two[0].detach()], [torch.full((3,), 0.1 * 0.5 * 4.0, dtype=F64)])
    assert torch.equal(plain.link("Prodigy").state[one[0]]["exp_avg"], decayed.link("Prodigy").state[two[0]]["exp_avg"])


def test_galore_follows_the_leading_directions_only():
    left, right = torch.linalg.qr(randn(6, 6))[0], torch.linalg.qr(randn(5, 5, seed=1))[0]
    u = left[:, :5] @ torch.diag(torch.tensor([9.0, 5.0, 1.0, 0.5, 0.1], dtype=F64)) @ right.T
    for matrix in (u, u.T.contiguous()):
        out = optim.step_tensors(m.GaLore(m.Identity(), rank=2, scale=0.5), [matrix.clone()])[0]
        P, S, Q = torch.linalg.svd(matrix, full_matrices=False)
        close([out], [0.5 * P[:, :2] @ torch.diag(S[:2]) @ Q[:2]])
        fira = optim.step_tensors(m.Fira(m.Mul(3.0), rank=2, scale=1.0), [matrix.clone()])[0]
        close([fira], [3 * matrix])  # all columns are scaled by three, inside and outside of the projection


def test_low_rank_states_are_small_and_bases_change_at_their_interval():
    w = torch.nn.Parameter(randn(40, 30))
    adam = m.Adam()
    link = m.GaLore(adam, rank=4, update_gap=3)
    opt = mo.Optimizer([w], link, m.LR(0.1))
    bases = []
    for t in range(4):
        w.grad = randn(40, 30, seed=t)
        opt.step()
        bases.append(link.state[w]["basis"].clone())
    assert torch.equal(bases[0], bases[2])
    assert not torch.equal(bases[2], bases[3])
    sizes = [
        tensor.numel() for row in adam.state.values() for tensor in row.values() if isinstance(tensor, torch.Tensor)
    ]
    assert sizes
    assert set(sizes) == {4 * 40}


def test_norms_of_fira_and_apollo_grow_slowly():
    link, w = m.APOLLO(m.Identity(), rank=2, growth=1.5, seed=0), [torch.zeros(6, 5, dtype=F64)]
    sizes = [optim.step_tensors(link, [randn(6, 5) * scale], params=w)[0].norm().item() for scale in (1.0, 10.0, 1.0)]
    assert sizes[1] == pytest.approx(1.5 * sizes[0])
    assert sizes[2] == pytest.approx(sizes[0])


def test_apollo_scales_columns_as_its_links_scale_the_projection():
    u = randn(6, 9)
    weights = torch.linspace(1, 9, 9, dtype=F64)
    link = m.APOLLO(m.UnaryLambda(lambda tensors: [t * weights for t in tensors]), rank=3, seed=0)
    close(optim.step_tensors(link, [u.clone()]), [u * weights])


def test_dion_of_full_rank_orthogonalises_its_momentum():
    link, w = m.Dion(momentum=0.0, rank=1.0, seed=0), [torch.zeros(6, 4, dtype=F64)]
    g = randn(6, 4)
    for _ in range(300):  # one step of power iteration each
        out = optim.step_tensors(link, [g.clone()], params=w)[0]
    left, _, right = torch.linalg.svd(g, full_matrices=False)
    close([out], [(6 / 4) ** 0.5 * left @ right], 1e-6)


def test_dion_is_its_paper():
    link, w = m.Dion(momentum=0.9, rank=2, seed=0), [torch.zeros(5, 4, dtype=F64)]
    M, Q = torch.zeros(5, 4, dtype=F64), None
    for t in range(4):
        g = randn(5, 4, seed=t)
        out = optim.step_tensors(link, [g.clone()], params=w)[0]
        if Q is None:
            Q = torch.linalg.qr(torch.randn(4, 2, dtype=F64, generator=torch.Generator().manual_seed(0)))[0]
        B = M + g
        P = torch.linalg.qr(B @ Q)[0]
        R = B.T @ P
        M = B - 0.1 * P @ R.T
        Q = R / R.norm(dim=0, keepdim=True)
        close([out], [(5 / 4) ** 0.5 * P @ Q.T])
        close([link.state[w[0]]["momentum"]], [M])


def test_qk_clip_brings_logits_back_to_the_bound():
    torch.manual_seed(0)
    q, k = (torch.nn.Parameter(torch.randn(8, 4, dtype=F64) * 3) for _ in range(2))
    x = torch.randn(10, 4, dtype=F64)

    def largest():
        a, b = ((x @ w.detach().T).reshape(10, 2, 4).transpose(0, 1) for w in (q, k))
        return (a @ b.mT).abs().amax((1, 2))

    before = largest()
    tau = float(before.mean())
    opt = mo.Optimizer([q, k], m.LR(0.0), m.QKClip([(q, k)], lambda: [largest()], tau=tau))
    opt.step(mo.closure(lambda: (q * k).sum()))
    torch.testing.assert_close(largest(), before.clamp(max=tau))
    with pytest.raises(ValueError, match="2 tensors for 1"):
        mo.Optimizer([q, k], m.LR(0.0), m.QKClip([(q, k)], lambda: [largest()] * 2)).step(
            mo.closure(lambda: (q * k).sum())
        )


def train(links, steps=60):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
    x = torch.randn(256, 64)
    y = torch.sin(x[:, :1] * 2)
    opt = mo.Optimizer(net, *links)
    losses = [opt.step(mo.closure(lambda: (net(x) - y).square().mean())).item() for _ in range(steps)]
    return net, opt, losses


def test_eight_bits_train_as_thirty_two_in_a_third_of_the_memory():
    _, _, wanted = train([m.Adam(), m.LR(3e-3)])
    net, opt, losses = train([m.Quantized(m.Adam()), m.LR(3e-3)])
    assert losses[-1] < 1.1 * wanted[-1]
    assert losses[-1] < 0.2 * losses[0]
    memory = opt.link("Quantized").memory()
    large = [p for p in net.parameters() if p.numel() >= 4096]
    assert memory <= 0.35 * sum(2 * p.numel() * 4 for p in large)
    # Quantised state is not also stored in full precision.
    for param in large:
        assert not any(isinstance(v, torch.Tensor) for v in opt.link("Adam").state[param].values())


def test_eight_bit_states_are_saved_and_resume_bit_by_bit():
    net, opt, _ = train([m.Quantized([m.Adam(), m.HeavyBall(0.5)]), m.LR(3e-3)], steps=5)
    other, fresh, _ = train([m.Quantized([m.Adam(), m.HeavyBall(0.5)]), m.LR(3e-3)], steps=0)
    other.load_state_dict(net.state_dict())
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    x = torch.randn(8, 64)
    for model, optimizer in ((net, opt), (other, fresh)):
        for _ in range(3):
            optimizer.step(mo.closure(lambda model=model: model(x).square().mean()))
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_quantized_refuses_links_that_are_not_pointwise():
    with pytest.raises(ValueError, match="Shampoo.*is not pointwise"):
        m.Quantized(m.Shampoo())
    with pytest.raises(ValueError, match="bits is 4"):
        m.Quantized(m.Adam(), bits=4)


def test_slow_mean_does_not_stick_in_eight_bits():
    """A running mean with beta 0.999 moves by less than a quantisation level per step; dithering makes it move on average."""
    link, w = m.Quantized(m.EMA(0.999)), [torch.zeros(4096)]
    first = torch.arange(4096) % 256 == 0
    for t in range(400):
        # The first entry of each block is the largest from the start, so the levels do not change.
        out = optim.step_tensors(link, [torch.where(first, 1000.0 if t == 0 else 1.0, 1.0)], params=w)[0]
    assert out[~first].mean().item() == pytest.approx(1 - 0.999**400, rel=0.05)


def test_lmo_of_each_ball():
    g = torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    expected = {
        "column": 4**0.5 * g / g.square().sum(0).sqrt(),
        "row": g / g.square().sum(1, keepdim=True).sqrt() / 3**0.5,
        "rms": g * (12**0.5 / g.norm()),
        "sign": g.sign() / 3,
    }
    for ball, out in expected.items():
        close(optim.step_tensors(m.LMO(ball, radius=2.0), [g.clone()]), [2 * out])
        # Vectors have the ball of "rms", except for signs.
        vector = g[0]
        unit = vector.sign() if ball == "sign" else vector * (3**0.5 / vector.norm())
        close(optim.step_tensors(m.LMO(ball), [vector.clone()]), [unit])


def test_adafactor_moves_parameters_that_are_zero():
    w, g = torch.zeros(3, dtype=F64), torch.tensor([1.0, -2.0, 3.0], dtype=F64)
    out = optim.step_tensors(m.Adafactor(relative_step=True), [g], params=[w])
    close(out, [g.sign() * 1e-3 * 1e-2])


def test_apollo_projects_to_the_expected_size():
    g = torch.randn(6, 8, dtype=F64, generator=torch.Generator().manual_seed(1))
    projected = torch.randn(3, 6, dtype=F64, generator=torch.Generator().manual_seed(0)) / 3**0.5 @ g
    out = optim.step_tensors(m.APOLLO(m.Sign(), rank=3, scale=1.0, seed=0), [g.clone()])
    close(out, [g * (projected.sign().norm(dim=0) / projected.norm(dim=0))])


def test_qk_clip_scales_the_parameters_after_the_step():
    w, u = randn(4, 3), randn(4, 3, seed=1)
    q, k = torch.nn.Parameter(w.clone()), torch.nn.Parameter(2 * w)
    link = m.QKClip([(q, k)], lambda: [torch.tensor([400.0, 50.0])], tau=100.0)
    opt = mo.Optimizer([q, k], m.LR(0.1), link)
    q.grad, k.grad = u.clone(), u.clone()
    opt.step()
    scale = torch.tensor([0.5, 0.5, 1.0, 1.0], dtype=F64)[:, None]
    close([q.detach(), k.detach()], [(w - 0.1 * u) * scale, (2 * w - 0.1 * u) * scale])


def test_eight_bit_moments_keep_their_size_and_small_ones_do_not_vanish():
    sizes = (10.0 ** -(torch.arange(32) % 5)).repeat_interleave(256)
    g = randn(8192, dtype=torch.float32) * sizes
    quantized, plain, w = m.Quantized(m.Adam()), m.Adam(), [torch.zeros(8192)]
    for _ in range(4):
        out, exact = (optim.step_tensors(link, [g.clone()], params=w)[0] for link in (quantized, plain))
    assert (out / exact - 1).abs().median() < 0.03
    uneven = torch.where(torch.arange(8192) % 256 == 0, 1.0, 1e-6)
    link = m.Quantized(m.Adam())
    for _ in range(100):
        out = optim.step_tensors(link, [uneven.clone()], params=w)[0]
    assert out.abs().max() < 2
