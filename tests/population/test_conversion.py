"""Converting a population between steps converts the state of its optimizer too."""

import copy

import pytest
import torch
from torch import nn

import moduli as mo
from moduli import m

X = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(6, 3)

CHAINS = {
    "adam": lambda: [m.Adam(), m.LR(0.05)],
    "rates": lambda: [m.Adam(), m.LR(torch.logspace(-3, -1, 4))],
    "momentum": lambda: [m.HeavyBall(0.9), m.LR(0.05)],
    "matrices": lambda: [m.Orthogonalize(), m.LR(0.05)],
    "factors": lambda: [m.Shampoo(), m.LR(0.05)],
    "swarm": lambda: [m.Adam(), m.LR(0.05), m.PSO(seed=0)],
    "groups": lambda: [m.Adam(), m.GradientAccumulation(2), m.LR(0.05)],
}


def make():
    torch.manual_seed(0)
    return mo.Population.of(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), 4)


def step(pop, opt):
    x = X.to(pop.matrix.dtype)
    return opt.step(mo.closure(lambda: pop.losses(lambda net: (net(x) - 1).square().mean())))


def test_members_step_as_torch_with_converted_state():
    pop = make()
    opt = mo.Optimizer(pop, m.Adam(), m.LR(0.05))
    nets = pop.to_modules()
    theirs = [torch.optim.Adam(net.parameters(), lr=0.05) for net in nets]
    for dtype in (torch.float32, torch.float64, torch.float64, torch.float32):
        pop.to(dtype)
        for net, each in zip(nets, theirs, strict=True):
            net.to(dtype)
            for row in each.state.values():
                row.update({key: row[key].to(dtype) for key in ("exp_avg", "exp_avg_sq")})
            for _ in range(2):
                each.zero_grad()
                (net(X.to(dtype)) - 1).square().mean().backward()
                each.step()
        for _ in range(2):
            step(pop, opt)
        assert opt.link("Adam").state["0.weight"]["exp_avg"].dtype is dtype
        # They differ by the rounding of the first steps, which were in single precision.
        torch.testing.assert_close(pop.matrix, mo.Population.from_modules(nets).matrix, rtol=1e-4, atol=1e-5)
    assert "had become torch.float64 on cpu, and their state with them" in opt.explain()


HALF = [(name, torch.bfloat16) for name in ("adam", "rates", "momentum", "swarm")]


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float64) for name in CHAINS), *HALF])
def test_steps_after_a_conversion_are_those_of_a_converted_checkpoint(name, dtype):
    pop = make()
    opt = mo.Optimizer(pop, *CHAINS[name]())
    for _ in range(3):
        step(pop, opt)
    saved = copy.deepcopy(opt.state_dict())
    twin = pop.clone().to(dtype)
    pop.to(dtype)
    other = mo.Optimizer(twin, *CHAINS[name]())
    other.load_state_dict(saved)
    for _ in range(3):
        step(pop, opt)
        step(twin, other)
    assert pop.matrix.dtype is dtype
    assert torch.equal(pop.matrix, twin.matrix)


def test_gradients_are_converted_with_the_population():
    pop = make()
    opt = mo.Optimizer(pop, m.LR(0.1))
    pop.losses(lambda net: (net(X.float()) - 1).square().mean()).sum().backward()
    before = [leaf.grad.clone() for leaf in pop.parameters()]
    values = pop.matrix.clone()
    pop.to(torch.float64)
    assert all(
        leaf.grad.dtype is torch.float64 and torch.equal(leaf.grad, old.double())
        for leaf, old in zip(pop.parameters(), before, strict=True)
    )
    opt.step()
    moved = torch.cat([grad.flatten(1) for grad in before], 1).double()
    torch.testing.assert_close(pop.matrix, values.double() - 0.1 * moved)
