"""The loop around a chain of links: the best point kept, and every way to end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..optim import Closure, ClosureError, Module, Need, Objective, Optimizer
from ._bounds import Box
from ._point import Point

__all__ = ["Record", "Stop", "run_chain"]


class Stop(Exception):
    """Ends a run from inside an evaluation."""


class Record:
    """What is known so far: the best point, counts, the last gradient's size, and why it ended."""

    def __init__(self, point: Point, box: Box | None, fun: Callable[[Any], Any], max_evals: int, method: str) -> None:
        self.point, self.box, self.fun, self.max_evals, self.method = point, box, fun, max_evals, method
        self.value = math.inf
        self.best: list[Tensor] = [leaf.detach().clone() for leaf in point.leaves]
        self.evaluations = self.steps = 0
        self.gradient_norm: float | None = None
        self.reason, self.success = "", False
        self.history: list[tuple[int, float]] = []
        self.began = time.perf_counter()

    def evaluate(self, residuals: bool) -> Any:
        """The user's function at the leaves as they are now; remembers the best point."""
        if self.evaluations >= self.max_evals:
            raise Stop(f"The limit of {self.max_evals} evaluations was reached.")
        self.evaluations += 1
        leaves = self.point.leaves
        seen = leaves if self.box is None else self.box.inside(leaves)
        found = self.fun(self.point.arguments(seen))
        data = getattr(found, "data", found) if not isinstance(found, Tensor) else found
        if not isinstance(data, Tensor):
            raise TypeError(
                f"minimize: the function returned a {type(found).__name__}; return the loss as a 0-d tensor"
            )
        if data.dim() > 0 and not residuals:
            if data.numel() != 1:
                raise ValueError(
                    f"minimize: the function returned a tensor of shape {tuple(data.shape)}; return one number (sum or mean), "
                    "or give a vector of residuals to method='lm' or 'gn'"
                )
            data = data.reshape(())
        with torch.no_grad():
            value = float(data) if data.dim() == 0 else 0.5 * float(data.detach().abs().square().sum())
        if value < self.value and not math.isnan(value):
            self.value = value
            self.best = [leaf.detach().clone() for leaf in seen]
            if value < -1e200:
                raise Stop("The function seems to be unbounded below.")
        return data

    def end(self, reason: str, success: bool) -> None:
        """Note why it ended; the first reason counts."""
        if not self.reason:
            self.reason, self.success = reason, success


class _Watch(Module):
    """Looks at the gradient before every step, and ends the run where it vanishes."""

    needs = frozenset({Need.GRADIENT, Need.LOSS})

    def __init__(self, record: Record, tol: float) -> None:
        super().__init__()
        self.record, self.tol = record, tol

    def apply(self, objective: Objective) -> Objective:
        record = self.record
        loss, grads = objective.get_loss_grads()
        if record.box is not None and not record.box.transform:
            free = record.box.free(objective.params, grads)
            grads = [g * f for g, f in zip(grads, free, strict=True)]
        norm = max((float(g.detach().abs().max()) if g.numel() else 0.0) for g in grads)
        record.gradient_norm = norm
        done = ""
        if loss is not None and not math.isfinite(float(loss)):
            where = "at the start" if record.steps == 0 else "along the way"
            record.end(f"The loss is {float(loss)} {where}.", False)
            done = record.reason
        elif not math.isfinite(norm):
            record.end("The gradient is not finite.", False)
            done = record.reason
        elif norm <= self.tol:
            done = f"The gradient vanishes: its largest component is {norm:.2g}, at most {self.tol:.2g}."
            record.end(done, True)
        if done:
            objective.terminate(done)
            objective.stop = objective.skip_update = True
            objective.updates = [torch.zeros_like(param) for param in objective.params]
        return objective


def run_chain(
    record: Record,
    links: list[Module],
    *,
    tol: float,
    residuals: bool,
    values_only: bool,
    steps: int | None,
    after: Callable[[Record], bool],
) -> None:
    """Steps of a chain until something ends them.

    Args:
        record: What is known.
        links: The chain.
        tol: The largest component of the gradient at the end.
        residuals: Whether the function may return a vector.
        values_only: Whether the chain makes its own gradients.
        steps: The largest number of steps.
        after: Called after each step; a true result ends the run.
    """
    leaves, box = record.point.leaves, record.box
    chain = links if values_only else [_Watch(record, tol), *links]
    opt = Optimizer(leaves, *chain)
    closure = Closure(lambda: record.evaluate(residuals), fixed=True)
    still = quiet = 0
    patience = 200 if values_only or record.method == "adam" else 30
    try:
        while steps is None or record.steps < steps:
            before, value = [leaf.detach().clone() for leaf in leaves], record.value
            opt.step(closure)
            if box is not None:
                box.project(leaves)
            if opt.should_terminate:
                record.end(opt.reasons[-1] if opt.reasons else "A link of the chain asked to stop.", True)
                return
            record.steps += 1
            record.history.append((record.evaluations, record.value))
            if record.value == 0.0 and residuals:
                record.end("All residuals are zero.", True)
                return
            if after(record):
                record.end("The callback asked to stop.", False)
                return
            if all(torch.equal(a, b) for a, b in zip(before, leaves, strict=True)):
                still += 1
                opt.reset()
                if still > (10 if values_only else 2):
                    _at_rest(
                        record, "No lower point was found: the loss is at the limit of its precision.", leaves[0].dtype
                    )
                    return
            else:
                still = 0
            gained = value - record.value
            if math.isfinite(value) and gained <= 1e-15 * abs(record.value):
                quiet += 1
                if quiet == patience // 2 and not values_only and record.method != "adam":
                    opt.reset()
                if quiet >= patience:
                    _at_rest(record, f"The loss has not fallen for {patience} steps.", leaves[0].dtype)
                    return
            else:
                quiet = 0
        record.end(f"The limit of {steps} steps was reached.", False)
    except Stop as stop:
        record.end(str(stop), False)
    except ClosureError as error:
        if "does not depend" not in str(error) and "without a graph" not in str(error):
            raise
        record.end(
            "The function does not depend on x in a way that can be differentiated, so there is nowhere to go; "
            "method='nelder-mead' looks at values only.",
            False,
        )


def _at_rest(record: Record, reason: str, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    norm = record.gradient_norm
    small = norm is not None and norm <= eps**0.5 * max(1.0, abs(record.value)) * 10
    record.end(reason, small)
