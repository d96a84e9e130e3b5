"""Links that decide for each member of a population (searches, L-BFGS) against one optimizer per model."""

import copy
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import moduli as mo
from m.population_cases import X, Y, population, put, rows
from moduli import m

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(mo.__file__).parent.parent)}

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


@pytest.mark.parametrize("name", DECIDING)
def test_members_on_a_parabola_decide_as_separate_optimizers_do(name):
    def parabola(net):  # which searches and the first scale of a quasi-Newton matrix recognise by its values
        return (net(X) - Y).square().mean()

    pop = population(4, seed=3)
    expected = apart(pop, DECIDING[name], 4, parabola)
    opt = mo.Optimizer(pop, *DECIDING[name]())
    for _ in range(4):
        opt.step(mo.closure(parabola))
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
