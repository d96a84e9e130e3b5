"""`SingleRun`: a run from one start, its evaluations and limits, and the gradient at its end."""

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
    """Return the reason why a run can't start.

    Args:
        loss: The loss at x0, which is not finite.
        missing: The number of residuals that are NaN there.
        count: The number of residuals.
    """
    if not missing:
        return f"The loss is {loss} at the start."
    return f"The loss is nan at the start: {missing} of {count} residuals are NaN. nan='mask' leaves them out, as gaps in data."


class SingleRun(RunRecord):
    """A run from one start.

    Except for derivative-free methods, one evaluation is reserved for the gradient at the returned point, of which possibly
    only the value is known.
    """

    ready: tuple[list[Tensor], Any] | None = None
    """The first evaluation of the run, if it was made already."""
    optimizer: Optimizer

    def check_limit(self) -> None:
        """Count an evaluation, unless its result is available already; raise EndOfRun at the limit."""
        if self.ready is not None:
            return
        # The gradient at the end may need one; these methods always have it.
        spare = 0 if self.values_only or self.method in ("lm", "sqp", "fista", "proximal-gradient") else 1
        limit = max(self.max_evals - spare, 1)
        if self.evaluations >= limit:
            raise EndOfRun(f"The limit of {self.max_evals} evaluations was reached.")
        self.evaluations += 1
        self.each += 1

    def call(self) -> tuple[list[Tensor], Any]:
        """Evaluate the function; return its argument and its result."""
        self.check_limit()
        seen = self.variables.seen()
        return seen, self.point.call(self.fun, seen)

    def read_loss(self) -> tuple[list[Tensor], Tensor, float]:
        """Evaluate the function; return its argument, its result with the graph, and the loss."""
        seen, result = self.ready or self.call()
        self.ready = None
        data = loss_of(result, self.residuals)
        loss = (data if data.dim() == 0 else value_of(data.detach())).item()
        if self.first == -math.inf:
            if not math.isfinite(loss):
                missing = int(data.detach().isnan().sum()) if data.dim() else 0
                raise EndOfRun(describe_start(loss, missing, data.numel()))
            self.first = np.float64(loss)
        return seen, data, loss

    def evaluate(self) -> Tensor:
        """Evaluate the function at the present variables, and record the point if it is the best."""
        seen, data, loss = self.read_loss()
        self.judge_one(loss, torch.finfo(data.dtype).eps, seen, None)
        if not self.active:
            raise EndOfRun(self.reason)
        return data

    def begin(self, links: list[Module]) -> None:
        """Take the links of the run."""
        from ..optim import Optimizer  # imported here because methods without links do not need it

        self.optimizer = Optimizer(self.leaves, *links)

    def advance(self, closure: Closure) -> str:
        """Make a step; return the reason why a link ended the run, or ""."""
        self.optimizer.step(closure)
        self.variables.project()
        if self.residuals and self.value == 0.0:
            self.end("All residuals are zero.", True)
        if not self.optimizer.should_terminate:
            return ""
        return (self.optimizer.reasons or ["A link of the chain asked to stop."])[-1]

    def begin_again(self, rows: Numbers) -> None:
        """Reset the links."""
        self.optimizer.reset()

    def finish(self, tol: float) -> None:
        """Compute the gradient at the returned point, and set the reason if the run ended at another one."""
        if self.batch or self.values_only or math.isfinite(self.norms) or not math.isfinite(self.values):
            return
        if self.evaluations < self.max_evals:
            self.evaluations += 1
            self.each += 1
            leaves = [leaf.detach().clone().requires_grad_() for leaf in self.best]
            with torch.enable_grad():
                loss = value_of(loss_of(self.point.call(self.fun, leaves), self.residuals))
            if loss.requires_grad:
                grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
                self.norms = self.largest(self.variables.follow(leaves, list(grads)))
        if bool(self.good) and not self.variables.transform and tol < float(self.norms) < math.inf:
            self.good = np.bool_(False)
            fact = "The run ended where the gradient vanishes, but had seen a lower point, which is returned"
            self.reasons = [f"{fact}: its gradient is {float(self.norms):.2g}. Start again from there."]
