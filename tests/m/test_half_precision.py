"""Half-precision parameters accumulate updates that are smaller than their rounding."""

import copy

import pytest
import torch

import moduli as mo
from moduli import kernels, m, presets
from moduli.optim import ChainError

LAST = {"stochastic": lambda: m.StochasticRounding(seed=3), "Kahan": m.Kahan, "master": m.MasterWeights}
HALVES = [torch.bfloat16, torch.float16]


def make_params(dtype, memory_format=torch.contiguous_format):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    image = draw(2, 3, 4, 4).to(memory_format=memory_format)
    return [torch.nn.Parameter(x) for x in (draw(7, 5), draw(300), image, draw(), torch.ones(3))]


def train(params, *links, steps=20, rate=1e-3, resume=None, **options):
    make = lambda: mo.Optimizer(params, m.Adam(), m.LR(rate), *(link() for link in links), **options)  # noqa: E731
    optimizer, generator = make(), torch.Generator().manual_seed(1)
    for step in range(steps):
        if step == resume:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make()
            optimizer.load_state_dict(saved)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    return [param.detach().clone() for param in params], optimizer


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_small_steps_add_up(last, dtype):
    rate = 1e-4 if dtype is torch.bfloat16 else 1e-5
    w = torch.nn.Parameter(torch.ones(2000, dtype=dtype))
    optimizers = {False: mo.Optimizer([w], m.Adam(), m.LR(rate))}
    optimizers[True] = mo.Optimizer([w], m.Adam(), m.LR(rate), LAST[last]())
    ends = {}
    for remedied, optimizer in optimizers.items():
        w.data.fill_(1.0)
        for _ in range(200):
            w.grad = torch.ones_like(w)
            optimizer.step()
        ends[remedied] = w.double().mean().item()
    assert ends[False] == 1.0
    # A mean of 2,000 stochastic roundings has a smaller error than one rounding; the other remedies round an exact sum once.
    gap = torch.finfo(dtype).eps / 2
    assert abs(ends[True] - (1 - 200 * rate)) < (gap / 2 if last != "stochastic" else gap / 8) * 1.01


@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_fused_unfused_and_resumed_runs_are_equal_bit_for_bit(last, dtype, layout):
    whole, _ = train(make_params(dtype, layout), LAST[last])
    unfused, _ = train(make_params(dtype, layout), LAST[last], fuse=False)
    resumed, optimizer = train(make_params(dtype, layout), LAST[last], resume=10)
    assert all(map(torch.equal, whole, resumed))
    for a, b in zip(whole, unfused, strict=True):
        if last == "stochastic" and a.dtype is dtype:
            # A processor may round the last bit of float32 differently, which changes one in thousands of draws.
            assert (a != b).float().mean() <= 0.05
            torch.testing.assert_close(a, b, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
        else:
            assert torch.equal(a, b)
    plain, _ = train(make_params(dtype, layout))
    assert any(not torch.equal(a, b) for a, b in zip(whole, plain, strict=True))
    assert torch.equal(whole[-1], plain[-1])  # float32 parameters are not rounded
    assert "one pass" in optimizer.explain()


@pytest.mark.parametrize("form", ["foreach", "plain"])
@pytest.mark.parametrize("last", LAST)
def test_every_form_rounds_alike(monkeypatch, form, last):
    compiled, _ = train(make_params(torch.bfloat16), LAST[last], steps=5)
    monkeypatch.setenv("MODULI_KERNELS", form)
    kernels.reset()
    try:
        other, _ = train(make_params(torch.bfloat16), LAST[last], steps=5)
    finally:
        monkeypatch.undo()
        kernels.reset()
    for a, b in zip(compiled, other, strict=True):
        assert torch.equal(a, b) or (a.float() - b.float()).abs().max() <= 2**-7 * a.float().abs().max()


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "soap", "sgd", "prodigy", "adafactor"])
def test_master_weights_follow_the_run_in_single_precision(name):
    """With presets, bfloat16 parameters with master weights are those of a float32 run, rounded."""
    torch.manual_seed(0)
    start, pulls = torch.randn(6, 5).bfloat16().float(), torch.randn(12, 6, 5).bfloat16().float()
    wide, half = (torch.nn.Parameter(start.to(dtype, copy=True)) for dtype in (torch.float32, torch.bfloat16))
    rate = {} if name == "prodigy" else {"lr": 1e-3}
    runs = [
        (wide, mo.Optimizer([wide], getattr(presets, name)(**rate))),
        (half, mo.Optimizer([half], getattr(presets, name)(**rate), master="float32")),
    ]
    for pull in pulls:
        for param, optimizer in runs:
            param.grad = pull.to(param.dtype)
            optimizer.step()
    master = runs[1][1].link("MasterWeights").state[half]["master"]
    moved = (wide.detach() - start).abs().max()
    assert moved > 0
    assert (master - wide.detach()).abs().max() <= 0.02 * moved  # weight decay uses the rounded parameters
    assert torch.equal(half.detach(), master.bfloat16())


