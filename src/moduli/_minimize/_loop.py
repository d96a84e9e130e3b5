"""The loop around a chain of links, for one run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..optim import Closure, ClosureError, Module, Need, Objective, Optimizer
from ._point import data_of
from ._runs import RunRecord, read


class EndOfRun(Exception):
    """Ends a run from inside an evaluation."""


def loss_of(found: Any, residuals: bool) -> Tensor:
    """What a user's function returned, as a 0-d tensor or a vector of residuals."""
    data: Tensor | None = data_of(found)
    if data is None:
        raise TypeError(f"minimize: the function returned a {type(found).__name__}; return the loss as a 0-d tensor")
    if data.is_complex() and not residuals:
        raise TypeError(f"minimize: the function returned a {data.dtype} number; return a real one, for instance abs()")
    if data.dim() > 0 and not residuals:
        if data.numel() != 1:
            raise ValueError(
                f"minimize: the function returned a tensor of shape {tuple(data.shape)}; return one number (sum or mean), "
                "or give a vector of residuals to method='lm' or 'gn'"
            )
        data = data.reshape(())
    return data


def value_of(data: Tensor) -> Tensor:
    """The loss: the number itself, or half of the sum of the squares of residuals."""
    return data if data.dim() == 0 else 0.5 * data.abs().square().sum()


class SingleRun(RunRecord):
    """A run from one start.

    Unless it looks at values only, one evaluation is kept for the gradient at the point that is returned, which may have been
    seen by its value only.
    """

    ready: tuple[list[Tensor], Any] | None = None

    def _call(self) -> tuple[list[Tensor], Any]:
        limit = self.max_evals if self.values_only else max(self.max_evals - 1, 1)
        if self.evaluations >= limit:
            raise EndOfRun(f"The limit of {self.max_evals} evaluations was reached.")
        self.evaluations += 1
        self.each += 1
        seen = self.variables.seen()
        return seen, self.point.call(self.fun, seen)

    def peek(self) -> Any:
        """What the function returns at the start; the first evaluation of the run is this one."""
        self.ready = self._call()
        return self.ready[1]

    def evaluate(self, residuals: bool) -> Tensor:
        """The user's function at the variables as they are now; remembers the best point."""
        seen, found = self.ready or self._call()
        self.ready = None
        data = loss_of(found, residuals)
        value = value_of(data.detach())
        if self.first == -math.inf:
            if not bool(value.isfinite()):
                raise EndOfRun(f"The loss is {float(value)} at the start.")
            self.first = read(value)
        self.judge(value, seen)
        if not self.active:
            raise EndOfRun(self.reason)
        return data

    def finish(self, residuals: bool, tol: float) -> None:
        """Know the gradient at the point that is returned, and say so where the run ended at another one."""
        if self.values_only or math.isfinite(self.norms) or not math.isfinite(self.values):
            return
        if self.evaluations < self.max_evals:
            self.evaluations += 1
            self.each += 1
            leaves = [leaf.detach().clone().requires_grad_() for leaf in self.best]
            with torch.enable_grad():
                loss = value_of(loss_of(self.point.call(self.fun, leaves), residuals))
            if loss.requires_grad:
                found = torch.autograd.grad(loss, leaves, allow_unused=True)
                grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
                self.norms = self.largest(self.variables.follow(leaves, grads))
        if bool(self.good) and not self.variables.transform and tol < float(self.norms) < math.inf:
            self.good = np.bool_(False)
            self.reasons = [
                "The run ended where the gradient vanishes, but it had seen a lower point, which is returned: its "
                f"gradient is {float(self.norms):.2g}. Start again from there."
            ]


class _GradientWatch(Module):
    """Looks at the gradient before every step, and ends the run where it vanishes."""

    needs = frozenset({Need.GRADIENT, Need.LOSS})

    def __init__(self, run: SingleRun, tol: float) -> None:
        super().__init__()
        self.run, self.tol = run, tol

    def apply(self, objective: Objective) -> Objective:
        run, variables = self.run, self.run.variables
        loss, grads = objective.get_loss_grads()
        norm = run.largest(grads if variables.transform else variables.follow(objective.params, grads))
        if run.steps == 0 and math.isfinite(norm):
            run.steepness = norm
        run.check_gradient(loss, norm, self.tol)
        if loss is not None and not variables.transform and math.isfinite(norm):
            run.judge(loss, variables.seen(), norm)
        if run.active:
            run.look_far(objective.params, lambda far: self._evaluate(objective, far))
        if run.reason:
            objective.terminate(run.reason)
            objective.stop = objective.skip_update = True
            objective.updates = [torch.zeros_like(param) for param in objective.params]
        return objective

    def _evaluate(self, objective: Objective, there: list[Tensor]) -> None:
        with objective.moved():
            objective.move_to(there)
            objective.get_loss(backward=False, at_x0=False)


def run_chain(
    run: SingleRun, links: list[Module], *, tol: float, residuals: bool, steps: int | None, after: Callable[[], bool]
) -> None:
    """Steps of a chain until something ends them.

    Args:
        run: What is known.
        links: The chain.
        tol: The largest component of the gradient at the end.
        residuals: Whether the function may return a vector.
        steps: The largest number of steps.
        after: Called after each step; a true result ends the run.

    Raises:
        EndOfRun: Where an evaluation ended it.
    """
    leaves = run.variables.leaves
    opt = Optimizer(leaves, *links) if run.values_only else Optimizer(leaves, _GradientWatch(run, tol), *links)
    closure = Closure(lambda: run.evaluate(residuals), fixed=True)
    try:
        while run.active:
            before, lowest = [leaf.detach().clone() for leaf in leaves], run.lowest
            opt.step(closure)
            run.variables.project()
            if opt.should_terminate:
                run.end(opt.reasons[-1] if opt.reasons else "A link of the chain asked to stop.", True)
                return
            if run.value == 0.0 and residuals:
                run.end("All residuals are zero.", True)
            if not run.count_step(after, steps):
                stays = np.bool_(all(torch.equal(a, b) for a, b in zip(before, leaves, strict=True)))
                run.check_progress(stays, lowest, lambda _: opt.reset())
    except ClosureError as error:
        if "does not depend" not in str(error) and "without a graph" not in str(error):
            raise
        run.end(
            "The function does not depend on x in a way that can be differentiated, so there is nowhere to go; "
            "method='nelder-mead' looks at values only.",
            False,
        )
