"""Population links: members of one population moved relative to each other, alone and mixed with gradient links."""

import copy
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import moduli as mo
from moduli import evolve, m

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(mo.__file__).parent.parent)}
X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)
Y = (X @ torch.tensor([[1.5], [-0.5]], dtype=torch.float64)).tanh()


def population(n=8, seed=0):
    torch.manual_seed(seed)
    return mo.Population.of(nn.Linear, n, 2, 1, dtype=torch.float64)


def loss(net):
    return (net(X).tanh() - Y).square().mean()


def rows(pop):
    return torch.cat([p.detach().reshape(len(pop), -1) for _, p in pop.named_parameters()], 1).clone()


def fitness(members):
    weight, bias = members[:, :2, None], members[:, 2]
    return ((X @ weight)[..., 0] + bias[:, None]).tanh().sub(Y[:, 0]).square().mean(1)


def steps(opt, count):
    return [opt.step(mo.closure(loss)) for _ in range(count)]


CHAINS = {
    "PSO": lambda: [m.PSO(seed=1)],
    "PSO, ring": lambda: [m.PSO(topology="ring", seed=1)],
    "PSO, informed": lambda: [m.PSO(topology="informed", seed=1)],
    "DE": lambda: [m.DE(seed=1)],
    "DE, best/1": lambda: [m.DE(strategy="best/1", seed=1)],
    "JADE": lambda: [m.DE(strategy="current-to-pbest/1", adapt="jade", seed=1)],
    "SHADE": lambda: [m.DE(strategy="current-to-pbest/1", adapt="shade", seed=1)],
    "GA": lambda: [m.GA(seed=1)],
    "CEM": lambda: [m.CEM(seed=1)],
    "Adam and PSO": lambda: [m.Adam(), m.LR(0.02), m.PSO(seed=1)],
    "Adam and DE": lambda: [m.ClipNorm(1.0), m.Adam(), m.LR(0.02), m.DE(seed=1)],
    "Adam and GA": lambda: [m.Adam(), m.LR(0.02), m.GA(seed=1)],
    "PBT": lambda: [m.Adam(), m.LR(0.1), m.PBT({"lr.lr": (1e-4, 1.0), "adam.beta1": (0.0, 0.95)}, every=3, seed=1)],
    "PBT of PSO": lambda: [m.PSO(seed=1), m.PBT({"pso.inertia": (0.3, 0.9)}, every=3, seed=1)],
}


# ------------------------------------------------------------------ what a link is


@pytest.mark.parametrize(
    ("link", "make"),
    [
        (lambda: m.DE(seed=1), lambda x: evolve.DE(x[0], population=8, initial=x, seed=1)),
        (
            lambda: m.DE(strategy="current-to-pbest/1", adapt="shade", seed=1),
            lambda x: evolve.DE(x[0], population=8, initial=x, seed=1, strategy="current-to-pbest/1", adapt="shade"),
        ),
        (lambda: m.GA(seed=1, elites=1), lambda x: evolve.GA(x[0], population=8, initial=x, seed=1, elites=1)),
    ],
)
def test_link_is_its_search_bit_for_bit(link, make):
    pop = population()
    search = make(rows(pop))
    opt = mo.Optimizer(pop, link())
    for _ in range(20):
        opt.step(mo.closure(loss))
        search.ask()
        search.tell(pop_losses(search.ask(), pop))
        assert torch.equal(rows(pop), search.state["x"])
    assert opt.attrs["best_loss"] == search.best_fitness
    assert opt.num_evaluations == 20  # members are evaluated once, all at once


def pop_losses(members, like):
    other = mo.Population.of(nn.Linear(2, 1, dtype=torch.float64), len(members))
    at = 0
    with torch.no_grad():
        for _, param in other.named_parameters():
            size = param[0].numel()
            param.copy_(members[:, at : at + size].reshape(param.shape))
            at += size
    return other.losses(loss).detach()


def test_cem_leaves_the_members_it_drew():
    pop = population()
    start = rows(pop)
    spread = float(start.std(0).mean())
    search = evolve.CEM(start.mean(0), population=8, sigma=spread, seed=1)
    opt = mo.Optimizer(pop, m.CEM(seed=1))
    for _ in range(10):
        opt.step(mo.closure(loss))
        asked = search.ask().clone()
        search.tell(pop_losses(asked, pop))
        assert torch.equal(rows(pop), asked)
    assert opt.attrs["best_loss"] == search.best_fitness


