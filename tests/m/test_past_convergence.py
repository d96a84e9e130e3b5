"""Steps past convergence in float32: links that estimate curvature raise nothing and leave finite parameters."""

import pytest
import torch
from torch import nn

import moduli as mo
from laws.registry import collect
from moduli import m
from moduli.m import quasi_newton
from moduli.population import Population

# Minima are at zero, so that steps and gradients shrink until their products underflow.
WEIGHTS = torch.logspace(-2, 1, 6)
FEATURES = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
PROBLEMS = {
    "bowl": lambda w: (WEIGHTS * w * w).sum(-1),
    "quartic": lambda w: (w**4).sum(-1) + 0.5 * (w**2).sum(-1),
    "log cosh": lambda w: (w @ FEATURES.T).cosh().log().mean(-1) + 0.05 * (w * w).sum(-1),
}
FAMILIES = (
    "quasi_newton",
    "conjugate_gradient",
    "second_order",
    "trust_region",
    "least_squares",
    "step_size._adaptive",
)
ROWS = [
    row
    for row in collect()
    if not row.members
    and row.target in ("bowl", "rosenbrock")
    and any(name in type(link).__module__ for top in row.links() for _, link in top.links() for name in FAMILIES)
    and not row.name.startswith("Split")
]
INVERSE = {row.name: row for row in ROWS if row.name in quasi_newton.__all__}
HESSIAN = [name for name in INVERSE if {"inverse", "hessian"} <= getattr(getattr(m, name), "rules", {}).keys()]
LEARNERS = [name for name in INVERSE if name not in ("SG2", "GradientCorrection")]


def walk(opt, losses, steps):
    for _ in range(steps):
        opt.step(mo.closure(losses, fixed=True))


def run(links, steps, starts):
    """Step past convergence on each problem.

    Args:
        links: A function that returns the links.
        steps: The number of steps.
        starts: The distance from the minimum to start at, for each problem.
    """
    for function, start in zip(PROBLEMS.values(), starts, strict=True):
        w = nn.Parameter(start * torch.randn(6, generator=torch.Generator().manual_seed(1)))
        torch.manual_seed(0)
        opt = mo.Optimizer([w], *links())
        walk(opt, lambda w=w, function=function: function(w), steps)
        assert bool(torch.isfinite(w).all())


@pytest.fixture
def lengths(pytestconfig):
    """Return pairs of a number of steps and the starting distances for each problem."""
    if pytestconfig.getoption("--all"):
        return [(200, (start,) * 3) for start in (1.0, 1e-2, 1e-5, 1e-8)]
    return [(40, (1.0, 1e-5, 1e-8))]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_steps_raise_nothing(row, lengths):
    for steps, starts in lengths:
        run(row.links, steps, starts)


@pytest.mark.parametrize("name", HESSIAN)
def test_steps_with_the_hessian_raise_nothing(name, lengths):
    for steps, starts in lengths:
        run(lambda: [getattr(m, name)(inverse=False), m.StrongWolfe()], steps, starts)


@pytest.mark.parametrize("name", LEARNERS)
def test_skipped_pairs_are_counted(name):
    """Equal gradients give no pair: each step after the first skips one."""
    w, c = nn.Parameter(torch.ones(3)), torch.tensor([1.0, 2.0, 3.0])
    opt = mo.Optimizer([w], getattr(m, name)(), m.LR(1e-3))
    for step in range(4):
        opt.step(lambda: (c * w).sum())
        assert opt.attrs.get(f"{name}.skipped_pairs", 0) == step
    opt.step(lambda: 0.5 * (c * w * w).sum())
    assert opt.attrs[f"{name}.skipped_pairs"] == 3


# The formula of Thomas' method depends on the length of the step.
@pytest.mark.parametrize("name", [name for name in LEARNERS if name != "ThomasOptimalMethod"])
def test_steps_are_proportional_to_the_start(name):
    """Steps on a quadratic are proportional to the start, exactly for powers of two, until products underflow."""

    def end(scale):
        w = nn.Parameter(scale * torch.randn(6, generator=torch.Generator().manual_seed(1)))
        opt = mo.Optimizer([w], getattr(m, name)(), m.LR(0.05))
        for _ in range(6):
            opt.step(lambda: PROBLEMS["bowl"](w))
        return w.detach() / scale, opt.attrs.get(f"{name}.skipped_pairs", 0)

    expected, skipped = end(2.0**-10)
    for exponent in (-25, -40, -50, -56, -58, -60, -62, -64, -66, -80, -100, -126):
        got, more = end(2.0**exponent)
        assert bool(torch.isfinite(got).all())
        assert more == skipped or exponent < -25
        if more == skipped:
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


class Point(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(w)


@pytest.mark.parametrize("name", ["LBFGS", "BFGS", "DFP", "BroydenBad", "NewDQN"])
def test_members_of_a_population_raise_nothing(name):
    start = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))
    points = [Point(scale * w) for scale, w in zip((1e-8, 1e-18, 1e-30), start, strict=True)]
    for function in PROBLEMS.values():
        population = Population.from_modules(points)
        (w,) = population.parameters()
        opt = mo.Optimizer(population, getattr(m, name)(), m.LR(0.5))
        walk(opt, lambda w=w, function=function: function(w), 40)
        assert bool(torch.isfinite(w).all())
