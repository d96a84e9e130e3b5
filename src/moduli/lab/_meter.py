"""Counting what a run costs, remembering what it reached, and why it ended."""

import contextlib
import hashlib
import math
import struct
import time
from collections.abc import Callable, Iterator
from enum import StrEnum

# Points of the history are this factor of evaluations apart: the curve has the same detail in every decade.
SPACING = 1.04
# A line search may step where the loss is not a number and come back. This many in a row is no line search.
LOST = 40


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


class RunEnd(BaseException):
    """Raised out of a closure to end the run. No error, so that no `except Exception` in an optimizer swallows it."""

    def __init__(self, reason: RunReason, detail: str = "") -> None:
        super().__init__(str(reason))
        self.reason, self.detail = reason, detail


class Meter:
    """Counts evaluations, keeps the best value against evaluations and seconds, and ends the run when it is time.

    Args:
        budget: How many evaluations there are.
        seconds: How many seconds there are.
        target: The run ends when a value is as small as this.
        reached: The reason that it then ends for.
        progress: Called now and then with (evaluations, best value).
    """

    def __init__(
        self, budget: int, seconds: float, target: float | None, progress: Callable[[int, float], None] | None = None,
        reached: RunReason = RunReason.REACHED,
    ) -> None:  # fmt: skip
        self.reached = reached
        self.budget, self.limit, self.target, self.progress = budget, seconds, target, progress
        self.evaluations = self.gradients = self.lost = 0
        self.best = math.inf
        self.history: list[tuple[int, float, float]] = []
        self.digest = hashlib.blake2b(digest_size=16)
        self.next = 0.0
        self.paused = 0.0
        self.told = self.began = time.perf_counter()

    def seconds(self) -> float:
        """Seconds of the run, without those of the bookkeeping."""
        return time.perf_counter() - self.began - self.paused

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Within this, time does not count."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.paused += time.perf_counter() - began

    def check_budget(self) -> None:
        """Before an evaluation: is there anything left to spend?"""
        if self.evaluations >= self.budget:
            raise RunEnd(RunReason.BUDGET)
        if self.seconds() > self.limit:
            raise RunEnd(RunReason.TIME, f"more than {self.limit:g} seconds")

    def count(self, evaluations: int, gradients: int) -> None:
        """Count evaluations, and how many of them had gradients."""
        self.evaluations += evaluations
        self.gradients += gradients

    def record_loss(self, loss: float) -> None:
        """A loss came out of an evaluation. It is part of the digest, which is equal for equal runs."""
        self.digest.update(struct.pack("<d", loss))
        self.lost = 0 if math.isfinite(loss) else self.lost + 1
        if self.lost >= LOST:
            raise RunEnd(RunReason.DIVERGED, f"the loss was {loss} in {LOST} evaluations in a row")

    def value(self, value: float) -> None:
        """The value the run is judged by, now."""
        if value < self.best:
            self.best = value
        reached = self.target is not None and self.best <= self.target
        if reached or self.evaluations >= self.next:
            self.record()
        if reached:
            raise RunEnd(self.reached)

    @property
    def due(self) -> bool:
        """Whether the history wants a point: what is costly to measure is measured only then."""
        return self.evaluations >= self.next

    def record(self) -> None:
        """Put a point into the history."""
        now = time.perf_counter()
        point = (self.evaluations, round(self.seconds(), 6), self.best)
        if self.history and self.history[-1][0] == point[0]:
            self.history[-1] = point
        else:
            self.history.append(point)
        self.next = max(self.evaluations + 1, self.evaluations * SPACING)
        if self.progress is not None and now - self.told > 0.2:
            self.told = now
            self.progress(self.evaluations, self.best)


def drop_infinite(value: float) -> float | None:
    """A number as JSON has it: None in the place of what is not finite."""
    return value if math.isfinite(value) else None
