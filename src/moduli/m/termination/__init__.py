"""When to stop."""

from ._criteria import (
    TerminateAfterNEvaluations,
    TerminateAfterNSeconds,
    TerminateAfterNSteps,
    TerminateAll,
    TerminateAny,
    TerminateByGradientNorm,
    TerminateByUpdateNorm,
    TerminateNever,
    TerminateOnLossReached,
    TerminateOnNoImprovement,
    TerminationCriteria,
    make_termination_criteria,
)

__all__ = [
    "TerminateAfterNEvaluations",
    "TerminateAfterNSeconds",
    "TerminateAfterNSteps",
    "TerminateAll",
    "TerminateAny",
    "TerminateByGradientNorm",
    "TerminateByUpdateNorm",
    "TerminateNever",
    "TerminateOnLossReached",
    "TerminateOnNoImprovement",
    "TerminationCriteria",
    "make_termination_criteria",
]
