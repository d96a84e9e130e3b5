"""Distribution links step exactly as the searches of `moduli.evolve`, started at the parameters of one model."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import moduli as mo
from launching import run_python
from moduli import evolve, m

LINKS = {
    "OpenES": (lambda: m.OpenES(population=12, sigma=0.2, seed=3), {"population": 12, "sigma": 0.2}),
    "PGPE": (lambda: m.PGPE(population=12, sigma=0.2, seed=3), {"population": 12, "sigma": 0.2}),
    "ARS": (lambda: m.ARS(population=12, sigma=0.2, top=4, seed=3), {"population": 12, "sigma": 0.2, "top": 4}),
    "GuidedES": (lambda: m.GuidedES(population=12, sigma=0.2, seed=3), {"population": 12, "sigma": 0.2}),
    "SNES": (lambda: m.SNES(population=12, sigma=0.3, seed=3), {"population": 12, "sigma": 0.3}),
    "XNES": (lambda: m.XNES(population=12, sigma=0.3, seed=3), {"population": 12, "sigma": 0.3}),
    "CMAES": (lambda: m.CMAES(population=9, sigma=0.3, seed=3), {"population": 9, "sigma": 0.3}),
    "sep-CMAES": (
        lambda: m.CMAES(population=9, sigma=0.3, covariance="separable", seed=3),
        {"population": 9, "sigma": 0.3, "covariance": "separable"},
    ),
}
ESTIMATES = ["OpenES", "PGPE", "ARS", "GuidedES"]
MOVES = [name for name in LINKS if name not in ESTIMATES]


class Bowl(nn.Module):
    """A quadratic with a known gradient, over two parameters."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=dtype))
        self.bias = nn.Parameter(torch.tensor([2.0, -1.0], dtype=dtype))

    def forward(self):
        x = torch.cat([self.weight.reshape(-1), self.bias])
        return 0.5 * (torch.arange(1, 7, dtype=x.dtype) * x * x).sum()


