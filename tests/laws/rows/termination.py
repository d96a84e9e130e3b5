"""Termination criteria, which do not change the steps of a chain."""

import torch

from laws.registry import Row
from moduli import m

__all__ = ["ROWS"]


def _row(name, make, **options):
    return Row(name, lambda: [make(), m.LR(0.1)], reference=lambda params: torch.optim.SGD(params, 0.1), **options)


ROWS = [
    _row("TerminateAfterNSteps", lambda: m.TerminateAfterNSteps(3)),
    _row("TerminateAfterNEvaluations", lambda: m.TerminateAfterNEvaluations(3)),
    _row("TerminateAfterNSeconds", lambda: m.TerminateAfterNSeconds(3600.0)),
    _row("TerminateByGradientNorm", lambda: m.TerminateByGradientNorm(1e-3)),
    _row("TerminateByUpdateNorm", lambda: m.TerminateByUpdateNorm(1e-3)),
    _row("TerminateOnNoImprovement", lambda: m.TerminateOnNoImprovement(1e-3), closure=True),
    _row("TerminateOnLossReached", lambda: m.TerminateOnLossReached(1e-3), closure=True),
    _row("TerminateNever", m.TerminateNever),
    _row(
        "TerminateAny",
        lambda: m.TerminateAny(m.TerminateAfterNSteps(4), m.TerminateByGradientNorm(1e-3)),
    ),
    _row(
        "TerminateAll",
        lambda: m.TerminateAll(m.TerminateAfterNSteps(4), m.TerminateOnLossReached(1e-3)),
        closure=True,
    ),
    _row("make_termination_criteria", lambda: m.make_termination_criteria(gtol=1e-3, stol=1e-3, maxiter=5)),
]