def test_pso_equals_the_formula_under_the_same_random_numbers():
    pop = population()
    opt = mo.Optimizer(pop, m.PSO(inertia=0.6, cognitive=1.2, social=0.9, seed=5))
    generator = torch.Generator().manual_seed(5)
    x = rows(pop).clone()
    v, place, best = torch.zeros_like(x), x.clone(), torch.full((8,), torch.inf, dtype=torch.float64)
    for _ in range(12):
        steps(opt, 1)
        values = fitness(x)
        for i in range(8):
            if values[i] < best[i]:
                best[i], place[i] = values[i], x[i]
        leader = int(best.argmin())
        r1, r2 = (torch.rand(x.shape, dtype=torch.float64, generator=generator) for _ in range(2))
        v = 0.6 * v + 1.2 * r1 * (place - x) + 0.9 * r2 * (place[leader] - x)
        x = x + v
        torch.testing.assert_close(rows(pop), x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("topology", ["ring", "informed"])
def test_neighbours_on_the_ring(topology):
    # Only the best place of neighbours pulls: with random numbers that are all used, far members do not matter.
    pop, other = population(), population()
    with torch.no_grad():
        for _, p in other.named_parameters():
            p[4] += 100.0  # opposite of member 0
    for each in (pop, other):
        steps(mo.Optimizer(each, m.PSO(topology=topology, radius=2, seed=2)), 1)
    a, b = rows(pop), rows(other)
    assert torch.equal(a[[0, 1, 7]], b[[0, 1, 7]])
    assert not torch.equal(a[4], b[4])


def test_de_equals_the_formula_under_the_same_random_numbers():
    # rand/1/bin with CR = 1: trials are x_a + F (x_b - x_c), and the better of trial and member stays.
    pop = population()
    opt = mo.Optimizer(pop, m.DE(scale=0.7, rate=1.0, seed=1))
    steps(opt, 1)
    search = opt.link("DE")._made
    for _ in range(10):
        x = rows(pop)
        trial = search.ask().clone()
        for i in range(8):
            candidates = [(a, b, c) for a in range(8) for b in range(8) for c in range(8) if len({i, a, b, c}) == 4]
            gaps = [float((x[a] + 0.7 * (x[b] - x[c]) - trial[i]).abs().max()) for a, b, c in candidates]
            assert min(gaps) < 1e-12
        before, after = pop_losses(x, pop), pop_losses(trial, pop)
        steps(opt, 1)
        assert torch.equal(rows(pop), torch.where((after <= before)[:, None], trial, x))


# ------------------------------------------------------------------ optimizers


@pytest.mark.parametrize("name", CHAINS)
def test_losses_go_down(name):
    pop = population(16)
    opt = mo.Optimizer(pop, *CHAINS[name]())
    first = pop.losses(loss).detach()
    steps(opt, 40)
    last = pop.losses(loss).detach()
    assert last.min() < 0.2 * first.min()
    assert opt.current_step == 40


def test_mixed_chain_is_gradient_step_and_swarm_move():
    # The update is the sum of what either alone would do at the same point with the same random numbers.
    pops = [population() for _ in range(3)]
    both = mo.Optimizer(pops[0], m.Adam(), m.LR(0.05), m.PSO(seed=4))
    adam, pso = mo.Optimizer(pops[1], m.Adam(), m.LR(0.05)), mo.Optimizer(pops[2], m.PSO(seed=4))
    for _ in range(6):
        start = rows(pops[0])
        for pop in pops[1:]:
            put(pop, start)
        for opt in (both, adam, pso):
            steps(opt, 1)
        torch.testing.assert_close(
            rows(pops[0]) - start, rows(pops[1]) - start + rows(pops[2]) - start, rtol=1e-9, atol=1e-12
        )
    assert both.num_evaluations == 6  # one evaluation gives the gradient and the members' losses


def put(pop, members):
    at = 0
    with torch.no_grad():
        for _, param in pop.named_parameters():
            size = param[0].numel()
            param.copy_(members[:, at : at + size].reshape(param.shape))
            at += size


def test_mixed_chain_with_de_begins_where_the_gradient_leads():
    pop, twin = population(), population()
    opt = mo.Optimizer(pop, m.Adam(), m.LR(0.05), m.DE(seed=1))
    adam = mo.Optimizer(twin, m.Adam(), m.LR(0.05))
    steps(opt, 1)  # the first generation of DE is the members themselves
    steps(adam, 1)
    assert torch.equal(rows(pop), rows(twin))
    before = rows(pop)
    steps(opt, 1)
    steps(adam, 1)
    # Every member is its gradient step, or a trial that is better than that.
    kept = (rows(pop) == rows(twin)).all(1)
    better = pop.losses(loss) < twin.losses(loss)
    assert bool((kept | better).all())
    assert not torch.equal(rows(pop), before)


def test_links_after_a_search_scale_its_move():
    pop, twin = population(), population()
    a, b = mo.Optimizer(pop, m.GA(seed=1), m.LR(0.5)), mo.Optimizer(twin, m.GA(seed=1))
    steps(a, 1)
    steps(b, 1)
    start = rows(pop)
    assert torch.equal(start, rows(twin))
    steps(a, 1)
    steps(b, 1)
    torch.testing.assert_close(rows(pop), 0.5 * (start + rows(twin)), rtol=1e-12, atol=1e-12)


def test_moved_members_are_evaluated_again():
    pop = population()
    opt = mo.Optimizer(pop, m.DE(seed=1))
    steps(opt, 3)
    assert opt.num_evaluations == 3
    with torch.no_grad():
        next(iter(pop.named_parameters()))[1].add_(3.0)
    steps(opt, 1)
    assert opt.num_evaluations == 5
    torch.testing.assert_close(opt.link("DE").global_state["search"]["fitness"], pop.losses(loss).detach())


# ------------------------------------------------------------------ saving


@pytest.mark.parametrize("name", CHAINS)
def test_resume_is_exact(name):
    pop = population()
    opt = mo.Optimizer(pop, *CHAINS[name]())
    steps(opt, 4)
    other = population(seed=9)
    put(other, rows(pop))
    resumed = mo.Optimizer(other, *CHAINS[name]())
    resumed.load_state_dict(opt.state_dict())
    pairs = [(other, resumed), copy.deepcopy((pop, opt)), pickle.loads(pickle.dumps((pop, opt)))]
    for _ in range(5):
        steps(opt, 1)
        for twin, optimizer in pairs:
            steps(optimizer, 1)
            assert torch.equal(rows(twin), rows(pop))


SCRIPT = """
import sys, torch, moduli as mo
from moduli import m
sys.path.insert(0, sys.argv[3])
import test_population as t
found = []
for i, name in enumerate(t.SAVED):
    pop = t.population(seed=9)
    opt = mo.Optimizer(pop, *t.CHAINS[name]())
    mo.load(f"{sys.argv[1]}{i}", population=pop, optimizer=opt)
    t.steps(opt, 3)
    found.append(t.rows(pop))
torch.save(found, sys.argv[2])
"""
SAVED = ("Adam and PSO", "SHADE", "PBT")


def test_resume_in_a_new_process(tmp_path):
    expected = []
    for i, name in enumerate(SAVED):
        pop = population()
        opt = mo.Optimizer(pop, *CHAINS[name]())
        steps(opt, 4)
        mo.save(tmp_path / f"run{i}", population=pop, optimizer=opt)
        steps(opt, 3)
        expected.append(rows(pop))
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(tmp_path / "out.pt"), here],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for mine, found in zip(expected, torch.load(tmp_path / "out.pt"), strict=True):
        assert torch.equal(mine, found)


