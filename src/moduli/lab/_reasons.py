"""Why a run ended."""

from enum import StrEnum


class RunReason(StrEnum):
    """Why a run ended, as a sentence.

    >>> print(RunReason.REACHED)
    reached the optimum
    """

    REACHED = "reached the optimum"
    TARGET = "reached the target"
    BUDGET = "budget spent"
    TIME = "time limit"
    STOPPED = "stopped by itself"
    DIVERGED = "diverged"
    CRASHED = "crashed"
    HUNG = "hung, was killed"
    KILLED = "process died"

    @property
    def failed(self) -> bool:
        """Whether the run has no result that could be compared: it broke, or left the numbers."""
        return self in (RunReason.DIVERGED, RunReason.CRASHED, RunReason.HUNG, RunReason.KILLED)
