"""The loop around a chain of links: the best point kept, and every way to end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..optim import Closure, ClosureError, Module, Need, Objective, Optimizer
from ._variables import Variables

__all__ = ["RunRecord", "EndOfRun", "loss_of", "run_chain"]

_FAR = 1e9
"""A function that still falls as steeply this far from the start, relative to its size, is taken to be unbounded."""


class EndOfRun(Exception):
    """Ends a run from inside an evaluation."""


def loss_of(found: Any, residuals: bool) -> Tensor:
    """What a user's function returned, as a 0-d tensor or a vector of residuals."""
    data = found if isinstance(found, Tensor) else getattr(found, "data", None)
    if not isinstance(data, Tensor):
        raise TypeError(f"minimize: the function returned a {type(found).__name__}; return the loss as a 0-d tensor")
    if data.dim() > 0 and not residuals:
        if data.numel() != 1:
            raise ValueError(
                f"minimize: the function returned a tensor of shape {tuple(data.shape)}; return one number (sum or mean), "
                "or give a vector of residuals to method='lm' or 'gn'"
            )
        data = data.reshape(())
    return data


class RunRecord:
    """What is known so far: the best point with its value and gradient, counts, and why it ended.

    Args:
        variables: What is moved.
        fun: The function of x.
        max_evals: How often it may be called.
        method: The name of the method.
        gradients: Whether the method asks for gradients. One evaluation is then kept for the gradient at the point that is
            returned, which may have been seen by its value only.
    """

    def __init__(
        self, variables: Variables, fun: Callable[[Any], Any], max_evals: int, method: str, gradients: bool
    ) -> None:
        self.variables, self.point, self.fun, self.method = variables, variables.point, fun, method
        self.max_evals, self.gradients = max_evals, gradients
        self.limit = max_evals - 1 if gradients and max_evals > 1 else max_evals
        self.value = self.lowest = math.inf
        self.best: list[Tensor] = [leaf.detach().clone() for leaf in variables.seen()]
        self.start = [leaf.clone() for leaf in self.best]
        self.size = max([1.0, *(float(leaf.abs().max()) for leaf in self.best if leaf.numel())])
        self.first: float | None = None
        self.steepness = 1.0
        self.evaluations = self.steps = 0
        self.gradient_norm: float | None = None
        self.reason, self.success = "", False
        self.history: list[tuple[int, float]] = []
        self.began = time.perf_counter()

    def evaluate(self, residuals: bool) -> Tensor:
        """The user's function at the variables as they are now; remembers the best point."""
        if self.evaluations >= self.limit:
            raise EndOfRun(f"The limit of {self.max_evals} evaluations was reached.")
        self.evaluations += 1
        seen = self.variables.seen()
        data = loss_of(self.point.call(self.fun, seen), residuals)
        with torch.no_grad():
            value = float(data) if data.dim() == 0 else 0.5 * float(data.detach().abs().square().sum())
        self.first = value if self.first is None else self.first
        if value < self.lowest:
            self.lowest = value
            self._check_fall(value, seen)
        # A value that is lower by rounding only does not outweigh a gradient that is known to be small.
        if value < self.value - (0.0 if self.gradient_norm is None else self.noise(value, data.dtype)):
            self._keep(value, seen, None)
        return data

    def note(self, value: float, norm: float, dtype: torch.dtype) -> bool:
        """Compare the present point, whose gradient is known, with the best; whether it is the best now."""
        known = math.inf if self.gradient_norm is None else self.gradient_norm
        noise = self.noise(value, dtype)
        if value < self.value - noise or (value <= self.value + noise and norm <= known):
            self._keep(value, self.variables.seen(), norm)
            return True
        return False

    def noise(self, value: float, dtype: torch.dtype) -> float:
        """How far apart two values may be by rounding alone."""
        sizes = [abs(v) for v in (value, self.value) if math.isfinite(v)]
        return 32 * torch.finfo(dtype).eps * max(sizes, default=0.0)

    def _keep(self, value: float, seen: list[Tensor], norm: float | None) -> None:
        self.value, self.gradient_norm = value, norm
        self.best = [leaf.detach().clone() for leaf in seen]

    def _check_fall(self, value: float, seen: list[Tensor]) -> None:
        far = max(float((x.detach() - x0).abs().max()) for x, x0 in zip(seen, self.start, strict=True) if x.numel())
        falls = self.first is not None and self.first - value >= 1e-3 * self.steepness * far
        if value < -1e200 or (far > _FAR * self.size and falls):
            self._keep(value, seen, None)
            raise EndOfRun("The function seems to be unbounded below: it falls without limit.")

    def end(self, reason: str, success: bool) -> None:
        """Note why it ended; the first reason counts."""
        if not self.reason:
            self.reason, self.success = reason, success

    def finish(self, residuals: bool, tol: float) -> None:
        """Know the gradient at the point that is returned, and say so where the run ended at another one."""
        if not self.gradients or self.gradient_norm is not None or not math.isfinite(self.value):
            return
        if self.evaluations < self.max_evals:
            self.evaluations += 1
            leaves = [leaf.detach().clone().requires_grad_() for leaf in self.best]
            with torch.enable_grad():
                data = loss_of(self.point.call(self.fun, leaves), residuals)
                loss = data if data.dim() == 0 else 0.5 * data.abs().square().sum()
            if loss.requires_grad:
                found = torch.autograd.grad(loss, leaves, allow_unused=True)
                grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
                self.gradient_norm = self.variables.gradient_norm(leaves, grads)
        norm = self.gradient_norm
        if self.success and not self.variables.transform and norm is not None and norm > tol:
            self.success = False
            self.reason = (
                "The run ended where the gradient vanishes, but it had seen a lower point, which is returned: its "
                f"gradient is {norm:.2g}. Start again from there."
            )


