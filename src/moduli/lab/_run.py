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
# An optimizer has finished when this many of its steps in a row evaluated nothing.
IDLE = 8
# Points of the history are this factor of evaluations apart: the curve has the same detail in every decade.
SPACING = 1.04
# The same factor for noisy problems, whose value takes many evaluations to measure.
MEASURED_SPACING = 1.1
# A line search recovers from a few losses that are not finite. This many in a row end the run.
LOST = 40
# A run that mostly waits, such as for other processes, ends after this many times its seconds on the wall clock.
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
        target: End when the value is at most this; without it, within the tolerance of an exact optimum.
        progress: Called now and then with (evaluations, best value).

    Returns:
        The record for JSON: the reason, the best value, counts, the history and, for functions of two numbers, the path.

    >>> from moduli.lab import problems, contender
    >>> record = run(problems.get("sphere-10"), contender("torch.SGD(lr=0.1)"), 0, budget=200)
    >>> record["reason"], record["value"] < 1e-8
    ('reached the optimum', True)
    """
    seed_all(seed)
    reached = RunReason.REACHED if target is None else RunReason.TARGET
    meter = Meter(budget, seconds, find_target(problem, target), progress, reached, find_spacing(problem))
    track = _Track(problem)
    steps, reason, detail, trace = 0, RunReason.CRASHED, "", ""

    try:
        with meter.pause():
            model = problem.model(seed)
            first = problem.measure(model)
        entrant = contender.enter(model)
        try:
            meter.take(first)
            # A step of L-BFGS may be long, so its path includes each evaluation that was better than all before.
            track.add(entrant)
            generator = torch.Generator().manual_seed(seed)
            for _ in take_steps(problem, entrant, meter, generator, lambda: track.add(entrant)):
                steps += 1
                with meter.pause():
                    track.add(entrant)
                    if problem.noisy and meter.due:
                        meter.take(problem.measure(entrant.best()))
                meter.check_budget()
        except RunEnd as end:
            reason, detail = end.reason, end.detail
    except Exception as error:  # noqa: BLE001 - whatever a contender raises is its result
        detail = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))[-8000:]
    if meter.history and meter.evaluations not in meter.history:
        meter.record()
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
        **track.describe(),
    }


class _Track:
    """The positions of a run in the plane of a function of two numbers, for the map of a report."""

    def __init__(self, problem: Problem) -> None:
        self.has_map = problem.window is not None
        self.is_cloud = False
        self.frames: list[list[list[float]]] = []

    def add(self, entrant: Entrant) -> None:
        """Add the positions of the model or the members, unless there is no map or the model has not moved."""
        if self.has_map:
            positions = [round_values(point) for point in entrant.points()[:CLOUD_MEMBERS]]
            self.is_cloud = entrant.population is not None
            if self.is_cloud or self.frames[-1:] != [positions]:
                self.frames.append(positions)

    def describe(self) -> dict[str, Any]:
        """Return the entries of the record: a path, or the cloud of a population with the numbers of its generations."""
        if not self.frames:
            return {}
        if self.is_cloud:
            generations = thin(list(range(len(self.frames))), CLOUD_FRAMES)
            return {"cloud": thin(self.frames, CLOUD_FRAMES), "generations": generations}
        return {"path": thin([positions[0] for positions in self.frames], PATH_POINTS)}


def find_target(problem: Problem, target: float | None) -> float | None:
    """Return the value that ends a run: `target`, or an exact optimum plus its tolerance; None if unknown."""
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


@contextlib.contextmanager
def preserve_random_states() -> Iterator[None]:
    """Restore the random states of torch, NumPy and Python at the end, as if nothing had been drawn."""
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])


def take_steps(
    problem: Problem,
    entrant: Entrant,
    meter: Meter,
    generator: torch.Generator,
    better: Callable[[], None] = lambda: None,
    watch: Callable[[float], None] = lambda loss: None,
) -> Iterator[Any]:
    """Take steps and yield the result of each; raise RunEnd when the contender stops, or a parameter is not finite.

    Args:
        problem: The problem.
        entrant: The contender with its model.
        meter: Counts the evaluations.
        generator: The generator of batches and noise.
        better: Called after an evaluation of a model that is the best so far, while the model has these parameters.
        watch: Called with the loss after an evaluation of a model with its gradient, which its parameters have.
    """
    population = entrant.population

    def closure(backward: bool = True) -> torch.Tensor:
        meter.check_budget()
        loss = _evaluate(problem, entrant, backward)
        with meter.pause():
            if population is not None:
                entrant.losses = loss.detach()
            value = meter.record_losses(loss.detach().reshape(-1), backward)
            if backward and population is None:
                watch(value)
            if value < meter.best and population is None:
                better()
            if not problem.noisy:
                meter.take(value)
        return loss

    # `fixed` says that the loss is the same function at every step, so a line search may reuse the point that it accepted.
    closure.fixed = not problem.noisy  # type: ignore[attr-defined]
    idle = 0
    while True:
        with meter.pause():
            problem.resample(generator)
        before = meter.evaluations
        result = entrant.optimizer.step(closure)
        with meter.pause():
            if not entrant.finite():
                raise RunEnd(RunReason.DIVERGED, "a parameter is no longer a finite number")
        yield result
        idle = idle + 1 if meter.evaluations == before else 0
        if entrant.finished:
            raise RunEnd(RunReason.STOPPED, entrant.finished)
        if idle >= IDLE:
            raise RunEnd(RunReason.STOPPED, f"{IDLE} steps in a row evaluated nothing")


def _evaluate(problem: Problem, entrant: Entrant, backward: bool) -> torch.Tensor:
    """Return the loss of the model, or those of the members; with `backward`, replace the gradients.

    Args:
        problem: The problem.
        entrant: The contender with its model.
        backward: Whether to compute gradients.
    """
    model, population = entrant.model, entrant.population
    if backward:
        (model if population is None else population).zero_grad()
    with torch.enable_grad() if backward else contextlib.nullcontext():
        loss: torch.Tensor = problem.loss(model) if population is None else population.losses(problem.loss)
        if backward:
            if not loss.requires_grad:
                fact = (
                    "the loss has no gradient, because it does not depend on its arguments or leaves torch on the way"
                )
                remedy = "Chains that need none, such as CMAES(sigma=0.5), can minimise it as it is"
                raise ProblemFileError(f"{problem.name}: {fact} (item, numpy, detach). {remedy}")
            loss.sum().backward()  # type: ignore[no-untyped-call]
    return loss


def round_values(values: torch.Tensor) -> list[float]:
    """Return numbers with five digits, as a report has them, and zero in place of those that are not finite."""
    return [float(f"{value:.5g}") if math.isfinite(value) else 0.0 for value in values.tolist()]


def thin(items: list[Any], most: int) -> list[Any]:
    """Return at most `most` items, including the first and the last, denser at the beginning, where more changes."""
    if len(items) <= most:
        return items
    indices = sorted({round((len(items) - 1) * (i / (most - 1)) ** 1.5) for i in range(most)})
    return [items[index] for index in indices]


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
        """Whether the run has no result to compare: it diverged, crashed, hung or was killed."""
        return self in (RunReason.DIVERGED, RunReason.CRASHED, RunReason.HUNG, RunReason.KILLED)

    @property
    def success(self) -> bool:
        """Whether the run did not fail; it may have ended before it converged."""
        return not self.failed


Ended = RunReason
"""Why a fit ended: fits have the same reasons as runs."""


class RunEnd(BaseException):
    """Raised in a closure to end the run. A BaseException, so that no `except Exception` in an optimizer catches it."""

    def __init__(self, reason: RunReason, detail: str = "") -> None:
        super().__init__(str(reason))
        self.reason, self.detail = reason, detail


def read_clock() -> float:
    """Return the processor seconds of this thread: what other programs do to the machine is not among the seconds of a run."""
    return time.thread_time()


class Meter:
    """A counter of evaluations; it records the best value against evaluations and seconds, and raises RunEnd at a limit.

    Args:
        budget: How many evaluations there are.
        seconds: How many seconds of the processor there are; as a run that waits uses none, it also ends after `WAITING` times
            as many on the wall clock.
        target: The run ends when a value is as small as this.
        reached: The reason for which it then ends.
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
        self.began, self.last_report = read_clock(), time.perf_counter()
        self.end = self.last_report + WAITING * seconds

    def seconds(self) -> float:
        """Return the seconds of the run, without those spent in `pause`."""
        return read_clock() - self.began - self.paused

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time of the block from the seconds of the run."""
        began = read_clock()
        try:
            yield
        finally:
            self.paused += read_clock() - began

    def check_budget(self) -> None:
        """Raise RunEnd if the budget or the time is spent; called before each evaluation."""
        if self.evaluations >= self.budget:
            raise RunEnd(RunReason.BUDGET)
        if self.seconds() > self.limit:
            raise RunEnd(RunReason.TIME, f"more than {self.limit:g} seconds")
        if time.perf_counter() > self.end:
            raise RunEnd(RunReason.TIME, f"{WAITING} times {self.limit:g} seconds passed, most of them in waiting")

    def record_losses(self, losses: torch.Tensor, backward: bool) -> float:
        """Count an evaluation of all members, add the losses to the digest of the run, and return the least of them."""
        self.evaluations += len(losses)
        self.gradients += len(losses) * backward
        self.digest.update(losses.double().cpu().numpy().tobytes())
        least = float(torch.where(losses.isnan(), math.inf, losses).min())
        self.lost = 0 if math.isfinite(least) else self.lost + 1
        if self.lost >= LOST:
            raise RunEnd(RunReason.DIVERGED, f"the loss was not finite in {LOST} evaluations in a row")
        return least

    def take(self, value: float) -> None:
        """Take the present value that the run is judged by; raise RunEnd if it reaches the target."""
        self.best = min(self.best, value)
        reached = self.target is not None and self.best <= self.target
        if reached or self.due:
            self.record()
        if reached:
            raise RunEnd(self.reached)

    @property
    def due(self) -> bool:
        """Whether the next point of the history is due; a value that is costly to measure is measured only then."""
        return self.evaluations >= self.next

    def record(self) -> None:
        """Add a point to the history."""
        self.history[self.evaluations] = round(self.seconds(), 6), self.best
        self.next = max(self.evaluations + 1, self.evaluations * self.spacing)
        if self.progress is not None and time.perf_counter() - self.last_report > 0.2:
            self.last_report = time.perf_counter()
            self.progress(self.evaluations, self.best)


def drop_infinite(value: float) -> float | None:
    """Return a number for JSON: None if it is not finite."""
    return value if math.isfinite(value) else None