def vector(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def values(rows):
    return 0.5 * (torch.arange(1, 7, dtype=rows.dtype) * rows * rows).sum(1)


def chain(name, lr=0.01):
    link = LINKS[name][0]()
    return [link, m.LR(lr)] if name in ESTIMATES else [link]


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("form", ["of the model", "of nothing"])
def test_link_is_its_search_bit_for_bit(name, form):
    net = Bowl()
    search = getattr(evolve, name.removeprefix("sep-"))(vector(net), seed=3, **LINKS[name][1])
    opt = mo.Optimizer(net, *chain(name))
    for _ in range(15):
        opt.step(mo.closure((lambda net: net()) if form == "of the model" else (lambda: net())))
        search.tell(values(search.ask()))
        assert torch.equal(vector(net), search.mean)
    assert opt.attrs["best_loss"] == search.best_fitness
    assert opt.num_evaluations == search.evaluations


@pytest.mark.parametrize("name", ESTIMATES)
def test_estimates_descend_as_the_search_does(name):
    net = Bowl()
    search = getattr(evolve, name)(vector(net), seed=3, optimizer="sgd", lr=0.01, **LINKS[name][1])
    opt = mo.Optimizer(net, *chain(name, 0.01))
    for _ in range(15):
        opt.step(mo.closure(lambda net: net()))
        search.tell(values(search.ask()))
        torch.testing.assert_close(vector(net), search.mean, rtol=1e-12, atol=1e-12)


def test_an_estimate_into_adam_is_the_search_with_adam():
    net = Bowl()
    search = evolve.OpenES(vector(net), seed=3, optimizer="adam", lr=0.05, population=12, sigma=0.2)
    opt = mo.Optimizer(net, m.OpenES(population=12, sigma=0.2, seed=3), m.Adam(), m.LR(0.05))
    for _ in range(20):
        opt.step(mo.closure(lambda net: net()))
        search.tell(values(search.ask()))
    torch.testing.assert_close(vector(net), search.mean, rtol=1e-7, atol=1e-7)


def test_small_estimates_are_not_rounded_to_the_size_of_the_parameters():
    class Far(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.full((3,), 1000.0))

        def forward(self):
            return 1e-7 * self.x.sum()

    net, seen = Far(), []

    class Look(mo.optim.Module):
        def apply(self, objective):
            seen.append(objective.get_updates()[0].clone())
            return objective

    mo.Optimizer(net, m.OpenES(population=400, sigma=10.0, shape="raw"), Look()).step(mo.closure(lambda net: net()))
    assert 0 < seen[0].abs().max() < 1e-5
    # float32 numbers near 1000 are 6e-5 apart: a difference of two points would have been zero.


@pytest.mark.parametrize("antithetic", [True, False])
def test_open_es_estimates_the_gradient_of_a_quadratic_within_confidence_bounds(antithetic):
    # E f(x + sigma e) = f(x) + sigma^2 tr(A) / 2 has the same gradient as f; the mean over seeds must be near it.
    net = Bowl()
    exact = torch.arange(1, 7, dtype=torch.float64) * vector(net)
    estimates = []
    for seed in range(60):
        link = m.OpenES(population=50, sigma=0.1, antithetic=antithetic, shape="raw", seed=seed)
        objective = mo.optim.Objective(list(net.parameters()), mo.closure(lambda net: net()), model=net)
        out = mo.optim.step(objective, [link])
        estimates.append(torch.cat([u.reshape(-1) for u in out.get_updates()]))
    estimates = torch.stack(estimates)
    error = estimates.std(0) / math.sqrt(len(estimates))
    assert bool(((estimates.mean(0) - exact).abs() < 4.5 * error).all())
    assert bool((error < (1.0 if antithetic else 40.0)).all())


def test_links_after_an_estimate_use_it_as_the_gradient():
    net = Bowl()
    seen = []

    class Look(mo.optim.Module):
        def apply(self, objective):
            seen.append((objective.get_grads(), objective.get_updates()))
            return objective

    opt = mo.Optimizer(net, m.OpenES(population=8), m.ClipNorm(1e-3), Look(), m.LR(1.0))
    opt.step(mo.closure(lambda net: net()))
    grads, updates = seen[0]
    assert math.isclose(math.sqrt(sum(float(u.square().sum()) for u in updates)), 1e-3, rel_tol=1e-6)
    assert sum(float(g.square().sum()) for g in grads) > 1e-3
    assert opt.num_evaluations == 8  # no gradient was evaluated


@pytest.mark.parametrize("name", LINKS)
def test_together_equals_one_by_one(name):
    torch.manual_seed(0)
    x, y = torch.randn(10, 3), torch.randn(10, 2)
    first = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    first[0].bias.requires_grad_(False)
    second[0].bias.requires_grad_(False)
    third[0].bias.requires_grad_(False)

    def loss(net):
        return (net(x) - y).square().mean()

    a, b = mo.Optimizer(first, *chain(name)), mo.Optimizer(second, *chain(name))
    c = mo.Optimizer([p for p in third.parameters() if p.requires_grad], *chain(name))
    for _ in range(4):
        a.step(mo.closure(loss))
        b.step(mo.closure(lambda: loss(second)))
        c.step(lambda backward=True: loss(third))
        for p, q, r in zip(first.parameters(), second.parameters(), third.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
            assert torch.equal(q, r)
    assert a.num_evaluations == b.num_evaluations == c.num_evaluations


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_every_dtype_is_kept_and_moves(name, dtype):
    w = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]).to(dtype))
    opt = mo.Optimizer([w], *chain(name))
    for _ in range(5):
        opt.step(mo.closure(lambda: w.abs().float().square().sum()))
    assert w.dtype is dtype
    assert bool(torch.isfinite(w.detach().abs().float()).all())
    assert not torch.equal(w.detach(), torch.tensor([1.0, -2.0, 3.0]).to(dtype))


# ------------------------------------------------------------------ saving


@pytest.mark.parametrize("name", LINKS)
def test_resume_is_exact(name):
    net = Bowl()
    opt = mo.Optimizer(net, *chain(name))
    for _ in range(3):
        opt.step(mo.closure(lambda net: net()))
    other = Bowl()
    other.load_state_dict(net.state_dict())
    resumed = mo.Optimizer(other, *chain(name))
    resumed.load_state_dict(opt.state_dict())
    both = copy.deepcopy((net, opt)), pickle.loads(pickle.dumps((net, opt)))
    for _ in range(4):
        opt.step(mo.closure(lambda net: net()))
        for twin, optimizer in ((other, resumed), *both):
            optimizer.step(mo.closure(lambda net: net()))
            assert torch.equal(vector(twin), vector(net))
    assert resumed.attrs["best_loss"] == opt.attrs["best_loss"]


