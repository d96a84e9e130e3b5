"""Termination criteria are met at the right step, with the patience given."""

import pytest
import torch

import moduli as mo
from moduli import m


def count_steps(*links, most=50, loss=lambda w: (w**2).sum(), start=1.0):
    w = torch.nn.Parameter(torch.tensor([start]))
    opt = mo.Optimizer([w], *links)
    for i in range(most):
        opt.step(mo.closure(lambda: loss(w)))
        if opt.should_terminate:
            return i + 1, opt.reasons
    return None, []


def test_after_n_steps_is_the_nth():
    assert count_steps(m.TerminateAfterNSteps(4), m.LR(0.1)) == (4, ["4 steps were made"])


def test_terminates_after_n_evaluations():
    count, reasons = count_steps(m.Multistep(m.LR(0.01), steps=3), m.TerminateAfterNEvaluations(7))
    assert count == 3
    assert reasons == ["7 evaluations were made"]


def test_after_n_seconds_by_a_given_clock_and_resumed():
    class Clock:
        now = 0.0

        def __call__(self):
            self.now += 1.0
            return self.now

    assert count_steps(m.TerminateAfterNSeconds(3.0, sec_fn=Clock()), m.LR(0.1))[0] == 4
    w = torch.nn.Parameter(torch.ones(1))
    make = lambda: mo.Optimizer([w], m.TerminateAfterNSeconds(3.0, sec_fn=Clock()), m.LR(0.1))  # noqa: E731
    opt = make()
    for _ in range(3):
        opt.step(mo.closure(lambda: (w**2).sum()))
    later = make()
    later.load_state_dict(opt.state_dict())
    later.step(mo.closure(lambda: (w**2).sum()))
    assert not later.should_terminate
    later.step(mo.closure(lambda: (w**2).sum()))
    assert later.should_terminate


@pytest.mark.parametrize("wrap", [lambda c: c, m.TerminateAny, m.TerminateAll])
@pytest.mark.parametrize("n", [1, 3])
def test_patience_also_inside_others(wrap, n):
    count, _ = count_steps(wrap(m.TerminateByGradientNorm(10.0, n=n)), m.LR(0.1))
    assert count == n


def test_patience_is_of_steps_in_a_row():
    signs = iter([1.0, 100.0, 1.0, 1.0, 1.0])
    count, _ = count_steps(m.TerminateByGradientNorm(10.0, n=2), m.LR(0.0), loss=lambda w: next(signs) * w.sum())
    assert count == 4


def test_all_evaluates_every_criterion_at_every_step():
    # The second criterion counts the first steps too, before the first criterion is met.
    both = m.TerminateAll(m.TerminateAfterNSteps(5), m.TerminateByGradientNorm(10.0, n=5))
    assert count_steps(both, m.LR(0.1))[0] == 5


def test_any_and_all_say_why():
    _, reasons = count_steps(m.TerminateAll(m.TerminateAfterNSteps(2), m.TerminateOnLossReached(10.0)), m.LR(0.1))
    assert reasons == ["2 steps were made and the loss is 0.64, at most 10"]


def test_update_norm_is_of_the_parameters():
    assert count_steps(m.TerminateByUpdateNorm(1e-9, n=2), m.LR(0.0))[0] == 3
    assert count_steps(m.TerminateByUpdateNorm(0.3, n=1, ord=float("inf")), m.LR(0.1))[0] == 2


def test_no_improvement_terminates_after_its_patience():
    losses = iter([3.0, 2.0, 2.0, 1.99, 1.0, 1.0, 1.0, 1.0])
    count, _ = count_steps(m.TerminateOnNoImprovement(0.1, n=2), m.LR(0.0), loss=lambda w: w.sum() * 0 + next(losses))
    assert count == 4


def test_usual_criteria_together():
    assert isinstance(m.make_termination_criteria(), m.TerminateNever)
    assert isinstance(m.make_termination_criteria(maxiter=3), m.TerminateAfterNSteps)
    everything = m.make_termination_criteria(
        ftol=0.0, gtol=0.0, stol=0.0, maxiter=3, maxeval=100, maxsec=1e6, target_loss=-1.0, extra=[m.TerminateNever()]
    )
    assert len(everything.children) == 8
    assert count_steps(everything, m.LR(0.1))[0] == 3


def test_patience_is_saved():
    w = torch.nn.Parameter(torch.ones(1))
    make = lambda: mo.Optimizer([w], m.TerminateAny(m.TerminateByGradientNorm(1e9, n=3)), m.LR(0.0))  # noqa: E731
    opt = make()
    for _ in range(2):
        opt.step(mo.closure(lambda: w.sum()))
    other = make()
    other.load_state_dict(opt.state_dict())
    other.step(mo.closure(lambda: w.sum()))
    assert other.should_terminate


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        m.TerminateByGradientNorm(n=0)
    with pytest.raises(TypeError, match="TerminateAny takes criteria, got LR"):
        m.TerminateAny(m.LR(0.1))
