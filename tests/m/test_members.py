"""A population in one optimizer moves as its members in separate optimizers, or is refused."""

import pathlib

import pytest
import torch

import moduli as mo
from launching import load_program
from m.stacked import Stacked, apart, together
from moduli import m, optim

ROWS = pathlib.Path(__file__).parents[1] / "laws" / "rows"
FAMILIES = ("meta", "misc", "ops", "projections", "restarts", "smoothing", "termination")


def rows():
    for family in FAMILIES:
        if not (ROWS / f"{family}.py").exists():
            continue
        yield from load_program(ROWS / f"{family}.py").ROWS


@pytest.mark.parametrize("row", list(rows()), ids=str)
def test_population_is_a_loop(row):
    try:
        mo.Optimizer(Stacked().population, *row.links())
    except optim.ChainError:
        with pytest.raises(optim.ChainError, match="population"):
            mo.Optimizer(Stacked().population, *row.links())
        return
    params = together(row.links)
    if row.random:  # all members share one stream of random numbers
        assert all(torch.isfinite(tensor).all() for tensor in params)
        return
    for a, b in zip(params, apart(row.links), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_links_inside_others_are_refused_too():
    with pytest.raises(optim.ChainError, match="AdaptiveBisection needs"):
        mo.Optimizer(Stacked().population, m.Split("weight", m.AdaptiveBisection(), m.LR(0.1)))


def test_a_population_terminates_with_its_last_member():
    population = Stacked(2)
    with torch.no_grad():
        for p, c in zip(population.params.values(), population.targets, strict=True):
            p[0] = c[0]  # the first member starts at its optimum
    opt = mo.Optimizer(population.population, m.TerminateByGradientNorm(1e-6, n=1), m.LR(0.1))
    opt.step(mo.closure(population.losses))
    assert not opt.should_terminate
    for _ in range(300):
        opt.step(mo.closure(population.losses))
        if opt.should_terminate:
            break
    assert opt.should_terminate
    assert "the gradient has norm" in opt.reasons[0]


def test_every_member_has_its_own_best():
    population = Stacked(2)
    opt = mo.Optimizer(population.population, m.SaveBest(), m.LR(torch.tensor([0.1, 3.0])))
    start = [p.detach().clone() for p in population.params.values()]
    for _ in range(4):
        opt.step(mo.closure(population.losses))
    best = opt.attrs["best_params"]
    assert torch.equal(best[0][1], start[0][1])  # its rate makes it diverge from the first step
    assert not torch.equal(best[0][0], start[0][0])
    opt.attrs["load_best_params"]()
    assert torch.allclose(population.losses().detach(), opt.attrs["best_loss"])


def test_noise_on_a_sphere_is_drawn_for_each_member():
    population = Stacked(3)
    objective = optim.Objective(list(population.params.values()), members=3)
    out = m.RandomSample(distribution="sphere", variance=4.0, seed=0).step(objective).updates
    lengths = sum(tensor.flatten(1).square().sum(1) for tensor in out).sqrt()
    torch.testing.assert_close(lengths, torch.full((3,), 2.0 * 10**0.5, dtype=torch.float64))
