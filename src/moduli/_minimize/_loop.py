"""The loop around a chain of links: the best point kept, and every way to end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..optim import Closure, ClosureError, Module, Need, Objective, Optimizer
from ._derivatives import FoundProblem
from ._point import data_of
from ._result import Result
from ._variables import Variables, largest

FAR = 1e9
"""A function that still falls as steeply this far from the start, relative to its size, is taken to be unbounded."""

STRIDE = 6
"""After so many steps the way that they went is compared with that of the steps before; even, for what oscillates."""

OUTSIDE = (ArithmeticError, AssertionError, RuntimeError, ValueError)
"""What a function may raise far outside of its domain, where only the check for unbounded functions goes."""

UNBOUNDED = "The function seems to be unbounded below: it falls without limit."


class EndOfRun(Exception):
    """Ends a run from inside an evaluation."""


def falls_without_limit(first: Any, value: Any, steepness: Any, far: Any, size: Any) -> Any:
    """Whether a value at this distance from the start is of an unbounded function; of numbers, or of tensors of them."""
    return (value < -1e200) | ((far > FAR * size) & (first - value >= 1e-3 * steepness * far))


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
        self.size = max(1.0, largest(self.best))
        self.first: float | None = None
        #: Whether evaluations ask only how the function goes on, and are no candidates for the best.
        self.probing = False
        self.steepness = 1.0
        self.evaluations = self.steps = 0
        self.ready: tuple[list[Tensor], Any] | None = None
        self.gradient_norm: float | None = None
        self.reason, self.success = "", False
        self.history: list[tuple[int, float]] = []
        self.began = time.perf_counter()

    def _call(self) -> tuple[list[Tensor], Any]:
        if self.evaluations >= self.limit:
            raise EndOfRun(f"The limit of {self.max_evals} evaluations was reached.")
        self.evaluations += 1
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
        value = float(data.item()) if data.dim() == 0 else 0.5 * float(data.detach().abs().square().sum())
        if self.first is None:
            if not math.isfinite(value):
                raise EndOfRun(f"The loss is {value} at the start.")
            self.first = value
        if self.probing:
            self._check_fall(value, seen)
            return data
        if value < self.lowest:
            self.lowest = value
            # A number that tells most of the time that there is nothing to look at.
            if value < -1e200 or self.first - value >= 1e-3 * self.steepness * FAR * self.size:
                self._check_fall(value, seen)
        # A value that is lower by rounding only does not outweigh a gradient that is known to be small.
        if value < self.value - (0.0 if self.gradient_norm is None else self.noise(value, data.dtype)):
            self._keep(value, seen, None)
        return data

    def count_step(self, after: Callable[[], bool]) -> bool:
        """A step was made; whether the callback ended the run."""
        self.steps += 1
        self.history.append((self.evaluations, self.lowest))
        if after():
            self.end("The callback asked to stop.", False)
        return bool(self.reason)

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
        size = max(abs(value), abs(self.value) if math.isfinite(self.value) else 0.0)
        return 32 * torch.finfo(dtype).eps * size if math.isfinite(size) else 0.0

    def _keep(self, value: float, seen: list[Tensor], norm: float | None) -> None:
        self.value, self.gradient_norm = value, norm
        self.best = [leaf.detach().clone() for leaf in seen]

    def _check_fall(self, value: float, seen: list[Tensor]) -> None:
        far = largest([x.detach() - x0 for x, x0 in zip(seen, self.start, strict=True)])
        if falls_without_limit(self.first, value, self.steepness, far, self.size):
            self._keep(value, seen, None)
            raise EndOfRun(UNBOUNDED)

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

    def result(self) -> Result:
        """The run so far."""
        fixed = [None if mask is None else ~mask for mask in self.variables.free_masks]
        return Result(
            self.point.result(self.best),
            self.value,
            self.reason or "Still running.",
            self.success,
            self.steps,
            self.evaluations,
            self.gradient_norm,
            time.perf_counter() - self.began,
            tuple(self.history),
            self.method,
            problem=FoundProblem(self.fun, self.point, fixed),
        )


class _GradientWatch(Module):
    """Looks at the gradient before every step, and ends the run where it vanishes."""

    needs = frozenset({Need.GRADIENT, Need.LOSS})

    def __init__(self, record: RunRecord, tol: float) -> None:
        super().__init__()
        self.record, self.tol = record, tol
        self.mark: list[Tensor] = []
        self.way: list[Tensor] = []
        self.next = 2 * STRIDE

    def _look_far(self, objective: Objective) -> None:
        """One value far along a way that goes on as it went; where it falls that far, the record ends the run."""
        record = self.record
        if record.steps % STRIDE or record.variables.bounded:
            return
        here, before = [param.detach().clone() for param in objective.params], self.way
        self.way = [a - b for a, b in zip(here, self.mark, strict=True)] if self.mark else []
        self.mark = here
        if not before or record.steps < self.next:
            return
        length = largest(self.way)
        if length > 0 and largest([a - b for a, b in zip(self.way, before, strict=True)]) <= 1e-3 * length:
            self.next = 2 * record.steps
            far = 2 * FAR * record.size / length
            record.probing = True
            try:
                with objective.moved():
                    objective.move_to([a + far * d for a, d in zip(here, self.way, strict=True)])
                    objective.get_loss(backward=False, at_x0=False)
            except OUTSIDE:
                pass
            finally:
                record.probing = False

    def apply(self, objective: Objective) -> Objective:
        record, variables = self.record, self.record.variables
        loss, grads = objective.get_loss_grads()
        if variables.plain and not variables.transform:
            norm = variables.gradient_norm(objective.params, grads)
        else:
            free = grads if variables.transform else variables.find_free(objective.params, grads)
            held = [g if g is f else g * f for g, f in zip(grads, free, strict=True)]
            norm = largest(held)
        if record.steps == 0 and record.first is not None and math.isfinite(norm):
            record.steepness = norm
        if loss is not None and not math.isfinite(float(loss)):
            record.end(f"The loss is {float(loss)} along the way.", False)
        elif not math.isfinite(norm):
            record.end("The gradient is not finite.", False)
        else:
            if loss is not None and not variables.transform:
                record.note(float(loss), norm, loss.dtype)
            if norm <= self.tol:
                reason = f"The gradient vanishes: its largest component is {norm:.2g}, at most {self.tol:.2g}."
                record.end(reason, True)
            else:
                self._look_far(objective)
        if record.reason:
            objective.terminate(record.reason)
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
    after: Callable[[], bool],
) -> None:
    """Steps of a chain until something ends them.

    Args:
        record: What is known.
        links: The chain.
        tol: The largest component of the gradient at the end.
        residuals: Whether the function may return a vector.
        steps: The largest number of steps.
        after: Called after each step; a true result ends the run.

    Raises:
        EndOfRun: Where an evaluation ended it.
    """
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
            if record.value == 0.0 and residuals:
                record.end("All residuals are zero.", True)
            if record.count_step(after):
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