SCRIPT = """
import sys, torch, moduli as mo
from moduli import m
params = []
for i, links in enumerate(([m.CMAES(seed=1)], [m.OpenES(population=8), m.Adam(), m.LR(0.1)])):
    net = torch.nn.Linear(2, 1).double()
    opt = mo.Optimizer(net, *links)
    mo.load(f"{sys.argv[1]}{i}", net, optimizer=opt)
    for _ in range(3):
        opt.step(mo.closure(lambda f: (f(torch.ones(1, 2).double()) - 3).square().mean()))
    params += [p.detach() for p in net.parameters()]
torch.save(params, sys.argv[2])
"""


def test_resume_in_a_new_process(tmp_path):
    torch.manual_seed(0)
    expected = []
    for i, links in enumerate(([m.CMAES(seed=1)], [m.OpenES(population=8), m.Adam(), m.LR(0.1)])):
        net = nn.Linear(2, 1).double()
        opt = mo.Optimizer(net, *links)
        for t in range(6):
            if t == 3:
                mo.save(tmp_path / f"run{i}", net, optimizer=opt)
            opt.step(mo.closure(lambda f: (f(torch.ones(1, 2).double()) - 3).square().mean()))
        expected += [p.detach() for p in net.parameters()]
    run_python("-W", "error", "-c", SCRIPT, tmp_path / "run", tmp_path / "out.pt")
    for param, resumed in zip(expected, torch.load(tmp_path / "out.pt"), strict=True):
        assert torch.equal(param, resumed)


def test_a_failed_generation_changes_nothing():
    net, twin = Bowl(), Bowl()
    opt, same = (mo.Optimizer(model, m.CMAES(population=6, seed=1)) for model in (net, twin))
    opt.step(mo.closure(lambda net: net()))
    same.step(mo.closure(lambda net: net()))
    before, calls = vector(net), []

    def fails():
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("evaluation 4")
        return net()

    with pytest.raises(RuntimeError, match="evaluation 4"):
        opt.step(mo.closure(fails))
    assert torch.equal(vector(net), before)
    for _ in range(3):
        opt.step(mo.closure(lambda net: net()))
        same.step(mo.closure(lambda net: net()))
    assert torch.equal(vector(net), vector(twin))


# ------------------------------------------------------------------ odd cases


@pytest.mark.parametrize("population", [1, 2, 3, 7])
@pytest.mark.parametrize("make", [m.OpenES, m.PGPE, m.GuidedES, m.SNES, m.XNES, m.CMAES])
def test_every_population_size_works_or_is_refused(make, population):
    net = Bowl()
    least = make(population=64).search(torch.zeros(2)).least
    if population < least:
        with pytest.raises(ValueError, match="population"):
            make(population=population)
        return
    opt = mo.Optimizer(net, make(population=population), m.LR(0.01))
    for _ in range(5):
        opt.step(mo.closure(lambda net: net()))
    assert bool(vector(net).isfinite().all())


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.0])
def test_losses_without_information_leave_finite_parameters(name, value):
    net = Bowl()
    before = vector(net)
    opt = mo.Optimizer(net, *chain(name))
    for _ in range(12):
        opt.step(mo.closure(lambda net: 0 * net() + value))
    assert bool(vector(net).isfinite().all())
    if value != -math.inf:
        torch.testing.assert_close(vector(net), before, rtol=0.9, atol=3.0)
    if name in ESTIMATES:
        torch.testing.assert_close(vector(net), before)


@pytest.mark.parametrize("name", LINKS)
def test_a_model_whose_loss_is_nan_is_the_worst(name):
    net = Bowl()
    opt = mo.Optimizer(net, *chain(name, 0.02))
    first = net().item()
    for _ in range(60):
        # The loss is NaN in half of the space and decreases in the rest.
        opt.step(mo.closure(lambda net: torch.where(net.bias[0] > 2.2, torch.nan, net())))
    assert net().item() < first
    assert opt.attrs["best_loss"] < first


