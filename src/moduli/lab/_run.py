"""One run: one contender on one problem from one seed; what it costs, what it reached, and why it ended."""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
import time
import traceback
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

import numpy
import torch

from ._contender import Contender, Entrant
from ._reference import ProblemFileError
from .problems import Problem

PATH_POINTS = 240
CLOUD_FRAMES = 48
CLOUD_MEMBERS = 64
# A step that evaluates nothing changes nothing that counts: an optimizer that does this many has finished.
IDLE = 8
# Points of the history are this factor of evaluations apart: the curve has the same detail in every decade.
SPACING = 1.04
# Of noisy problems, whose value costs many losses to measure.
MEASURED_SPACING = 1.1
# A line search may step where the loss is not a number and come back. This many in a row is no line search.
LOST = 40
# A run that waits for something else than the processor, such as other processes, ends after so many times its seconds.
WAITING = 20


def run(
    problem: Problem,
    contender: Contender,
    seed: int,
    *,
    budget: int,
    seconds: float = 60.0,
    target: float | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Run one contender on one problem, in this process, until something ends it.

    All randomness comes from the seed, so equal arguments give equal numbers, bit for bit, on the same number of threads.

    Args:
        problem: The problem.
        contender: What minimises it.
        seed: Chooses the starting point, the batches and the contender's own randomness.
        budget: How many evaluations of the loss there are; those of a population count once per member.
        seconds: How long it may take.
        target: End when the value is as small as this; without it, within the tolerance of an exact optimum.
        progress: Called now and then with (evaluations, best value).

    Returns:
        What happened, ready for JSON: the reason, the best value, counts, the history and, in the plane, the path.

    >>> from moduli.lab import problems, contender
    >>> record = run(problems.get("sphere-10"), contender("torch.SGD(lr=0.1)"), 0, budget=200)
    >>> record["reason"], record["value"] < 1e-8
    ('reached the optimum', True)
    """
    seed_all(seed)
    reached = RunReason.REACHED if target is None else RunReason.TARGET
    meter = Meter(budget, seconds, find_target(problem, target), progress, reached, find_spacing(problem))
    entrant: Entrant | None = None
    frames: list[list[list[float]]] = []
    steps, reason, detail, trace = 0, RunReason.CRASHED, "", ""

    def look() -> None:
        """Where the members are in the plane, for the map of a report."""
        if problem.window is not None and entrant is not None:
            here = [round_values(point) for point in entrant.points()[:CLOUD_MEMBERS]]
            if entrant.population is not None or frames[-1:] != [here]:
                frames.append(here)

    try:
        with meter.pause():
            model = problem.model(seed)
            first = problem.measure(model)
        entrant = contender.enter(model)
        try:
            meter.value(first)
            # A step of L-BFGS may go a long way: its path is drawn through the evaluations that were better than any before.
            look()
            for _ in take_steps(problem, entrant, meter, torch.Generator().manual_seed(seed), look):
                steps += 1
                with meter.pause():
                    look()
                    if problem.noisy and meter.due:
                        meter.value(problem.measure(entrant.best()))
                meter.check_budget()
        except RunEnd as stop:
            reason, detail = stop.reason, stop.detail
    except Exception as error:  # noqa: BLE001 - whatever a contender raises is its result
        detail = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))[-8000:]
    if meter.history and meter.evaluations not in meter.history:
        meter.record()
    tracks: dict[str, Any] = {}
    if frames and entrant is not None and entrant.population is not None:
        tracks["cloud"] = thin(frames, CLOUD_FRAMES)
        tracks["generations"] = thin(list(range(len(frames))), CLOUD_FRAMES)
    elif frames:
        tracks["path"] = thin([here[0] for here in frames], PATH_POINTS)
    return {
        "reason": str(reason),
        "detail": detail,
        "traceback": trace,
        "value": drop_infinite(meter.best),
        "evaluations": meter.evaluations,
        "gradients": meter.gradients,
        "steps": steps,
        "seconds": round(meter.seconds(), 6),
        "digest": meter.digest.hexdigest(),
        "history": [[e, s, drop_infinite(v)] for e, (s, v) in meter.history.items()],
        **tracks,
    }


def find_target(problem: Problem, target: float | None) -> float | None:
    """Return the value that ends a run: the one that is given, or that of an exact optimum with its tolerance; None if unknown."""
    if target is None and problem.optimum is not None and problem.exact:
        return problem.optimum + problem.tolerance
    return target


def find_spacing(problem: Problem) -> float:
    """Return the factor of evaluations between two points of the history."""
    return MEASURED_SPACING if problem.noisy else SPACING


def seed_all(seed: int) -> None:
    """Seed torch, NumPy and Python."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def take_steps(
    problem: Problem,
    entrant: Entrant,
    meter: Meter,
    generator: torch.Generator,
    better: Callable[[], None] = lambda: None,
    watch: Callable[[float], None] = lambda loss: None,
) -> Iterator[Any]:
    """Take steps, and give what each returns, until the contender stops by itself or leaves the numbers: a `RunEnd`.

    Args:
        problem: What is evaluated.
        entrant: Who evaluates it.
        meter: What counts it.
        generator: What batches and noise are drawn from.
        better: Called after an evaluation of a model that is the best so far, while it stands there.
        watch: Called with the loss after an evaluation of a model with its gradient, which its parameters have.
    """
    model, population = entrant.model, entrant.population

    def closure(backward: bool = True) -> torch.Tensor:
        meter.check_budget()
        if backward:
            (model if population is None else population).zero_grad()
        with torch.enable_grad() if backward else contextlib.nullcontext():
            loss: torch.Tensor = problem.loss(model) if population is None else population.losses(problem.loss)
            if backward and not loss.requires_grad:
                fact = (
                    "the loss has no gradient, because it does not depend on its arguments or leaves torch on the way"
                )
                remedy = "Chains that need none, such as CMAES(sigma=0.5), can minimise it as it is"
                raise ProblemFileError(f"{problem.name}: {fact} (item, numpy, detach). {remedy}")
            if backward:
                loss.sum().backward()  # type: ignore[no-untyped-call]
        with meter.pause():
            if population is not None:
                entrant.losses = loss.detach()
            value = meter.record_losses(loss.detach().reshape(-1), backward)
            if backward and population is None:
                watch(value)
            if value < meter.best and population is None:
                better()
            if not problem.noisy:
                meter.value(value)
        return loss

    # The same function at every step: a line search may hand on the point that it accepted.
    closure.fixed = not problem.noisy  # type: ignore[attr-defined]
    idle = 0
    while True:
        with meter.pause():
            problem.resample(generator)
        before = meter.evaluations
        found = entrant.optimizer.step(closure)
        with meter.pause():
            if not entrant.finite():
                raise RunEnd(RunReason.DIVERGED, "a parameter is no longer a finite number")
        yield found
        idle = idle + 1 if meter.evaluations == before else 0
        if entrant.finished:
            raise RunEnd(RunReason.STOPPED, entrant.finished)
        if idle >= IDLE:
            raise RunEnd(RunReason.STOPPED, f"{IDLE} steps in a row evaluated nothing")