def test_a_master_follows_values_that_a_program_writes():
    w = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = mo.Optimizer([w], m.LR(1e-4), master="float32")
    w.grad = torch.ones_like(w)
    optimizer.step()
    with torch.no_grad():
        w[1] = 5.0
    optimizer.step()
    torch.testing.assert_close(
        optimizer.link("MasterWeights").state[w]["master"], torch.tensor([1 - 2e-4, 5 - 1e-4, 1 - 2e-4])
    )


def test_tensors_of_one_size_and_seeds_have_different_draws():
    ends = {}
    for seed in (0, 1):
        params = [torch.nn.Parameter(x.bfloat16()) for x in torch.linspace(1, 2, 2000).reshape(2, 1000)]
        optimizer = mo.Optimizer(params, m.LR(1e-3), m.StochasticRounding(seed=seed))
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        ends[seed] = [(param.detach() != was) for param, was in zip(params, before, strict=True)]
    alike = [(ends[0][0] == ends[0][1]).float().mean(), (ends[0][0] == ends[1][0]).float().mean()]
    assert ends[0][0].float().mean() == pytest.approx(1e-3 * 2**7, abs=0.05)
    assert max(alike) < 0.9


def test_members_in_half_precision_move_by_small_steps():
    net = torch.nn.Linear(3, 2).bfloat16()
    population = mo.Population.from_modules([net, net, net])
    optimizer = mo.Optimizer(population, m.Adam(), m.LR(1e-4), m.StochasticRounding())
    x = torch.ones(4, 3, dtype=torch.bfloat16)
    for _ in range(50):
        optimizer.zero_grad()
        population.losses(lambda f: f(x).float().sum()).sum().backward()
        optimizer.step()
    moved = population[0].weight.detach().float() - net.weight.detach().float()
    assert moved.mean().item() == pytest.approx(-5e-3, abs=2e-3)


def test_wrong_positions_and_dtypes_are_refused():
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(ChainError, match="Kahan at 0.Kahan must be the last link"):
        mo.Optimizer([w], m.Kahan(), m.LR(1e-3))
    with pytest.raises(ChainError, match="must be the last link"):
        mo.Optimizer([w], m.LR(1e-3), m.Kahan(), master="float32")
    with pytest.raises(ValueError, match="master is \"bfloat16\"|master is 'bfloat16'"):
        mo.Optimizer([w], m.LR(1e-3), master="bfloat16")
    with pytest.raises(ValueError, match="seed"):
        m.StochasticRounding(seed=-1)
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        kernels.round_stochastically(torch.ones(2), torch.ones(2), 0, 0, torch.float32)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounding_is_right_on_average_also_at_the_edges(dtype):
    """Check values between two numbers of the dtype, exact and subnormal values, infinities and NaN."""
    info = torch.finfo(dtype)
    for x in (1.001, -0.3333, info.smallest_normal * 0.7 if dtype is torch.float16 else 1e-30, 1000.1):
        values = torch.full((40_000,), x)
        rounded = kernels.round_stochastically(values, values, 1, 1, dtype)
        assert torch.equal(rounded.to(dtype).float(), rounded)
        assert rounded.unique().numel() == 2
        apart = (rounded.max() - rounded.min()).item()
        assert abs(rounded.double().mean().item() - values[0].item()) < 4 * apart / 40_000**0.5 / 2
    special = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf")])
    assert torch.equal(kernels.round_stochastically(special, special, 1, 1, dtype), special)
    assert kernels.round_stochastically(torch.tensor([float("nan")]), special[:1], 1, 1, dtype).isnan().all()
