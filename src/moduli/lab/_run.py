"""One run: one contender on one problem from one seed."""

from __future__ import annotations

import contextlib
import math
import random
import traceback
from collections.abc import Callable
from typing import Any

import numpy
import torch

from ._contender import Contender, Entrant
from ._meter import Meter, RunEnd, RunReason, drop_infinite
from ._reference import ProblemFileError
from .problems import Problem

PATH_POINTS = 240
CLOUD_FRAMES = 48
CLOUD_MEMBERS = 64
# A step that evaluates nothing changes nothing that counts: an optimizer that does this many has finished.
IDLE = 8


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
    if target is None and problem.optimum is not None and problem.exact:
        target = problem.optimum + problem.tolerance
    meter = Meter(budget, seconds, target, progress, reached)
    tracks = _Tracks(problem)
    reason, detail, trace = RunReason.CRASHED, "", ""
    try:
        with meter.pause():
            model = problem.model(seed)
            first = problem.measure(model)
        entrant = contender.enter(model)
        try:
            meter.value(first)
            _steps(problem, entrant, meter, tracks, torch.Generator().manual_seed(seed))
        except RunEnd as stop:
            reason, detail = stop.reason, stop.detail
    except Exception as error:  # noqa: BLE001 - whatever a contender raises is its result
        detail = f"{type(error).__name__}: {error}"
        trace = "".join(traceback.format_exception(error))[-8000:]
    if meter.history and meter.history[-1][0] != meter.evaluations:
        meter.record()
    return {
        "reason": str(reason),
        "detail": detail,
        "traceback": trace,
        "value": drop_infinite(meter.best),
        "evaluations": meter.evaluations,
        "gradients": meter.gradients,
        "steps": tracks.steps,
        "seconds": round(meter.seconds(), 6),
        "digest": meter.digest.hexdigest(),
        "history": [[e, s, drop_infinite(v)] for e, s, v in meter.history],
        **tracks.result(),
    }


def seed_all(seed: int) -> None:
    """Seed torch, NumPy and Python."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def _steps(problem: Problem, entrant: Entrant, meter: Meter, tracks: _Tracks, generator: torch.Generator) -> None:
    # A step of L-BFGS may go a long way: its path is drawn through the evaluations that were better than any before.
    closure = closure_for(problem, entrant, meter, lambda: tracks.look(entrant))
    with meter.pause():
        tracks.look(entrant)
    idle = 0
    while True:
        with meter.pause():
            problem.resample(generator)
        before = meter.evaluations
        entrant.optimizer.step(closure)
        tracks.steps += 1
        idle = idle + 1 if meter.evaluations == before else 0
        with meter.pause():
            tracks.look(entrant)
            if not entrant.finite():
                raise RunEnd(RunReason.DIVERGED, "a parameter is no longer a finite number")
            if problem.noisy and meter.due:
                meter.value(problem.measure(entrant.best()))
        if entrant.finished:
            raise RunEnd(RunReason.STOPPED, entrant.finished)
        if idle >= IDLE:
            raise RunEnd(RunReason.STOPPED, f"{IDLE} steps in a row evaluated nothing")
        meter.check_budget()


def closure_for(
    problem: Problem, entrant: Entrant, meter: Meter, better: Callable[[], None] = lambda: None
) -> Callable[..., torch.Tensor]:
    """The closure that a contender is given: `closure(backward=True)` is the loss, or the losses of all members.

    Args:
        problem: What is evaluated.
        entrant: Who evaluates it.
        meter: What counts it.
        better: Called after an evaluation of a model that is the best so far, while it stands there.
    """
    model, population = entrant.model, entrant.population
    parameters = [p for p in model.parameters() if p.requires_grad]

    def closure(backward: bool = True) -> torch.Tensor:
        meter.check_budget()
        if backward and population is None:
            for parameter in parameters:
                parameter.grad = None
        elif backward:
            population.zero_grad()
        with torch.enable_grad() if backward else contextlib.nullcontext():
            loss: torch.Tensor = problem.loss(model) if population is None else population.losses(problem.loss)
            if backward:
                _differentiable(problem, loss).sum().backward()  # type: ignore[no-untyped-call]
        with meter.pause():
            values = loss.detach().reshape(-1)
            meter.count(len(values), len(values) * int(backward))
            if population is not None:
                entrant.losses = values
                for each in values.tolist():
                    meter.digest.update(repr(each).encode())
                values = torch.where(values.isnan(), math.inf, values)
            value = float(values.min())
            meter.record_loss(value)
            if value < meter.best and population is None:
                better()
            if not problem.noisy:
                meter.value(value)
        return loss

    # The same function at every step: a line search may hand on the point that it accepted.
    closure.fixed = not problem.noisy  # type: ignore[attr-defined]
    return closure


def _differentiable(problem: Problem, loss: torch.Tensor) -> torch.Tensor:
    if not loss.requires_grad:
        raise ProblemFileError(
            f"{problem.name}: the loss has no gradient, because it does not depend on its arguments or leaves torch on the way "
            "(item, numpy, detach). Chains that need none, such as CMAES(sigma=0.5), can minimise it as it is"
        )
    return loss


class _Tracks:
    """Where a run went in the plane: the path of a point, or the cloud of a population."""

    def __init__(self, problem: Problem) -> None:
        self.flat = problem.window is not None
        self.path: list[list[float]] = []
        self.cloud: list[list[list[float]]] = []
        self.steps = 0

    def look(self, entrant: Entrant) -> None:
        if not self.flat:
            return
        points = entrant.points()
        if entrant.population is None:
            here = _round_values(points[0])
            if not self.path or self.path[-1] != here:
                self.path.append(here)
        else:
            self.cloud.append([_round_values(point) for point in points[:CLOUD_MEMBERS]])

    def result(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self.path:
            out["path"] = _thin(self.path, PATH_POINTS)
        if self.cloud:
            out["cloud"] = _thin(self.cloud, CLOUD_FRAMES)
            out["generations"] = _thin(list(range(len(self.cloud))), CLOUD_FRAMES)
        return out


def _round_values(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.5g}") if math.isfinite(value) else 0.0 for value in values.tolist()]


def _thin(items: list[Any], most: int) -> list[Any]:
    """At most so many, the first and the last among them, closer together at the beginning where more happens."""
    if len(items) <= most:
        return items
    places = sorted({round((len(items) - 1) * (i / (most - 1)) ** 1.5) for i in range(most)})
    return [items[place] for place in places]