def round_values(values: torch.Tensor) -> list[float]:
    """Return numbers as a report has them, with zero in the place of what is not finite."""
    return [float(f"{value:.5g}") if math.isfinite(value) else 0.0 for value in values.tolist()]


def thin(items: list[Any], most: int) -> list[Any]:
    """At most so many, the first and the last among them, closer together at the beginning where more happens."""
    if len(items) <= most:
        return items
    places = sorted({round((len(items) - 1) * (i / (most - 1)) ** 1.5) for i in range(most)})
    return [items[place] for place in places]


class RunReason(StrEnum):
    """Why a run or a fit ended, as a sentence.

    >>> print(RunReason.REACHED)
    reached the optimum
    """

    REACHED = "reached the optimum"
    TARGET = "reached the target"
    BUDGET = "budget spent"
    STEPS = "all steps done"
    TIME = "time limit"
    STOPPED = "stopped by itself"
    CONVERGED = "converged: the gradient vanishes"
    DIVERGED = "diverged"
    CRASHED = "crashed"
    HUNG = "hung, was killed"
    KILLED = "process died"
    INTERRUPTED = "interrupted"

    @property
    def failed(self) -> bool:
        """Whether the run has no result that could be compared: it broke, or left the numbers."""
        return self in (RunReason.DIVERGED, RunReason.CRASHED, RunReason.HUNG, RunReason.KILLED)

    @property
    def success(self) -> bool:
        """Whether the model is what was asked for, or can become it by going on."""
        return not self.failed


