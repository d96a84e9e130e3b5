"""Restarts happen by the criteria of the papers, and reset the inner links."""

import pytest
import torch

import moduli as mo
from m.first_order import close, run
from moduli import m, optim


def resets(link, gradients, inner):
    """Return at which of a series of gradients (1, 2, ...) a link reset its inner link.

    Args:
        link: The link that restarts.
        gradients: The series.
        inner: Its inner link.
    """
    p = torch.nn.Parameter(torch.zeros(len(gradients[0])))
    times = []
    inner.reset = lambda: times.append(time[0])
    time = [0]
    for gradient in gradients:
        time[0] += 1
        objective = optim.Objective([p])
        objective.grads = [torch.tensor(gradient)]
        link.step(objective)
    return times


def test_powell_restarts_if_neighbouring_gradients_are_not_orthogonal():
    inner = m.Identity()
    link = m.PowellRestart(inner, cond2=None)
    # Orthogonal neighbours do not restart, parallel ones do, also after a restart.
    series = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]
    assert resets(link, series, inner) == [4, 6]


def test_powell_restarts_after_a_bad_direction():
    # The update is subtracted, so a descent direction has a positive product with the gradient.
    series = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    good, bad, long = m.Identity(), m.Negate(), m.Mul(3.0)
    assert resets(m.PowellRestart(good, cond1=None), series, good) == []
    assert resets(m.PowellRestart(bad, cond1=None), series, bad) == [2, 3]
    assert resets(m.PowellRestart(long, cond1=None), series, long) == [2, 3]


def test_birgin_martinez_steps_along_the_gradient_after_a_restart():
    inner = m.Negate()
    w = torch.nn.Parameter(torch.ones(2))
    opt = mo.Optimizer([w], m.BirginMartinezRestart(inner), m.LR(0.1))
    opt.step(mo.closure(lambda: w.sum()))
    torch.testing.assert_close(w.data, torch.full((2,), 0.9))


def test_every_n_steps_inside_and_outside():
    inside = run(lambda p: [m.RestartEvery(m.HeavyBall(0.9), steps=4), m.LR(0.01)])
    outside = run(lambda p: [m.RestartEvery(steps=4), m.HeavyBall(0.9), m.LR(0.01)])
    last = run(lambda p: [m.HeavyBall(0.9), m.LR(0.01), m.RestartEvery(steps=4)])
    close(inside, outside)
    close(inside, last)


def test_every_ndim_steps():
    w = torch.nn.Parameter(torch.ones(3))
    opt = mo.Optimizer([w], m.RestartEvery(m.Adam(), steps="ndim"), m.LR(0.1))
    counts = []
    for _ in range(7):
        opt.step(mo.closure(lambda: (w**2).sum()))
        counts.append(opt.link("Adam").state[w]["step"])
    assert counts == [1, 2, 3, 1, 2, 3, 1]


def test_stuck_restarts_again_and_again():
    w = torch.nn.Parameter(torch.ones(1))
    opt = mo.Optimizer([w], m.RestartOnStuck(m.Adam(), n_tol=2), m.LR(0.0))
    counts = []
    for _ in range(6):
        opt.step(mo.closure(lambda: (w**2).sum()))
        counts.append(opt.link("Adam").state[w]["step"])
    assert counts == [1, 2, 1, 2, 1, 2]


def test_restarts_do_not_reset_generators():
    w = torch.nn.Parameter(torch.zeros(1))
    opt = mo.Optimizer([w], m.RestartEvery(m.Randn(seed=0), steps=1))
    moves = []
    for _ in range(3):
        before = float(w.detach())
        opt.step(mo.closure(lambda: w.sum()))
        moves.append(float(w.detach()) - before)
    assert len(set(moves)) == 3


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="steps is 0"):
        m.RestartEvery(steps=0)
    with pytest.raises(ValueError, match="n_tol is 0"):
        m.RestartOnStuck(n_tol=0)