@pytest.mark.parametrize("name", CHAINS)
def test_an_error_in_the_closure_undoes_the_step(name):
    pop, twin = population(), population()
    opt, same = (mo.Optimizer(each, *CHAINS[name]()) for each in (pop, twin))
    steps(opt, 3)
    steps(same, 3)
    before = rows(pop)

    def fails(net):
        raise RuntimeError("no loss today")

    with pytest.raises(RuntimeError, match="no loss today"):
        opt.step(mo.closure(fails))
    assert torch.equal(rows(pop), before)
    steps(opt, 2)
    steps(same, 2)
    assert torch.equal(rows(pop), rows(twin))


# ------------------------------------------------------------------ odd cases


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", CHAINS)
def test_sizes(name, n):
    pop = population(n)
    least = 4 if "DE" in name or "JADE" in name else 1
    if n < least:
        with pytest.raises(ValueError, match=f"at least {least}"):
            mo.Optimizer(pop, *CHAINS[name]())
        return
    opt = mo.Optimizer(pop, *CHAINS[name]())
    for _ in range(8):
        steps(opt, 1)
    assert bool(rows(pop).isfinite().all())


@pytest.mark.parametrize("value", [math.nan, math.inf, 1.0])
@pytest.mark.parametrize("name", CHAINS)
def test_losses_that_say_nothing(name, value):
    pop = population()
    opt = mo.Optimizer(pop, *CHAINS[name]())
    for _ in range(12):
        opt.step(mo.closure(lambda net: 0 * net.weight.sum() + value))
    assert bool(rows(pop).isfinite().all())


