"""Fits of one problem, with checkpoints from which a stopped fit is resumed."""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import io
from .._minimize import choose_tolerance, minimize
from .._texts import shorten
from ..layout import call_with_tensors, public_name
from ._contender import Contender, contender
from ._grammar import ParsedChain
from ._reference import as_problem
from ._run import Meter, RunEnd, RunReason, preserve_random_states, read_clock, seed_all, take_steps
from .problems import Problem

# A step with at least this many evaluations ran a line search; if the loss is the same to the last bit, it found no lower point.
SEARCHED = 5
# This many such steps in a row end a fit, as they end `minimize`.
STILL = 3
# A fit lists the parameters of models with at most this many numbers.
MOST_SHOWN = 64


@dataclass(frozen=True)
class Fit:
    """The result of a fit.

    Attributes:
        model: The fitted model; for a population, the best member.
        reason: Why it ended.
        value: `Problem.measure` of the fitted model.
        start: `Problem.measure` at the starting point, before any resume.
        steps: Steps done, those before a resume included.
        evaluations: Evaluations of the loss, those before a resume included; those of a population count once per member.
        seconds: Processor seconds, those before a resume included.
        path: The checkpoint, or None.
        parameters: The fitted parameters by name, as numbers and nested lists; none where they are too many to read.
        errors: The standard errors of the parameters of a least-squares problem, in the same form; None if not determined.
    """

    model: torch.nn.Module
    reason: RunReason
    value: float
    start: float
    steps: int
    evaluations: int
    seconds: float
    path: Path | None
    parameters: dict[str, Any]
    errors: dict[str, Any] | None = None