def test_terminates_with_a_reason():
    net = Bowl()
    opt = mo.Optimizer(net, m.CMAES(sigma=0.5))
    steps = 0
    while not opt.should_terminate:
        opt.step(mo.closure(lambda net: net()))
        steps += 1
        assert steps < 1000
    assert opt.reasons in ([str(reason)] for reason in (evolve.Reason.SMALL_STEP, evolve.Reason.FLAT))
    assert net().item() < 1e-12
    nowhere = Bowl()
    opt = mo.Optimizer(nowhere, m.SNES(population=8))
    for _ in range(10):
        opt.step(mo.closure(lambda net: net() * torch.nan))
    assert opt.reasons == [str(evolve.Reason.NOT_FINITE)]


def test_restarts_move_the_parameters_to_a_new_start():
    net = Bowl()
    opt = mo.Optimizer(net, m.CMAES(sigma=0.5, restarts="ipop", max_restarts=2))
    sizes = set()
    for _ in range(700):
        before = opt.num_evaluations
        opt.step(mo.closure(lambda net: net()))
        sizes.add(opt.num_evaluations - before)
        if opt.should_terminate:
            break
    assert len(sizes) == 3
    assert opt.reasons == [str(evolve.Reason.RESTARTS)]


def test_a_link_after_a_search_scales_its_step():
    # LR scales the step of the search, which continues from the parameters.
    net = Bowl()
    opt = mo.Optimizer(net, m.CMAES(sigma=0.5, seed=2), m.LR(0.5))
    search = evolve.CMAES(vector(net), sigma=0.5, seed=2)
    start = vector(net)
    opt.step(mo.closure(lambda net: net()))
    search.tell(values(search.ask()))
    torch.testing.assert_close(vector(net), 0.5 * (start + search.mean), rtol=1e-12, atol=1e-12)
    for _ in range(100):
        opt.step(mo.closure(lambda net: net()))
    assert net().item() < 1e-2


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("make", [m.OpenES, m.PGPE, m.ARS, m.GuidedES, m.SNES, m.XNES, m.CMAES])
def test_a_population_is_refused_when_built(make):
    pop = mo.Population.of(nn.Linear, 4, 2, 1)
    with pytest.raises(mo.optim.ChainError, match=f"{make.__name__}.*one model"):
        mo.Optimizer(pop, make())


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: m.OpenES(sigma=0.0), "sigma"),
        (lambda: m.OpenES(shape="cubes"), "shape"),
        (lambda: m.OpenES(population=0), "population"),
        (lambda: m.ARS(population=5), "even"),
        (lambda: m.ARS(top=100), "top"),
        (lambda: m.GuidedES(alpha=2.0), "alpha"),
        (lambda: m.CMAES(covariance="round"), "covariance"),
        (lambda: m.CMAES(restarts="often"), "restarts"),
        (lambda: m.CMAES(sigma=-1.0), "sigma"),
        (lambda: m.SNES(sigma=0.0), "sigma"),
        (lambda: m.XNES(population=1.5), "population"),
    ],
)
def test_options_are_checked_at_construction(make, word):
    with pytest.raises((ValueError, TypeError), match=word):
        make()


def test_a_step_needs_a_closure_that_returns_one_number():
    net = Bowl()
    opt = mo.Optimizer(net, m.SNES())
    with pytest.raises(mo.optim.ClosureError, match="SNES needs"):
        opt.step()
    before = vector(net)
    with pytest.raises(ValueError, match="one number per member"):
        opt.step(mo.closure(lambda net: net.bias * 1.0))
    assert torch.equal(vector(net), before)


def test_memory_does_not_grow_with_the_number_of_models():
    script = """
import resource, torch, moduli as mo
from moduli import m
torch.set_num_threads(1)
net = torch.nn.Linear(1000, 250, bias=False)
x = torch.ones(1, 1000)
for population in (64, 192):
    opt = None
    opt = mo.Optimizer(net, m.OpenES(population=population, sigma=0.1), m.LR(0.1))
    opt.step(mo.closure(lambda f: f(x).square().mean()))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    peak = [int(line) for line in run_python("-c", script).split()]
    # In kilobytes: storing 128 more models of 250,000 parameters would take 128,000.
    assert peak[1] - peak[0] < 16_000