class _GradientWatch(Module):
    """Looks at the gradient before every step, and ends the run where it vanishes."""

    needs = frozenset({Need.GRADIENT, Need.LOSS})

    def __init__(self, record: RunRecord, tol: float) -> None:
        super().__init__()
        self.record, self.tol = record, tol
        self.last: list[Tensor] = []
        self.alike = 0

    def _look_far(self, objective: Objective, grads: list[Tensor], norm: float) -> None:
        """One value far down a slope that has not changed for ten steps; where it falls that far, the record ends the run."""
        same = len(self.last) == len(grads) and all(map(torch.equal, self.last, grads))
        self.alike = self.alike + 1 if same else 0
        self.last = [grad.clone() for grad in grads]
        if self.alike == 10 and not self.record.variables.bounded and norm > 0:
            far = 2 * _FAR * self.record.size / norm
            with objective.moved() as start:
                objective.move_to([a - far * g for a, g in zip(start, grads, strict=True)])
                objective.get_loss(backward=False, at_x0=False)

    def apply(self, objective: Objective) -> Objective:
        record, variables = self.record, self.record.variables
        loss, grads = objective.get_loss_grads()
        if variables.plain and not variables.transform:
            norm = variables.gradient_norm(objective.params, grads)
        else:
            free = grads if variables.transform else variables.free(objective.params, grads)
            held = [g if g is f else g * f for g, f in zip(grads, free, strict=True)]
            norm = max((float(g.detach().abs().max()) if g.numel() else 0.0) for g in held)
        if record.steps == 0 and record.first is not None and math.isfinite(norm):
            record.steepness = norm
        done = ""
        if loss is not None and not math.isfinite(float(loss)):
            where = "at the start" if record.steps == 0 else "along the way"
            record.end(f"The loss is {float(loss)} {where}.", False)
            done = record.reason
        elif not math.isfinite(norm):
            record.end("The gradient is not finite.", False)
            done = record.reason
        else:
            if loss is not None and not variables.transform:
                record.note(float(loss), norm, loss.dtype)
            if norm <= self.tol:
                done = f"The gradient vanishes: its largest component is {norm:.2g}, at most {self.tol:.2g}."
                record.end(done, True)
            else:
                self._look_far(objective, grads, norm)
        if done:
            objective.terminate(done)
            objective.stop = objective.skip_update = True
            objective.updates = [torch.zeros_like(param) for param in objective.params]
        return objective


def run_chain(
    record: RunRecord,
    links: list[Module],
    *,
    tol: float,
    residuals: bool,
    steps: int | None,
    after: Callable[[RunRecord], bool],
) -> None:
    """Steps of a chain until something ends them.

    Args:
        record: What is known.
        links: The chain.
        tol: The largest component of the gradient at the end.
        residuals: Whether the function may return a vector.
        steps: The largest number of steps.
        after: Called after each step; a true result ends the run.
    """
    _run(record, links, tol, residuals, steps, after)
    record.finish(residuals, tol)


def _run(
    record: RunRecord,
    links: list[Module],
    tol: float,
    residuals: bool,
    steps: int | None,
    after: Callable[[RunRecord], bool],
) -> None:
    leaves, values_only = record.variables.leaves, not record.gradients
    chain = links if values_only else [_GradientWatch(record, tol), *links]
    opt = Optimizer(leaves, *chain)
    closure = Closure(lambda: record.evaluate(residuals), fixed=True)
    still = quiet = 0
    patience = 200 if values_only or record.method == "adam" else 30
    try:
        while steps is None or record.steps < steps:
            before, value = [leaf.detach().clone() for leaf in leaves], record.lowest
            opt.step(closure)
            record.variables.project()
            if opt.should_terminate:
                record.end(opt.reasons[-1] if opt.reasons else "A link of the chain asked to stop.", True)
                return
            record.steps += 1
            record.history.append((record.evaluations, record.lowest))
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
                    _rest(record, "No lower point was found: the loss is at the limit of its precision.")
                    return
            else:
                still = 0
            gained = value - record.lowest
            if math.isfinite(value) and gained <= 1e-15 * abs(record.lowest):
                quiet += 1
                if quiet == patience // 2 and not values_only and record.method != "adam":
                    opt.reset()
                if quiet >= patience:
                    _rest(record, f"The loss has not fallen for {patience} steps.")
                    return
            else:
                quiet = 0
        record.end(f"The limit of {steps} steps was reached.", False)
    except EndOfRun as stop:
        record.end(str(stop), False)
    except ClosureError as error:
        if "does not depend" not in str(error) and "without a graph" not in str(error):
            raise
        record.end(
            "The function does not depend on x in a way that can be differentiated, so there is nowhere to go; "
            "method='nelder-mead' looks at values only.",
            False,
        )


def _rest(record: RunRecord, reason: str) -> None:
    eps = torch.finfo(record.variables.leaves[0].dtype).eps
    norm = record.gradient_norm
    small = norm is not None and norm <= eps**0.5 * max(1.0, abs(record.value)) * 10
    record.end(reason, small)
