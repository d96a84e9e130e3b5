"""Fitting one problem for as long as it takes, with checkpoints to stop and go on at."""

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
from torch.func import functional_call

from .. import io
from .._minimize import choose_tolerance, minimize
from .._texts import shorten
from ..layout import public_name
from ._contender import Contender, Entrant, contender
from ._grammar import ParsedChain
from ._reference import as_problem
from ._run import Meter, RunEnd, RunReason, seed_all, take_steps
from .problems import Problem

# A step with so many evaluations has searched; if the loss stays the same to the last bit, it does not become smaller.
SEARCHED = 5
# So many such steps in a row end a fit; `minimize` ends after as many.
STILL = 3
# How many numbers of a model are told one by one.
MOST_SHOWN = 64


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
    runner = contender(chain)
    seed_all(seed)
    problem = as_problem(problem, getattr(problem, "__name__", "problem"))
    model = problem.model(seed)
    entrant, generator = runner.enter(model), torch.Generator().manual_seed(seed)
    path = None if out is None else Path(out)
    # What is saved beside the states, and goes on from there.
    about: dict[str, Any] = {"chain": runner.source, "problem": problem.name, "start": problem.measure(model)}
    about |= {"steps": 0, "evaluations": 0, "seconds": 0.0, "still": 0, "last": math.nan}
    if path is not None and path.exists():
        if not resume and not overwrite:
            raise io.CheckpointError(f"{path} exists: go on from it with --resume, or start again with --overwrite")
        if resume:
            about |= _load(path, entrant, generator, runner.source, problem.name)
    meter = Meter(2**62, math.inf, None)
    meter.evaluations, meter.began = about["evaluations"], meter.began - about["seconds"]

    def save() -> None:
        if path is not None:
            extra = {"fit": about, "generator": generator, "losses": entrant.losses}
            # Of a population, the module in the file is its best member: any program can then read the result.
            module = entrant.best() if entrant.population is not None else model
            io.make_directory(path.parent)
            io.save(path, module, optimizer=entrant.optimizer, population=entrant.population, extra=extra)  # type: ignore[arg-type]

    def drive() -> RunReason:
        told, measured, saved = 0.0, 0.0, time.monotonic()
        watch = GradientRule(model)
        moves = take_steps(problem, entrant, meter, generator, watch=watch.note)
        while about["steps"] < steps:
            if asked:
                return RunReason.INTERRUPTED
            watch.begin_step()
            loss = next(moves)
            here = math.nan if loss is None else float(torch.as_tensor(loss).detach().min())
            searched = meter.evaluations - about["evaluations"] >= SEARCHED
            still = searched and here == about["last"] and not problem.noisy
            about.update(steps=about["steps"] + 1, evaluations=meter.evaluations, seconds=meter.seconds())
            about.update(last=here, still=about["still"] + 1 if still else 0)
            if watch.vanished and target is None and not problem.noisy:
                return RunReason.CONVERGED
            if about["still"] >= STILL or entrant.finished:
                return RunReason.STOPPED
            now = time.monotonic()
            if listen is not None and (now - told > 0.1 or about["steps"] == steps):
                told = now
                listen({**{key: about[key] for key in ("steps", "evaluations", "seconds")}, "loss": here})
            if target is not None and now - measured > 0.5:
                measured = now
                if problem.measure(entrant.best()) <= target:
                    return RunReason.TARGET
            if about["seconds"] > seconds:
                return RunReason.TIME
            if now - saved > every:
                save()
                saved = time.monotonic()
        return RunReason.STEPS

    with _patience() as asked:
        try:
            reason = drive()
        except RunEnd as end:
            reason = end.reason
    best = entrant.best()
    value = problem.measure(best)
    if not math.isfinite(value):
        reason = RunReason.DIVERGED
    fitted = best if isinstance(best, torch.nn.Module) else model
    found = _trainable(fitted)
    short = sum(parameter.numel() for parameter in found.values()) <= MOST_SHOWN
    parameters = _to_numbers(found) if short else {}
    errors = standard_errors(problem, fitted) if parameters and reason is not RunReason.DIVERGED else None
    about.update(evaluations=meter.evaluations, seconds=meter.seconds(), value=value)
    about.update(parameters=parameters, errors=errors)
    save()
    counts = {key: about[key] for key in ("start", "steps", "evaluations", "seconds")}
    return Fit(fitted, reason, value, path=path, parameters=parameters, errors=errors, **counts)


class GradientRule:
    """The rule by which `minimize` ends too: the largest component of the gradient is at most a tolerance.

    A gradient counts where the loss is no higher than where the step began: a search may pass other points. Nothing is
    carried from one step to the next, so that a fit which is resumed ends where the other does.

    Args:
        model: The model, whose parameters have the gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self.params = list(_trainable(model).values())
        exact = bool(self.params) and self.params[0].dtype in (torch.float64, torch.complex128)
        self.tol = choose_tolerance(exact)
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step."""
        self.vanished, self.first = False, math.inf

    def note(self, loss: float) -> None:
        """Look at the gradient of an evaluation."""
        self.first = loss if self.first == math.inf else self.first
        if not loss <= self.first:
            return
        grads = [param.grad for param in self.params if param.grad is not None and param.grad.numel()]
        self.vanished = bool(grads) and max(float(grad.abs().max()) for grad in grads) <= self.tol


def _load(path: Path, entrant: Entrant, generator: torch.Generator, source: str, name: str) -> dict[str, Any]:
    """Put a contender where a fit ended, and give what was saved beside."""
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
    model = None if entrant.population is not None else entrant.model
    extra = {"generator": generator}
    io.load(path, model, optimizer=entrant.optimizer, population=entrant.population, extra=extra)
    entrant.losses = saved["losses"]
    return about


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
        found[public_name(path + dot + last.removeprefix("arg_"))] = real.double().tolist()
    return found
