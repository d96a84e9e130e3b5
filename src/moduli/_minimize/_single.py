"""One run: its evaluations, its limits, and what is known at its end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ._point import loss_of, value_of
from ._runs import Numbers, RunRecord

if TYPE_CHECKING:
    from ..optim import Closure, Module, Optimizer


class EndOfRun(Exception):
    """Ends a run from inside an evaluation."""


def describe_start(loss: float, missing: int, count: int) -> str:
    """Return the reason of a run that can't begin.

    Args:
        loss: The loss at x0, which is not finite.
        missing: How many residuals are NaN there.
        count: How many residuals there are.
    """
    if not missing:
        return f"The loss is {loss} at the start."
    return f"The loss is nan at the start: {missing} of {count} residuals are NaN. nan='mask' leaves them out, as gaps in data."


class SingleRun(RunRecord):
    """A run from one start.

    Unless it looks at values only, one evaluation is kept for the gradient at the point that is returned, which may have been
    seen by its value only.
    """

    ready: tuple[list[Tensor], Any] | None = None
    """The first evaluation of the run, if it was made already."""
    optimizer: Optimizer

    def check_limit(self) -> None:
        """Count an evaluation, unless its result is there already; raise EndOfRun where there have been enough."""
        if self.ready is not None:
            return
        # A gradient at the end may take one; these methods have that of the point which they evaluated.
        spare = 0 if self.values_only or self.method in ("lm", "sqp", "fista", "proximal-gradient") else 1
        limit = max(self.max_evals - spare, 1)
        if self.evaluations >= limit:
            raise EndOfRun(f"The limit of {self.max_evals} evaluations was reached.")
        self.evaluations += 1
        self.each += 1

    def call(self) -> tuple[list[Tensor], Any]:
        """What the function sees now, and what it returns."""
        self.check_limit()
        seen = self.variables.seen()
        return seen, self.point.call(self.fun, seen)

    def read_loss(self) -> tuple[list[Tensor], Tensor, float]:
        """Return what the function sees now, what it returns with its graph, and the loss."""
        seen, found = self.ready or self.call()
        self.ready = None
        data = loss_of(found, self.residuals)
        loss = (data if data.dim() == 0 else value_of(data.detach())).item()
        if self.first == -math.inf:
            if not math.isfinite(loss):
                missing = int(data.detach().isnan().sum()) if data.dim() else 0
                raise EndOfRun(describe_start(loss, missing, data.numel()))
            self.first = np.float64(loss)
        return seen, data, loss

    def evaluate(self) -> Tensor:
        """Return the user's function at the variables as they are now; remember the best point."""
        seen, data, loss = self.read_loss()
        self.judge_one(loss, torch.finfo(data.dtype).eps, seen, None)
        if not self.active:
            raise EndOfRun(self.reason)
        return data

    def begin(self, links: list[Module]) -> None:
        """Take the links of the run."""
        from ..optim import Optimizer  # a room that methods without links do not need

        self.optimizer = Optimizer(self.leaves, *links)

    def advance(self, closure: Closure) -> str:
        """Make a step; why a link ended the run, or ""."""
        self.optimizer.step(closure)
        self.variables.project()
        if self.residuals and self.value == 0.0:
            self.end("All residuals are zero.", True)
        if not self.optimizer.should_terminate:
            return ""
        return (self.optimizer.reasons or ["A link of the chain asked to stop."])[-1]

    def begin_again(self, rows: Numbers) -> None:
        """Forget what the links have learned."""
        self.optimizer.reset()

    def finish(self, tol: float) -> None:
        """Know the gradient at the point that is returned, and say so where the run ended at another one."""
        if self.batch or self.values_only or math.isfinite(self.norms) or not math.isfinite(self.values):
            return
        if self.evaluations < self.max_evals:
            self.evaluations += 1
            self.each += 1
            leaves = [leaf.detach().clone().requires_grad_() for leaf in self.best]
            with torch.enable_grad():
                loss = value_of(loss_of(self.point.call(self.fun, leaves), self.residuals))
            if loss.requires_grad:
                found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
                self.norms = self.largest(self.variables.follow(leaves, list(found)))
        if bool(self.good) and not self.variables.transform and tol < float(self.norms) < math.inf:
            self.good = np.bool_(False)
            fact = "The run ended where the gradient vanishes, but had seen a lower point, which is returned"
            self.reasons = [f"{fact}: its gradient is {float(self.norms):.2g}. Start again from there."]
