"""Backtracking takes the first of its lengths at which the condition holds."""

import pytest
import torch

import moduli as mo
from moduli import m

CONDITIONS = {
    "armijo": lambda f, f0, a, slope, c: f <= f0 + c * a * slope,
    "decrease": lambda f, f0, a, slope, c: f < f0,
    "goldstein": lambda f, f0, a, slope, c: f0 + (1 - c) * a * slope <= f <= f0 + c * a * slope,
}


@pytest.mark.parametrize("c", [0.1, 0.25, 0.4])
@pytest.mark.parametrize("start", [0.4, 1.0, -2.5])
@pytest.mark.parametrize("condition", list(CONDITIONS))
def test_the_first_length_that_meets_the_condition_is_taken(condition, start, c):
    def f(x):
        return x**4 - x**2

    w = torch.nn.Parameter(torch.tensor([start], dtype=torch.float64))
    search = m.Backtracking(init=8.0, beta=0.8, c=c, condition=condition, maxiter=60)
    mo.Optimizer([w], search).step(mo.closure(lambda: f(w).sum()))
    g = 4 * start**3 - 2 * start
    lengths = [8.0 * 0.8**k for k in range(60)]
    good = [a for a in lengths if CONDITIONS[condition](f(start - a * g), f(start), a, -g * g, c)]
    assert abs(w.item() - (start - good[0] * g)) < 1e-12


def test_the_conditions_choose_different_lengths():
    ends = set()
    for condition in CONDITIONS:
        w = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        search = m.Backtracking(init=1.2, beta=0.9, c=0.45, condition=condition, maxiter=60)
        mo.Optimizer([w], search).step(mo.closure(lambda w=w: (w**4 - w**2).sum()))
        ends.add(round(w.item(), 12))
    assert len(ends) >= 2
