"""Fitting one problem for as long as it takes, with checkpoints to stop and go on at."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from .. import io
from .._minimize import minimize
from ._contender import Contender, Entrant, contender
from ._grammar import ParsedChain
from ._run import IDLE, Meter, RunEnd, RunReason, seed_all, take_steps
from .problems import Problem

# A step with so many evaluations has searched; if the loss stays the same to the last bit, it does not become smaller.
SEARCHED = 5
# How many numbers of a model are told one by one.
MOST_SHOWN = 64


class Ended(StrEnum):
    """Why a fit ended, as a sentence.

    >>> print(Ended.STEPS)
    all steps done
    """

    STEPS = "all steps done"
    TARGET = "as small as asked for"
    TIME = "time is up"
    STOPPED = "the optimizer stopped by itself"
    DIVERGED = "diverged"
    INTERRUPTED = "interrupted"

    @property
    def success(self) -> bool:
        """Whether the model is what was asked for, or can become it by going on."""
        return self is not Ended.DIVERGED


@dataclass(frozen=True)
class Fit:
    """What a fit came to.

    Attributes:
        model: The fitted model; of a population, the best member.
        reason: Why it ended.
        value: What the problem measures of the model.
        start: The same at the very beginning.
        steps: Steps done, those before a resume included.
        evaluations: Evaluations of the loss, likewise; those of a population count once per member.
        seconds: Time, likewise.
        path: The checkpoint, or None.
        parameters: The fitted parameters by name, as numbers and nested lists; none where they are too many to read.
        errors: Of a least-squares problem, the standard error of each of them, likewise; None where they are not determined.
    """

    model: torch.nn.Module
    reason: Ended
    value: float
    start: float
    steps: int
    evaluations: int
    seconds: float
    path: Path | None
    parameters: dict[str, Any]
    errors: dict[str, Any] | None = None


def fit(
    problem: Problem,
    chain: str | ParsedChain | Contender,
    *,
    steps: int = 1000,
    target: float | None = None,
    seconds: float = math.inf,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    every: float = 30.0,
    listen: Callable[[dict[str, Any]], None] | None = None,
) -> Fit:
    """Minimise a problem, step by step, until something ends it.

    A fit that was stopped and resumed gives the numbers of one that was not, bit for bit. The first Ctrl-C ends the fit
    after the step that is under way, with a checkpoint; a second one ends it at once, and the last checkpoint stays.

    Args:
        problem: What to minimise; `load_problem` and `as_problem` make one of a user's function.
        chain: The optimizer.
        steps: How many steps altogether, those before a resume included.
        target: End when the problem measures this or less; measured about twice a second.
        seconds: End after this many seconds.
        seed: Chooses the starting point, the batches and the optimizer's own randomness.
        out: A safetensors file for the model and everything that is needed to go on.
        resume: Go on from `out`, if it exists.
        overwrite: Start again from scratch, also if `out` exists.
        every: Seconds between checkpoints.
        listen: Called about ten times a second with ``steps``, ``evaluations``, ``loss`` and ``seconds``.

    Raises:
        CheckpointError: When `out` exists and does not fit, or neither `resume` nor `overwrite` says what to do with it.

    >>> from moduli.lab import as_problem
    >>> result = fit(as_problem(lambda x=3.0: (x - 1) ** 2), "torch.SGD(lr=0.1)", steps=100)
    >>> print(result.reason, round(result.value, 6))
    all steps done 0.0
    """
    runner = contender(chain)
    seed_all(seed)
    model = problem.model(seed)
    entrant = runner.enter(model)
    course = _Course(problem, entrant, runner.source, torch.Generator().manual_seed(seed))
    path = None if out is None else Path(out)
    if path is not None and path.exists():
        if not resume and not overwrite:
            raise io.CheckpointError(f"{path} exists: go on from it with --resume, or start again with --overwrite")
        if resume:
            course.load(path)
    with _patience() as asked:
        try:
            reason = course.drive(steps, target, seconds, path, every, asked, listen or (lambda _: None))
        except RunEnd as end:
            reason = Ended.DIVERGED if end.reason is RunReason.DIVERGED else Ended.STOPPED
    best = entrant.best()
    value = problem.measure(best)
    if not math.isfinite(value):
        reason = Ended.DIVERGED
    fitted = best if isinstance(best, torch.nn.Module) else model
    found = _trainable(fitted)
    short = sum(parameter.numel() for parameter in found.values()) <= MOST_SHOWN
    parameters = _to_numbers(found) if short else {}
    errors = standard_errors(problem, fitted) if parameters and reason is not Ended.DIVERGED else None
    if path is not None:
        course.save(path, value=value, parameters=parameters, errors=errors)
    counts = course.counts()
    return Fit(fitted, reason, value, course.start, path=path, parameters=parameters, errors=errors, **counts)


class _Course:
    """A fit under way: what moves, and what has been counted."""

    def __init__(self, problem: Problem, entrant: Entrant, source: str, generator: torch.Generator) -> None:
        self.problem, self.entrant, self.source, self.generator = problem, entrant, source, generator
        self.steps, self.still, self.last = 0, 0, math.nan
        self.start = problem.measure(entrant.model)
        self.meter = Meter(2**62, math.inf, None)

    def drive(
        self, steps: int, target: float | None, limit: float, path: Path | None, every: float, asked: list[int],
        tell: Callable[[dict[str, Any]], None],
    ) -> Ended:  # fmt: skip
        told, measured, saved = 0.0, 0.0, time.monotonic()
        moves = take_steps(self.problem, self.entrant, self.meter, self.generator)
        while self.steps < steps:
            if asked:
                return Ended.INTERRUPTED
            count = self.meter.evaluations
            loss = next(moves)
            self.steps += 1
            here = math.nan if loss is None else float(torch.as_tensor(loss).detach().min())
            searched = self.meter.evaluations - count >= SEARCHED
            self.still = self.still + 1 if searched and here == self.last and not self.problem.noisy else 0
            self.last = here
            if self.still >= IDLE or self.entrant.finished:
                return Ended.STOPPED
            now = time.monotonic()
            if now - told > 0.1 or self.steps == steps:
                told = now
                tell({**self.counts(), "loss": here})
            if target is not None and now - measured > 0.5:
                measured = now
                if self.problem.measure(self.entrant.best()) <= target:
                    return Ended.TARGET
            if self.meter.seconds() > limit:
                return Ended.TIME
            if path is not None and now - saved > every:
                self.save(path)
                saved = time.monotonic()
        return Ended.STEPS

    def counts(self) -> dict[str, Any]:
        return {"steps": self.steps, "evaluations": self.meter.evaluations, "seconds": self.meter.seconds()}

    def save(self, path: Path, **found: Any) -> None:
        entrant = self.entrant
        about = {"chain": self.source, "problem": self.problem.name, "start": self.start}
        fitted = {**self.counts(), **about, "still": self.still, "last": self.last, **found}
        extra = {"fit": fitted, "generator": self.generator, "losses": entrant.losses}
        # Of a population, the module in the file is its best member: any program can then read the result.
        module = entrant.best() if entrant.population is not None else entrant.model
        io.make_directory(path.parent)
        io.save(path, module, optimizer=entrant.optimizer, population=entrant.population, extra=extra)  # type: ignore[arg-type]

    def load(self, path: Path) -> None:
        saved = io.read(path).extra
        about = saved.get("fit") if isinstance(saved, dict) else None
        if not isinstance(about, dict) or "chain" not in about:
            raise io.CheckpointError(f"{path} was not written by a fit: it cannot be resumed. Choose another --out")
        if about["chain"] != self.source:
            fact = f"{path} was fitted with {about['chain']!r}, and cannot be resumed with {self.source!r}"
            raise io.CheckpointError(f"{fact}: their states differ")
        entrant, extra = self.entrant, {"generator": self.generator}
        model = None if entrant.population is not None else entrant.model
        io.load(path, model, optimizer=entrant.optimizer, population=entrant.population, extra=extra)
        entrant.losses = saved["losses"]
        self.steps, self.meter.evaluations = about["steps"], about["evaluations"]
        self.start, self.still, self.last = about["start"], about.get("still", 0), about.get("last", math.nan)
        self.meter.began = time.perf_counter() - about["seconds"]


@contextlib.contextmanager
def _patience() -> Iterator[list[int]]:
    """The first Ctrl-C is noted in a list, the second one interrupts; likewise being asked to end (SIGTERM, SIGHUP).

    Only the main thread can wait for them.
    """
    asked: list[int] = []

    def note(number: int, _: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    names = ("SIGINT", "SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = [(number, signal.signal(number, note)) for number in numbers]
    try:
        yield asked
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def standard_errors(problem: Problem, model: nn.Module) -> dict[str, Any] | None:
    """The standard errors of a least-squares fit: `Result.stderr` of `moduli.minimize` where the model stands.

    Args:
        problem: The problem.
        model: Its fitted model.

    Returns:
        A number or nested list for each parameter; None if the problem is no least-squares problem, has fewer residuals than
        parameters, or does not determine all of them.
    """
    found = _trainable(model)
    residuals = problem.residuals(model)
    if residuals is None or not residuals.requires_grad or any(each.is_complex() for each in found.values()):
        return None

    def fun(values: dict[str, torch.Tensor]) -> Any:
        return problem.residuals(lambda *args, **kwargs: functional_call(model, values, args, kwargs))

    errors = minimize(fun, {name: value.detach() for name, value in found.items()}, "lm", max_evals=1).stderr
    return _to_numbers(errors) if all(bool(error.isfinite().all()) for error in errors.values()) else None


def _trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _to_numbers(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Under the names that a user knows: arguments of a function and owned tensors have a prefix in a model."""
    found = {}
    for name, value in values.items():
        path, dot, last = name.rpartition(".")
        real = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        found[path + dot + last.removeprefix("arg_").removeprefix("tensor:")] = real.double().tolist()
    return found