Ended = RunReason
"""Why a fit ended: fits have no reasons of their own."""


class RunEnd(BaseException):
    """Raised out of a closure to end the run. No error, so that no `except Exception` in an optimizer swallows it."""

    def __init__(self, reason: RunReason, detail: str = "") -> None:
        super().__init__(str(reason))
        self.reason, self.detail = reason, detail


def read_clock() -> float:
    """Return the processor seconds of this thread: what other programs do to the machine is not among the seconds of a run."""
    return time.thread_time()


class Meter:
    """Counts evaluations, keeps the best value against evaluations and seconds, and ends the run when it is time.

    Args:
        budget: How many evaluations there are.
        seconds: How many seconds of the processor there are; as a run that waits uses none, it also ends after `WAITING` times
            as many on the wall clock.
        target: The run ends when a value is as small as this.
        reached: The reason that it then ends for.
        spacing: Points of the history are this factor of evaluations apart.
        progress: Called now and then with (evaluations, best value).
    """

    def __init__(
        self, budget: int, seconds: float, target: float | None, progress: Callable[[int, float], None] | None = None,
        reached: RunReason = RunReason.REACHED, spacing: float = SPACING,
    ) -> None:  # fmt: skip
        self.spacing = spacing
        self.reached = reached
        self.budget, self.limit, self.target, self.progress = budget, seconds, target, progress
        self.evaluations = self.gradients = self.lost = 0
        self.best = math.inf
        self.history: dict[int, tuple[float, float]] = {}
        self.digest = hashlib.blake2b(digest_size=16)
        self.next = 0.0
        self.paused = 0.0
        self.began, self.told = read_clock(), time.perf_counter()
        self.end = self.told + WAITING * seconds

    def seconds(self) -> float:
        """Seconds of the run, without those of the bookkeeping."""
        return read_clock() - self.began - self.paused

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Within this, time does not count."""
        began = read_clock()
        try:
            yield
        finally:
            self.paused += read_clock() - began

    def check_budget(self) -> None:
        """Before an evaluation: is there anything left to spend?"""
        if self.evaluations >= self.budget:
            raise RunEnd(RunReason.BUDGET)
        if self.seconds() > self.limit:
            raise RunEnd(RunReason.TIME, f"more than {self.limit:g} seconds")
        if time.perf_counter() > self.end:
            raise RunEnd(RunReason.TIME, f"{WAITING} times {self.limit:g} seconds passed, most of them in waiting")

    def record_losses(self, losses: torch.Tensor, backward: bool) -> float:
        """Count an evaluation of all members; the least loss. They are part of the digest, which is equal for equal runs."""
        self.evaluations += len(losses)
        self.gradients += len(losses) * backward
        self.digest.update(losses.double().cpu().numpy().tobytes())
        least = float(torch.where(losses.isnan(), math.inf, losses).min())
        self.lost = 0 if math.isfinite(least) else self.lost + 1
        if self.lost >= LOST:
            raise RunEnd(RunReason.DIVERGED, f"the loss was not finite in {LOST} evaluations in a row")
        return least

    def value(self, value: float) -> None:
        """The value the run is judged by, now."""
        self.best = min(self.best, value)
        reached = self.target is not None and self.best <= self.target
        if reached or self.due:
            self.record()
        if reached:
            raise RunEnd(self.reached)

    @property
    def due(self) -> bool:
        """Whether the history wants a point: what is costly to measure is measured only then."""
        return self.evaluations >= self.next

    def record(self) -> None:
        """Put a point into the history."""
        self.history[self.evaluations] = round(self.seconds(), 6), self.best
        self.next = max(self.evaluations + 1, self.evaluations * self.spacing)
        if self.progress is not None and time.perf_counter() - self.told > 0.2:
            self.told = time.perf_counter()
            self.progress(self.evaluations, self.best)


def drop_infinite(value: float) -> float | None:
    """A number as JSON has it: None in the place of what is not finite."""
    return value if math.isfinite(value) else None