@pytest.mark.parametrize("name", CHAINS)
def test_members_without_a_loss_are_the_worst(name):
    pop = population(16)
    opt = mo.Optimizer(pop, *CHAINS[name]())
    first = pop.losses(loss).detach().min()
    for _ in range(30):
        opt.step(mo.closure(lambda net: torch.where(net.bias[0] > 0.4, torch.inf, loss(net))))
    good = pop.losses(loss).detach()
    assert good[good.isfinite()].min() < first


@pytest.mark.parametrize("name", CHAINS)
def test_equal_members(name):
    pop = mo.Population.of(nn.Linear(2, 1, dtype=torch.float64), 8)
    opt = mo.Optimizer(pop, *CHAINS[name]())
    steps(opt, 8)
    assert bool(rows(pop).isfinite().all())


def test_a_search_terminates_with_a_reason():
    pop = mo.Population.of(nn.Linear(2, 1, dtype=torch.float64), 8)
    opt = mo.Optimizer(pop, m.DE(seed=1))  # differences of equal members are nothing
    for _ in range(3):
        steps(opt, 1)
    assert opt.should_terminate
    assert opt.reasons == [str(evolve.Reason.SMALL_STEP)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("make", [m.PSO, m.DE, m.GA, m.CEM])
def test_dtypes(make, dtype):
    class Point(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.randn(3, dtype=dtype))

    torch.manual_seed(0)
    pop = mo.Population.from_modules([Point() for _ in range(8)])
    opt = mo.Optimizer(pop, make(seed=0))
    first = None
    for _ in range(30):
        found = opt.step(mo.closure(lambda net: (net.x.abs().float() - 0.5).square().sum()))
        first = found.min() if first is None else first
    assert next(iter(pop.named_parameters()))[1].dtype is dtype
    assert found.min() < first


# ------------------------------------------------------------------ population-based training


class Counted(nn.Module):
    """A model with a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.register_buffer("mark", torch.zeros(2, dtype=torch.float64))

    def forward(self):
        return (self.w - 2).square().sum()


def test_pbt_takes_over_weights_buffers_and_state():
    torch.manual_seed(3)
    pop = mo.Population.from_modules([Counted() for _ in range(8)])
    with torch.no_grad():
        dict(pop.named_buffers())["mark"].copy_(torch.arange(16, dtype=torch.float64).reshape(8, 2))
    links = [m.Adam(), m.EMA(0.9), m.LR(0.05), m.PBT({"lr.lr": (1e-3, 1.0)}, every=4, share=0.25, seed=2)]
    opt = mo.Optimizer(pop, *links)
    plain = copy.deepcopy(pop)
    reference = mo.Optimizer(plain, m.Adam(), m.EMA(0.9), m.LR(0.05))
    reference.link("LR").set_param_groups(
        [{"params": [p for _, p in plain.named_parameters()], "lr": opt.attrs["hyperparameters"]["lr.lr"].clone()}]
    )
    for _ in range(4):
        losses = opt.step(mo.closure(lambda net: net()))
        reference.step(mo.closure(lambda net: net()))
    order = losses.argsort()
    replaced = opt.attrs["replaced"]
    assert set(replaced) == set(order[-2:].tolist())
    assert set(replaced.values()) <= set(order[:2].tolist())
    index = torch.arange(8)
    for target, source in replaced.items():
        index[target] = source
    for (_, mine), (_, theirs) in zip(pop.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(mine, theirs[index])
    marks = torch.arange(16, dtype=torch.float64).reshape(8, 2)
    assert torch.equal(dict(pop.named_buffers())["mark"], marks[index])
    for name in ("Adam", "EMA"):
        mine, theirs = (next(iter(each.link(name).state.values())) for each in (opt, reference))
        for key, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(mine[key], value[index]), key


def test_pbt_explores_within_the_limits():
    pop = population(16)
    opt = mo.Optimizer(pop, m.LR(0.1), m.PBT({"lr.lr": (0.01, 0.5)}, every=2, perturb=0.5, seed=0))
    seen = [opt.attrs["hyperparameters"]["lr.lr"]]
    assert len(set(seen[0].tolist())) == 16
    assert 0.01 <= seen[0].min() < 0.03 < 0.2 < seen[0].max() <= 0.5
    for t in range(1, 21):
        steps(opt, 1)
        now = opt.attrs["hyperparameters"]["lr.lr"]
        if t % 2:
            assert torch.equal(now, seen[-1])
        else:
            changed = (now != seen[-1]).nonzero()[:, 0].tolist()
            for i in changed:
                source = opt.attrs["replaced"][i]
                ratio = float(now[i] / seen[-1][source])
                assert min(abs(ratio - 0.5), abs(ratio - 1.5)) < 1e-6 or float(now[i]) in (
                    pytest.approx(0.01),
                    pytest.approx(0.5),
                )
            seen.append(now)
        assert now.min() >= 0.01 - 1e-9
        assert now.max() <= 0.5 + 1e-7


def test_pbt_gives_members_their_own_settings_from_the_first_step_on():
    pop, twin = population(), population()
    opt = mo.Optimizer(pop, m.LR(0.1), m.PBT({"lr.lr": (1e-3, 1.0)}, every=100, seed=1))
    rates = opt.attrs["hyperparameters"]["lr.lr"].double()
    start = rows(twin)
    steps(opt, 1)
    gradient = torch.cat(
        [
            g.reshape(8, -1)
            for g in torch.autograd.grad(twin.losses(loss).sum(), [p for _, p in twin.named_parameters()])
        ],
        1,
    )
    torch.testing.assert_close(rows(pop), start - rates[:, None] * gradient, rtol=1e-6, atol=1e-9)


def test_pbt_finds_the_good_learning_rates():
    pop = population(16)
    opt = mo.Optimizer(pop, m.LR(1.0), m.PBT({"lr.lr": (1e-6, 1.0)}, every=5, seed=0))
    first = opt.attrs["hyperparameters"]["lr.lr"].log().mean()
    steps(opt, 100)
    assert opt.attrs["hyperparameters"]["lr.lr"].log().mean() > first + 3
    assert pop.losses(loss).max() < 1e-2


def test_pbt_copies_the_state_of_links_that_run_on_each_member():
    pop = population()
    opt = mo.Optimizer(pop, m.GaLore(m.SOAP(), rank=1), m.LR(0.01), m.PBT({"lr.lr": (1e-3, 0.1)}, every=3, seed=1))
    steps(opt, 3)
    link = opt.link("GaLore")
    states = [dict(row) for _, part in link.links() for row in part.state.values()]
    kept = [value for value in pytree.tree_leaves(states) if isinstance(value, torch.Tensor)]
    assert kept
    assert opt.attrs["replaced"]
    for target, source in opt.attrs["replaced"].items():
        assert all(torch.equal(value[target], value[source]) for value in kept)
    steps(opt, 3)
    assert bool(rows(pop).isfinite().all())


def test_pbt_copies_the_matrices_of_links_that_run_for_all_members_at_once():
    pop = population()
    opt = mo.Optimizer(pop, m.SOAP(), m.LR(0.01), m.PBT({"lr.lr": (1e-3, 0.1)}, every=3, seed=1))
    steps(opt, 3)
    states = opt.link("SOAP").state
    held = [matrix for state in states.values() for key in ("covariances", "rows") for matrix in state[key]]
    assert held
    assert opt.attrs["replaced"]
    for target, source in opt.attrs["replaced"].items():
        assert all(torch.equal(matrix[target], matrix[source]) for matrix in held)


def test_pbt_with_parameters_that_are_thawed_later():
    pop = population()
    named = dict(pop.named_parameters())
    named["bias"].requires_grad_(False)
    opt = mo.Optimizer(pop, m.Adam(), m.LR(0.1), m.PBT({"lr.lr": (1e-3, 1.0)}, every=2, seed=1))
    steps(opt, 2)
    for target, source in opt.attrs["replaced"].items():
        assert torch.equal(named["bias"][target], named["bias"][source])
    named["bias"].requires_grad_(True)
    steps(opt, 4)
    assert bool(rows(pop).isfinite().all())


# ------------------------------------------------------------------ links that decide for each member

DECIDING = {
    "Backtracking": lambda: [m.Backtracking(init=4.0)],
    "Backtracking, goldstein": lambda: [m.Backtracking(init=8.0, condition="goldstein", c=0.2)],
    "Backtracking, decrease": lambda: [m.Backtracking(init=64.0, condition="decrease", maxiter=3)],
    "Adam, Backtracking": lambda: [m.Adam(), m.Backtracking(init=2.0)],
    "uphill": lambda: [m.Negate(), m.Backtracking(init=1.0)],
    "LBFGS": lambda: [m.LBFGS(history_size=3), m.LR(0.2)],
    "LBFGS, restarts": lambda: [m.LBFGS(history_size=3, ptol=1e-2, ptol_restart=True, gtol_restart=True), m.LR(0.2)],
    "LBFGS, Backtracking": lambda: [m.LBFGS(history_size=4), m.Backtracking()],
    "LBFGS, every other": lambda: [m.LBFGS(update_freq=2, scale_first=False), m.Backtracking()],
    "AdaptiveBacktracking": lambda: [m.AdaptiveBacktracking(init=4.0)],
    "StrongWolfe": lambda: [m.StrongWolfe(a_init="first-order")],
    "StrongWolfe, uphill": lambda: [m.Negate(), m.StrongWolfe(plus_minus=True)],
    "LBFGS, StrongWolfe": lambda: [m.LBFGS(history_size=4), m.StrongWolfe()],
    "BFGS": lambda: [m.BFGS(), m.LR(0.2)],
    "BFGS, StrongWolfe": lambda: [m.BFGS(), m.StrongWolfe()],
    "BFGS, restarts": lambda: [m.BFGS(restart_interval=3, ptol=1e-2, ptol_restart=True), m.Backtracking()],
    "BFGS of the Hessian": lambda: [m.BFGS(inverse=False), m.Backtracking()],
    "DFP": lambda: [m.DFP(init_scale=0.5, beta=0.3), m.Backtracking()],
    "PolakRibiere": lambda: [m.PolakRibiere(), m.StrongWolfe(c2=0.1, a_init="first-order")],
    "HagerZhang": lambda: [m.HagerZhang(), m.Backtracking()],
}


def bent(net):
    return (net(X).tanh() - Y).square().sum() + 0.1 * (net.weight**4).sum()


def apart(pop, links, count, fn=bent):
    """What each member becomes with an optimizer of its own."""
    out = []
    for i in range(len(pop)):
        net = copy.deepcopy(pop[i])
        opt = mo.Optimizer(net, *links())
        for _ in range(count):
            opt.step(mo.closure(fn))
        out.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    return torch.stack(out)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("name", DECIDING)
def test_members_decide_as_separate_optimizers_do(name, n):
    pop = population(n, seed=2)
    with torch.no_grad():
        for _, p in pop.named_parameters():
            p.mul_(torch.linspace(0.1, 4, n, dtype=torch.float64).reshape(-1, *[1] * (p.dim() - 1)))
    expected = apart(pop, DECIDING[name], 12)
    opt = mo.Optimizer(pop, *DECIDING[name]())
    for _ in range(12):
        opt.step(mo.closure(bent))
    torch.testing.assert_close(rows(pop), expected, rtol=1e-8, atol=1e-9)


def test_members_accept_different_lengths():
    class Steep(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.x = nn.Parameter(torch.ones(2, dtype=torch.float64))
            self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64))

        def forward(self):
            return 0.5 * self.scale * self.x.square().sum()

    pop = mo.Population.from_modules([Steep(scale) for scale in (0.5, 3.0, 100.0, math.nan, 0.0)])
    opt = mo.Optimizer(pop, m.Backtracking(init=1.0, beta=0.5))
    losses = opt.step(mo.closure(lambda net: net()))
    x = next(iter(pop.parameters()))
    lengths = [1.0, 0.5, 2**-6]
    for i, (length, scale) in enumerate(zip(lengths, (0.5, 3.0, 100.0), strict=True)):
        torch.testing.assert_close(x[i].detach(), torch.full((2,), 1 - length * scale, dtype=torch.float64))
    assert torch.equal(x[3:].detach(), torch.ones(2, 2, dtype=torch.float64))  # nothing to descend: they stay
    assert bool((pop.losses(lambda net: net())[:3] < losses[:3]).all())


def test_a_member_that_finds_nothing_begins_shorter_next_time():
    pop = population(3)
    with torch.no_grad():
        for _, p in pop.named_parameters():
            p[1] *= 50

    def wild(net):
        return bent(net) * 1e6 ** net.weight.abs().max().detach().clamp(max=2)

    expected = apart(pop, lambda: [m.Backtracking(init=1e6, maxiter=4)], 8, wild)
    opt = mo.Optimizer(pop, m.Backtracking(init=1e6, maxiter=4))
    for _ in range(8):
        opt.step(mo.closure(wild))
    torch.testing.assert_close(rows(pop), expected, rtol=1e-8, atol=1e-9)
    assert opt.link("Backtracking").global_state["scale"].shape == (3,)


@pytest.mark.parametrize(
    "name", ["LBFGS, Backtracking", "LBFGS", "Adam, Backtracking", "BFGS, StrongWolfe", "PolakRibiere"]
)
def test_deciding_links_resume_exactly(name):
    pop = population(4, seed=2)
    opt = mo.Optimizer(pop, *DECIDING[name]())
    for _ in range(5):
        opt.step(mo.closure(bent))
    other = population(4, seed=9)
    put(other, rows(pop))
    resumed = mo.Optimizer(other, *DECIDING[name]())
    resumed.load_state_dict(opt.state_dict())
    pairs = [(other, resumed), copy.deepcopy((pop, opt)), pickle.loads(pickle.dumps((pop, opt)))]
    for _ in range(4):
        opt.step(mo.closure(bent))
        for twin, optimizer in pairs:
            optimizer.step(mo.closure(bent))
            assert torch.equal(rows(twin), rows(pop))


def test_lbfgs_of_members_reaches_the_optimum_of_each():
    pop = population(6, seed=1)
    opt = mo.Optimizer(pop, m.LBFGS(), m.Backtracking())
    for _ in range(40):
        opt.step(mo.closure(bent))
    losses = pop.losses(bent).sum()
    grads = torch.autograd.grad(losses, list(pop.parameters()))
    assert max(float(g.abs().max()) for g in grads) < 1e-6


def test_lbfgs_of_members_starts_afresh_when_parameters_change():
    pop = population(3)
    named = dict(pop.named_parameters())
    named["bias"].requires_grad_(False)
    opt = mo.Optimizer(pop, m.LBFGS(), m.Backtracking())
    for _ in range(3):
        opt.step(mo.closure(bent))
    assert int(opt.link("LBFGS").global_state["pairs"].max()) == 2
    named["bias"].requires_grad_(True)
    opt.step(mo.closure(bent))
    assert int(opt.link("LBFGS").global_state["pairs"].max()) == 0
    for _ in range(3):
        opt.step(mo.closure(bent))
    assert bool(rows(pop).isfinite().all())


def test_lbfgs_with_swarm_and_exchange():
    # Pairs follow their members when losers take over from winners.
    pop = population(8)
    opt = mo.Optimizer(pop, m.LBFGS(), m.Backtracking(), m.PBT({}, every=3, seed=0))
    for _ in range(3):
        opt.step(mo.closure(bent))
    link = opt.link("LBFGS")
    for target, source in opt.attrs["replaced"].items():
        assert link.global_state["pairs"][target] == link.global_state["pairs"][source]
        for state in link.state.values():
            assert torch.equal(state["s"][target], state["s"][source])
    for _ in range(12):
        losses = opt.step(mo.closure(bent))
    assert bool(losses.isfinite().all())


def test_lbfgs_of_members_refuses_what_it_has_not():
    with pytest.raises(mo.optim.ChainError, match="damping"):
        mo.Optimizer(population(), m.LBFGS(damping="powell"), m.Backtracking())
    with pytest.raises(mo.optim.ChainError, match="AdaptiveBisection"):
        mo.Optimizer(population(), m.LBFGS(), m.AdaptiveBisection())


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize("make", [m.PSO, m.DE, m.GA, m.CEM, lambda: m.PBT({"lr.lr": (0.1, 1.0)})])
def test_one_model_is_refused_when_built(make):
    with pytest.raises(mo.optim.ChainError, match="population"):
        mo.Optimizer(nn.Linear(2, 1), m.LR(0.1), make())


def test_a_population_too_small_is_refused_when_built():
    with pytest.raises(ValueError, match="DE needs at least"):
        mo.Optimizer(population(2), m.DE())


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: m.PSO(topology="star"), "topology"),
        (lambda: m.PSO(radius=0), "radius"),
        (lambda: m.PSO(inertia=math.nan), "inertia"),
        (lambda: m.DE(strategy="worst/1"), "strategy"),
        (lambda: m.DE(adapt="jade"), "JADE"),
        (lambda: m.DE(p=0.0), "p="),
        (lambda: m.GA(tournament=0), "tournament"),
        (lambda: m.GA(elites=-1), "elites"),
        (lambda: m.CEM(elites=0.0), "elites"),
        (lambda: m.CEM(smoothing=2.0), "smoothing"),
        (lambda: m.PBT({"lr": (0.1, 1.0)}), "names no link"),
        (lambda: m.PBT({"lr.lr": (1.0, 0.1)}), "limits"),
        (lambda: m.PBT({"lr.lr": (0.1, 1.0)}, every=0), "every"),
        (lambda: m.PBT({"lr.lr": (0.1, 1.0)}, share=0.9), "share"),
    ],
)
def test_options_are_checked_at_construction(make, word):
    with pytest.raises((ValueError, TypeError), match=word):
        make()


def test_pbt_names_have_to_fit_the_chain():
    with pytest.raises(mo.optim.ChainError, match=r"0 links.*'adam.beta1'"):
        mo.Optimizer(population(), m.LR(0.1), m.PBT({"adam.beta1": (0.1, 0.9)}))
    with pytest.raises(mo.optim.ChainError, match=r"2 links.*'lr.lr'"):
        mo.Optimizer(population(), m.LR(0.1), m.LR(0.1), m.PBT({"lr.lr": (0.1, 0.9)}))
    opt = mo.Optimizer(population(), m.LR(0.1), m.LR(0.1), m.PBT({"1.LR.lr": (0.1, 0.9)}, every=2))
    steps(opt, 4)


def test_closures_that_give_no_loss_per_member_are_refused():
    pop = population()
    opt = mo.Optimizer(pop, m.PSO())
    before = rows(pop)
    with pytest.raises(mo.optim.ClosureError, match="one loss per member"):
        opt.step(mo.closure(lambda: pop.losses(loss).sum()))
    with pytest.raises(mo.optim.ClosureError, match="PSO needs the loss"):
        opt.step()
    assert torch.equal(rows(pop), before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_pbt_replaces_a_member_whose_loss_is_no_number(value):
    pop = mo.Population.from_modules([torch.nn.Linear(2, 1, bias=False) for _ in range(6)])
    weight = dict(pop.named_parameters())["weight"]
    with torch.no_grad():
        weight[4] = value
    opt = mo.Optimizer(pop, m.LR(0.01), m.PBT({"lr.lr": (1e-3, 1.0)}, every=1, share=0.2, seed=0))
    opt.step(mo.closure(lambda net: net(torch.ones(1, 2)).square().sum()))
    assert list(opt.attrs["replaced"]) == [4]
    assert weight.isfinite().all()


@pytest.mark.parametrize("make", [lambda: m.GA(seed=0), lambda: m.CEM(seed=0), lambda: m.DE(seed=0)])
def test_a_member_that_is_no_number_does_not_spread(make):
    pop = mo.Population.from_modules([torch.nn.Linear(2, 1, bias=False) for _ in range(16)])
    weight = dict(pop.named_parameters())["weight"]
    opt = mo.Optimizer(pop, make())
    for generation in range(12):
        if generation in (0, 5):
            with torch.no_grad():
                weight[4] = torch.nan
        losses = opt.step(mo.closure(lambda net: net(torch.ones(1, 2)).square().sum()))
    assert weight.isfinite().all()
    assert losses.isfinite().all()
