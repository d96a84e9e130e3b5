"""Population links move members relative to each other, alone and after gradient links."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import moduli as mo
from launching import run_python
from m.population_cases import fitness, loss, population, put, rows, steps
from moduli import evolve, m

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
        search.tell(pop_losses(search.ask()))
        assert torch.equal(rows(pop), search.state["x"])
    assert opt.attrs["best_loss"] == search.best_fitness
    assert opt.num_evaluations == 20  # members are evaluated once, all at once


def pop_losses(members):
    """Return the losses of rows of parameters, evaluated as a population."""
    other = mo.Population.of(nn.Linear(2, 1, dtype=torch.float64), len(members))
    put(other, members)
    return other.losses(loss).detach()


def test_cem_sets_members_to_the_samples_of_its_search():
    pop = population()
    start = rows(pop)
    spread = float(start.std(0).mean())
    search = evolve.CEM(start.mean(0), population=8, sigma=spread, seed=1)
    opt = mo.Optimizer(pop, m.CEM(seed=1))
    for _ in range(10):
        opt.step(mo.closure(loss))
        asked = search.ask().clone()
        search.tell(pop_losses(asked))
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
def test_members_are_attracted_by_neighbours_on_the_ring_only(topology):
    # Only the best positions of neighbours attract a member; the same random numbers are drawn in both runs.
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
        before, after = pop_losses(x), pop_losses(trial)
        steps(opt, 1)
        assert torch.equal(rows(pop), torch.where((after <= before)[:, None], trial, x))


# ------------------------------------------------------------------ optimizers


@pytest.mark.parametrize("name", CHAINS)
def test_losses_decrease(name):
    pop = population(16)
    opt = mo.Optimizer(pop, *CHAINS[name]())
    first = pop.losses(loss).detach()
    steps(opt, 40)
    last = pop.losses(loss).detach()
    assert last.min() < 0.2 * first.min()
    assert opt.current_step == 40


def test_mixed_chain_is_gradient_step_and_swarm_move():
    # The update is the sum of the separate updates at the same point, with the same random numbers.
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


def test_de_after_adam_selects_between_the_gradient_step_and_a_trial():
    pop, twin = population(), population()
    opt = mo.Optimizer(pop, m.Adam(), m.LR(0.05), m.DE(seed=1))
    adam = mo.Optimizer(twin, m.Adam(), m.LR(0.05))
    steps(opt, 1)  # the first generation of DE is the members themselves
    steps(adam, 1)
    assert torch.equal(rows(pop), rows(twin))
    before = rows(pop)
    steps(opt, 1)
    steps(adam, 1)
    # Every member is its gradient step, or a trial with a lower loss.
    unchanged = (rows(pop) == rows(twin)).all(1)
    better = pop.losses(loss) < twin.losses(loss)
    assert bool((unchanged | better).all())
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
import m.test_population as t
results = []
for i, name in enumerate(t.SAVED):
    pop = t.population(seed=9)
    opt = mo.Optimizer(pop, *t.CHAINS[name]())
    mo.load(f"{sys.argv[1]}{i}", population=pop, optimizer=opt)
    t.steps(opt, 3)
    results.append(t.rows(pop))
torch.save(results, sys.argv[2])
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
    run_python("-c", SCRIPT, tmp_path / "run", tmp_path / "out.pt")
    for mine, resumed in zip(expected, torch.load(tmp_path / "out.pt"), strict=True):
        assert torch.equal(mine, resumed)


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
def test_every_population_size_works_or_is_refused(name, n):
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
def test_losses_without_information_leave_finite_parameters(name, value):
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
def test_equal_members_stay_finite(name):
    pop = mo.Population.of(nn.Linear(2, 1, dtype=torch.float64), 8)
    opt = mo.Optimizer(pop, *CHAINS[name]())
    steps(opt, 8)
    assert bool(rows(pop).isfinite().all())


def test_a_search_terminates_with_a_reason():
    pop = mo.Population.of(nn.Linear(2, 1, dtype=torch.float64), 8)
    opt = mo.Optimizer(pop, m.DE(seed=1))  # differences of equal members are zero
    for _ in range(3):
        steps(opt, 1)
    assert opt.should_terminate
    assert opt.reasons == [str(evolve.Reason.SMALL_STEP)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("make", [m.PSO, m.DE, m.GA, m.CEM])
def test_every_dtype_is_kept_and_improves(make, dtype):
    class Point(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Parameter(torch.randn(3, dtype=dtype))

    torch.manual_seed(0)
    pop = mo.Population.from_modules([Point() for _ in range(8)])
    opt = mo.Optimizer(pop, make(seed=0))
    first = None
    for _ in range(30):
        losses = opt.step(mo.closure(lambda net: (net.x.abs().float() - 0.5).square().sum()))
        first = losses.min() if first is None else first
    assert next(iter(pop.named_parameters()))[1].dtype is dtype
    assert losses.min() < first


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


def test_closures_that_give_no_loss_per_member_are_refused():
    pop = population()
    opt = mo.Optimizer(pop, m.PSO())
    before = rows(pop)
    with pytest.raises(mo.optim.ClosureError, match="one loss per member"):
        opt.step(mo.closure(lambda: pop.losses(loss).sum()))
    with pytest.raises(mo.optim.ClosureError, match="PSO needs the loss"):
        opt.step()
    assert torch.equal(rows(pop), before)


@pytest.mark.parametrize("make", [lambda: m.GA(seed=0), lambda: m.CEM(seed=0), lambda: m.DE(seed=0)])
def test_a_member_of_nan_does_not_spread(make):
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