def fit(
    problem: Problem | Callable[..., Any],
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

    A fit without noise and without a target ends by itself where `moduli.minimize` does: when the largest component of the
    gradient is at most 1e-8 in double precision, else 1e-4, or when searches find no lower point.

    A fit that was stopped and resumed gives the numbers of one that was not, bit for bit. The first Ctrl-C ends the fit
    after the step that is under way, with a checkpoint; a second one ends it at once, and the last checkpoint stays.

    Args:
        problem: What to minimise: a problem, or a function that returns a loss (see `as_problem`).
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

    >>> result = fit(lambda x=3.0: (x - 1) ** 2, "torch.SGD(lr=0.1)", steps=100)
    >>> print(result.reason, round(result.value, 6))
    converged: the gradient vanishes 0.0
    """
    if target is not None and math.isnan(target):
        raise ValueError("the target is nan; it is a number, or None")
    runner = contender(chain)
    seed_all(seed)
    problem = as_problem(problem, getattr(problem, "__name__", "problem"))
    fit_run = FitRun(problem, runner, seed, None if out is None else Path(out))
    if fit_run.path is not None and fit_run.path.exists():
        if not resume and not overwrite:
            raise io.CheckpointError(
                f"{fit_run.path} exists: go on from it with --resume, or start again with --overwrite"
            )
        if resume:
            fit_run.load(fit_run.path)
    limits = FitLimits(steps, target, seconds, every)
    with _record_signals() as signals:
        try:
            reason = fit_run.drive(limits, signals, listen or (lambda now: None))
        except RunEnd as end:
            reason = end.reason
    return fit_run.finish(reason)


@dataclass(frozen=True)
class FitLimits:
    """The arguments of `fit` that say when it ends and when it writes checkpoints."""

    steps: int
    target: float | None
    seconds: float
    every: float


class FitRun:
    """A fit under way, with all that its checkpoint stores.

    Args:
        problem: What is minimised.
        runner: The optimizer.
        seed: Chooses the starting point, the batches and the optimizer's own randomness.
        path: The checkpoint, or None.
    """

    def __init__(self, problem: Problem, runner: Contender, seed: int, path: Path | None) -> None:
        self.problem, self.path, self.model = problem, path, problem.model(seed)
        self.entrant, self.generator = runner.enter(self.model), torch.Generator().manual_seed(seed)
        # Saved with the states, and continued after a resume.
        self.about: dict[str, Any] = {
            "chain": runner.source, "problem": problem.name, "start": problem.measure(self.model),
            "seed": seed, "steps": 0, "evaluations": 0, "seconds": 0.0, "still": 0, "last": math.nan,
        }  # fmt: skip
        self.meter = Meter(2**62, math.inf, None)

    def load(self, path: Path) -> None:
        """Restore all states from a checkpoint; raise CheckpointError unless it is one of this problem, chain and seed."""
        source, name, seed = self.about["chain"], self.about["problem"], self.about["seed"]
        saved = io.read(path).extra
        about = saved.get("fit") if isinstance(saved, dict) else None
        if not isinstance(about, dict) or "chain" not in about:
            raise io.CheckpointError(f"{path} was not written by a fit: it cannot be resumed. Choose another --out")
        if about["chain"] != source:
            fact = f"{path} was fitted with {shorten(about['chain'])}, and cannot be resumed with {source!r}"
            raise io.CheckpointError(f"{fact}: their states differ")
        if about.get("problem", name) != name:
            fact = f"{path} is a fit of {shorten(about['problem'])}, and cannot be resumed with {name!r}"
            raise io.CheckpointError(f"{fact}: start again with --overwrite, or choose another --out")
        if about.get("seed", seed) != seed:
            fact = f"{path} was fitted with the seed {about['seed']}, and cannot be resumed with {seed}"
            raise io.CheckpointError(f"{fact}: start again with --overwrite, or choose another --out")
        population = self.entrant.population
        model, extra = self.model if population is None else None, {"generator": self.generator}
        io.load(path, model, optimizer=self.entrant.optimizer, population=population, extra=extra)
        self.entrant.losses = saved["losses"]
        self.about |= about
        self.meter.evaluations, self.meter.began = self.about["evaluations"], read_clock() - self.about["seconds"]

    def save(self) -> None:
        """Write the checkpoint, if there is a path."""
        if self.path is not None:
            population, optimizer = self.entrant.population, self.entrant.optimizer
            extra = {"fit": self.about, "generator": self.generator, "losses": self.entrant.losses}
            # For a population, the module in the file is its best member, so that any program can read the result.
            module = self.model if population is None else self.entrant.best()
            io.make_directory(self.path.parent)
            io.save(self.path, module, optimizer=optimizer, population=population, extra=extra)  # type: ignore[arg-type]

    def drive(self, limits: FitLimits, signals: list[int], listen: Callable[[dict[str, Any]], None]) -> RunReason:
        """Take steps until something ends the fit, and return the reason.

        Args:
            limits: When it ends, and how often it saves.
            signals: The signals that arrived; the first one ends the fit.
            listen: Called with the progress.
        """
        about, problem = self.about, self.problem
        last_report, last_measure, last_save = 0.0, 0.0, time.monotonic()
        watch = GradientRule(self.model)
        results = take_steps(problem, self.entrant, self.meter, self.generator, watch=watch.note)
        while about["steps"] < limits.steps:
            if signals:
                return RunReason.INTERRUPTED
            watch.begin_step()
            self.count_step(next(results))
            if watch.vanished and limits.target is None and not problem.noisy:
                return RunReason.CONVERGED
            if about["still"] >= STILL or self.entrant.finished:
                return RunReason.STOPPED
            now = time.monotonic()
            if now - last_report > 0.1 or about["steps"] == limits.steps:
                last_report = now
                counts = {"steps": about["steps"], "evaluations": about["evaluations"], "seconds": about["seconds"]}
                listen({**counts, "loss": about["last"]})
            if limits.target is not None and now - last_measure > 0.5:
                last_measure = now
                if self.measure(self.entrant.best()) <= limits.target:
                    return RunReason.TARGET
            if about["seconds"] > limits.seconds:
                return RunReason.TIME
            if now - last_save > limits.every:
                self.save()
                last_save = time.monotonic()
        return RunReason.STEPS

    def measure(self, model: Any) -> float:
        """Return the loss over all data; random states are as before, so that a fit does not depend on when it is measured."""
        with preserve_random_states():
            return self.problem.measure(model)

    def count_step(self, loss: Any) -> None:
        """Count a step that returned this loss, and whether it is one of a row of searches that found no lower point."""
        about, meter = self.about, self.meter
        least = math.nan if loss is None else float(torch.as_tensor(loss).detach().min())
        searched = meter.evaluations - about["evaluations"] >= SEARCHED
        is_unchanged = searched and least == about["last"] and not self.problem.noisy
        about.update(steps=about["steps"] + 1, evaluations=meter.evaluations, seconds=meter.seconds())
        about.update(last=least, still=about["still"] + 1 if is_unchanged else 0)

    def finish(self, reason: RunReason) -> Fit:
        """Measure the fitted model, write the checkpoint, and return the result of a fit that ended for a reason."""
        best = self.entrant.best()
        value = self.measure(best)
        if not math.isfinite(value):
            reason = RunReason.DIVERGED
        fitted = best if isinstance(best, torch.nn.Module) else self.model
        trainable = _list_trainable(fitted)
        is_small = sum(parameter.numel() for parameter in trainable.values()) <= MOST_SHOWN
        parameters = _to_numbers(trainable) if is_small else {}
        with preserve_random_states():
            errors = standard_errors(self.problem, fitted) if parameters and reason is not RunReason.DIVERGED else None
        self.about.update(evaluations=self.meter.evaluations, seconds=self.meter.seconds(), value=value)
        self.about.update(parameters=parameters, errors=errors)
        self.save()
        counts = {key: self.about[key] for key in ("start", "steps", "evaluations", "seconds")}
        return Fit(fitted, reason, value, path=self.path, parameters=parameters, errors=errors, **counts)


class GradientRule:
    """The stopping rule of `minimize`: the largest component of the gradient is at most a tolerance.

    A gradient counts only if the loss is no higher than at the first evaluation of the step, because a line search also evaluates
    higher points. No state is carried from one step to the next, so that a resumed fit ends at the same step.

    Args:
        model: The model, whose parameters have the gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self.params = list(_list_trainable(model).values())
        exact = bool(self.params) and self.params[0].dtype in (torch.float64, torch.complex128)
        self.tol = choose_tolerance(exact)
        self.begin_step()

    def begin_step(self) -> None:
        """Reset the state before a step."""
        self.vanished, self.first = False, math.inf

    def note(self, loss: float) -> None:
        """Check the gradient after an evaluation, and store in `vanished` whether it is within the tolerance."""
        self.first = loss if self.first == math.inf else self.first
        if not loss <= self.first:
            return
        grads = [param.grad for param in self.params if param.grad is not None and param.grad.numel()]
        self.vanished = bool(grads) and max(float(grad.abs().max()) for grad in grads) <= self.tol


@contextlib.contextmanager
def _record_signals() -> Iterator[list[int]]:
    """Add the first SIGINT, SIGTERM or SIGHUP to the yielded list; a second one raises KeyboardInterrupt.

    Only the main thread can set handlers of signals; in any other the list stays empty.
    """
    signals: list[int] = []

    def note(number: int, _: Any) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    names = ("SIGINT", "SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = [(number, signal.signal(number, note)) for number in numbers]
    try:
        yield signals
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def standard_errors(problem: Problem, model: nn.Module) -> dict[str, Any] | None:
    """Return the standard errors of a least-squares fit: `Result.stderr` of `moduli.minimize` at the model's parameters.

    Args:
        problem: The problem.
        model: Its fitted model.

    Returns:
        A number or nested list for each parameter; None if the problem is no least-squares problem, has fewer residuals than
        parameters, or does not determine all of them.
    """
    trainable = _list_trainable(model)
    residuals = problem.residuals(model)
    if residuals is None or not residuals.requires_grad or any(each.is_complex() for each in trainable.values()):
        return None

    def fun(values: dict[str, torch.Tensor]) -> Any:
        return problem.residuals(lambda *args, **kwargs: call_with_tensors(model, values, args, kwargs))

    errors = minimize(fun, {name: value.detach() for name, value in trainable.items()}, "lm", max_evals=1).stderr
    return _to_numbers(errors) if all(bool(error.isfinite().all()) for error in errors.values()) else None


def _list_trainable(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters that require gradients, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _to_numbers(values: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors as nested lists, under the names that the user gave them: a model adds prefixes to these."""
    numbers = {}
    for name, value in values.items():
        path, dot, last = name.rpartition(".")
        real = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        numbers[public_name(path + dot + last.removeprefix("arg_"))] = real.double().tolist()
    return numbers
