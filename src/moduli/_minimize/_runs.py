"""`RunRecord`: the record of one run, or of many at once: the best point of each, counts, and the reasons to end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._point import StartPoint, to_vector
from ._result import FoundProblem, Result
from ._variables import Variables

FAR = 1e9
"""A function that still falls as steeply this far from the start, relative to its size, is taken to be unbounded."""

STRIDE = 6
"""The number of steps after which their sum is compared with that of the steps before; even, because of oscillations."""

OUTSIDE = (ArithmeticError, AssertionError, RuntimeError, ValueError)
"""Exceptions that a function may raise far outside of its domain, where only the check for unbounded functions evaluates it."""


# A number, or an array with one for each run. NumPy's numbers are several times faster than 0-d tensors.
Numbers = Any


def read(numbers: Tensor) -> Numbers:
    """Return one number per run, copied to the host."""
    if numbers.dim() == 0:
        return np.float64(numbers.item())
    return numbers.detach().double().cpu().numpy()[()]


def choose(rows: Numbers, new: Numbers, old: Numbers) -> Numbers:
    """Select elementwise per run, like `np.where`.

    Args:
        rows: The condition of each run.
        new: The numbers where it holds.
        old: The numbers where it does not.
    """
    if isinstance(rows, bool | np.bool_):
        return new if rows else old
    selected: Any = np.where(rows, new, old)
    return selected[()]


class RunRecord:
    """The best point of each run with its value and gradient, counts, and the reason why it ended.

    Numbers of runs are arrays of the shape `batch`: () for a single run, (N,) for N starts along the first axis of every
    leaf. Unknown numbers are infinite.

    Args:
        variables: The variables of x0, and their map to the function's argument.
        leaves: The tensors that the method moves.
        fun: The function of x.
        max_evals: The largest number of calls per run; by default 10000, or 200 per number if that is more.
        method: The name of the method.
        values_only: Whether the method needs no gradients.
        batch: The shape of the runs.
    """

    def __init__(
        self,
        variables: Variables,
        leaves: list[Tensor],
        fun: Callable[[Any], Any],
        max_evals: int | None,
        method: str,
        values_only: bool = False,
        batch: tuple[int, ...] = (),
    ) -> None:
        self.variables, self.point, self.fun, self.method = variables, variables.point, fun, method
        self.leaves, self.values_only, self.batch = leaves, values_only, batch
        size = self.point.size // math.prod(batch)
        self.max_evals = max(10_000, 200 * size) if max_evals is None else max_evals
        #: The number of computed Jacobians, and the Jacobian at the end of a fit.
        self.jacobians = 0
        self.end_jacobian: Tensor | None = None
        #: Whether the function may return a vector.
        self.residuals = False
        self.best: list[Tensor] = [leaf.detach().clone() for leaf in variables.seen()]
        self.start = [leaf.clone() for leaf in self.best]
        self.size: Numbers = np.maximum(self.largest(self.best), 1.0)
        self.values: Numbers = np.full(batch, math.inf)[()]
        self.lowest: Numbers = self.values
        self.norms: Numbers = self.values
        # The initial loss and gradient; with these values no function counts as unbounded.
        self.first: Numbers = -self.values
        self.steepness: Numbers = np.ones(batch)[()]
        self.active: Numbers = np.ones(batch, bool)[()]
        self.good: Numbers = ~self.active
        self.reasons = [""] * self.active.size
        self.each: Numbers = np.zeros(batch, int)[()]
        self.evaluations = self.steps = 0
        self.history: list[tuple[int, Any]] = []
        self.began = time.perf_counter()
        #: Whether evaluations only probe the function, and are no candidates for the best point.
        self.probing = False
        self._mark, self._way = [leaf.detach().clone() for leaf in leaves], leaves
        self._next: Numbers = self.each + 2 * STRIDE
        self._still: Numbers = self.each + 0
        self._quiet: Numbers = self._still
        self._patience = 200 if values_only or method == "adam" else 30

    @property
    def value(self) -> float:
        """The lowest loss of all."""
        return float(self.values.min())

    @property
    def reason(self) -> str:
        """The reason why it ended; "" if it has not."""
        if len(set(self.reasons)) == 1 or "" in self.reasons:
            return min(self.reasons)
        if bool(self.good.all()):
            return "Every start has reached a point where the gradient vanishes, or can get no lower."
        bad, count = int((~self.good).sum()), len(self.reasons)
        return f"{bad} of {count} starts ended where the gradient does not vanish; the others converged."

    def some(self, rows: Numbers) -> bool:
        """Whether a condition holds for at least one run."""
        return bool(rows.any() if self.batch else rows)

    def largest(self, tensors: list[Tensor]) -> Numbers:
        """Return the largest absolute value of each run; NaN if there is one."""
        largest: Numbers = np.zeros(self.batch)[()]
        for tensor in tensors:
            if not self.batch and tensor.is_cpu and tensor.dtype in (torch.float32, torch.float64) and tensor.numel():
                largest = np.maximum(largest, np.abs(tensor.detach().numpy()).max())
            elif tensor.numel():
                largest = np.maximum(largest, read(tensor.detach().abs().reshape(*self.batch, -1).amax(-1)))
        return largest

    def spread(self, numbers: Numbers, like: Tensor) -> Tensor:
        """Return one number per run as a tensor that broadcasts with a tensor of all runs."""
        axes = (*self.batch, *[1] * (like.dim() - len(self.batch)))
        return torch.as_tensor(np.asarray(numbers), device=like.device).reshape(axes)

    def _choose(self, rows: Numbers, new: Tensor, old: Tensor) -> Tensor:
        return torch.where(self.spread(rows, old), new, old) if self.batch else new.clone()

    def judge(self, values: Tensor, seen: list[Tensor], norms: Numbers = None) -> None:
        """Record points that are better than the best: lower by more than rounding, or as low with a smaller gradient.

        Args:
            values: The losses; infinite for runs that were not evaluated.
            seen: The points.
            norms: The largest component of the gradient there, or None.
        """
        if self.batch:
            self._judge_many(values, seen, norms)
        else:
            self.judge_one(values.item(), torch.finfo(values.dtype).eps, seen, norms)

    def judge_one(self, loss: float, eps: float, seen: list[Tensor], norm: float | None) -> None:
        """Record the point of a single run if it is better, with Python's numbers, which are faster than arrays.

        Args:
            loss: The loss.
            eps: The relative rounding of it.
            seen: The point.
            norm: The largest component of the gradient there, or None.
        """
        best, flattest, size = float(self.values), float(self.norms), float(self.size)
        least_fall, fallen = 1e-3 * float(self.steepness), float(self.first) - loss
        falls = loss < -1e200
        if fallen >= least_fall * FAR * size:
            falls = falls or bool(self._falls_steadily(seen, fallen))
        if self.probing and not falls:
            loss = math.inf
        if loss < self.lowest:
            self.lowest = np.float64(loss)
        noise = 32 * eps * min(max(abs(loss), abs(best)), 1e300)
        taken = falls or loss < best - noise * (flattest < math.inf)
        if norm is not None and not taken:
            taken = loss <= best + noise and bool(norm <= flattest) and loss < math.inf
        if taken:
            self.best = [x.detach().clone() for x in seen]
            self.values = np.float64(loss)
            self.norms = np.float64(math.inf if norm is None else norm)
        if falls:
            self.end("The function seems to be unbounded below: it falls without limit.", False)

    @np.errstate(all="ignore")
    def _falls_steadily(self, seen: list[Tensor], fallen: Numbers) -> Numbers:
        """Return, for each run, whether it is far from the start, and has fallen in proportion to the distance."""
        far = self.largest([x.detach() - x0 for x, x0 in zip(seen, self.start, strict=True)])
        return (far > FAR * self.size) & (fallen >= 1e-3 * self.steepness * far)

    @np.errstate(all="ignore")
    def _judge_many(self, values: Tensor, seen: list[Tensor], norms: Numbers) -> None:
        eps, losses = torch.finfo(values.dtype).eps, read(values)
        falls = losses < -1e200
        # A cheap condition that is false for most steps.
        if self.some(self.first - losses >= 1e-3 * self.steepness * FAR * self.size):
            falls = falls | self._falls_steadily(seen, self.first - losses)
        if self.probing:
            losses = choose(falls, losses, math.inf)
        self.lowest = np.fmin(self.lowest, losses)
        noise = 32 * eps * np.fmin(np.maximum(abs(losses), abs(self.values)), 1e300)
        # A value that is lower by rounding only does not outweigh a gradient that is known to be small.
        taken = losses < self.values - noise * (self.norms < math.inf)
        if norms is not None:
            taken = taken | ((losses <= self.values + noise) & (norms <= self.norms) & (losses < math.inf))
        taken = taken | falls
        if self.some(taken):
            pairs = zip(seen, self.best, strict=True)
            self.best = [self._choose(taken, new.detach(), old) for new, old in pairs]
            self.values = choose(taken, losses, self.values)
            self.norms = choose(taken, math.inf if norms is None else norms, self.norms)
        self.end("The function seems to be unbounded below: it falls without limit.", False, falls)

    def check_gradient(self, values: Numbers, norms: Numbers, tol: float) -> None:
        """End the runs whose gradient vanishes, or whose gradient or loss is not finite.

        Args:
            values: The losses.
            norms: The largest components of the gradients.
            tol: The largest component of a gradient that vanishes.
        """
        if not self.batch and tol < norms < math.inf and math.isfinite(values):
            return  # the common case of a single run that continues, without arrays
        finite = np.isfinite(norms) & np.isfinite(values)
        self.end("The loss or its gradient is not finite along the way.", False, ~finite)
        self.end(f"The gradient vanishes: its largest component is at most {tol:.2g}.", True, norms <= tol)

    def end(self, reason: str, good: Numbers, rows: Numbers = None) -> None:
        """End runs that are active.

        Args:
            reason: The reason.
            good: Whether they succeeded.
            rows: The runs; None for all.
        """
        rows = self.active if rows is None else rows & self.active
        if self.some(rows):
            for row in np.flatnonzero(rows):
                self.reasons[row] = reason
            self.good, self.active = self.good | (rows & good), self.active & ~rows

    def count_step(self, after: Callable[[], bool], limit: int | None) -> bool:
        """Count a step, end the runs for the callback or the limit of steps, and return whether all runs have ended."""
        self.steps += 1
        self.history.append((self.evaluations, torch.as_tensor(self.values) if self.batch else float(self.lowest)))
        if after():
            self.end("The callback asked to stop.", False)
        elif limit is not None and self.steps >= limit:
            self.end(f"The limit of {limit} steps was reached.", False)
        return not self.some(self.active)

    @np.errstate(all="ignore")
    def look_far(self, probe: Callable[[list[Tensor]], object]) -> None:
        """Evaluate one distant point along the search direction, to detect an unbounded objective.

        Args:
            probe: Evaluates the function at other values of the variables, and restores them.
        """
        if self.steps % STRIDE or self.variables.bounded:
            return
        here, before = [leaf.detach().clone() for leaf in self.leaves], self._way
        self._way = [a - b for a, b in zip(here, self._mark, strict=True)]
        self._mark, length = here, self.largest(self._way)
        same = self.largest([a - b for a, b in zip(self._way, before, strict=True)]) <= 1e-3 * length
        rows = self.active & (length > 0) & same & (self._next <= self.steps) & (self.each < self.max_evals)
        if not self.some(rows):
            return
        self._next = np.where(rows, 2 * self.steps, self._next)
        far, self.probing = np.where(rows, 2 * FAR * self.size / length, 0.0), True
        try:
            ways = zip(here, self._way, strict=True)
            probe([a + (self.spread(far, a) * d).to(a.dtype) for a, d in ways])
        except OUTSIDE:
            pass
        finally:
            self.probing = False

    @np.errstate(all="ignore")
    def check_progress(self, stays: Numbers, before: Numbers) -> Numbers:
        """Return the runs that should restart because they do not move or fall any more; end them if restarts did not help.

        Args:
            stays: The runs that the last step did not move.
            before: The lowest values before the step.
        """
        self._still = (self._still + 1) * stays
        silent = np.isfinite(before) & (before - self.lowest <= 1e-15 * abs(self.lowest))
        self._quiet = (self._quiet + 1) * silent
        again = stays
        if self._patience == 30:
            again = again | (self._quiet == 15)
        still, quiet = self._still > (10 if self.values_only else 2), self._quiet >= self._patience
        if self.some(still | quiet):
            eps = torch.finfo(self.best[0].dtype).eps
            huge = np.isfinite(self.norms) & (self.norms > math.sqrt(torch.finfo(self.best[0].dtype).max))
            fact = "The gradient overflows: its largest component is too large to be squared"
            self.end(
                f"{fact}. Minimise the logarithm of the function, or a multiple of it.", False, huge & (still | quiet)
            )
            small = self.norms <= eps**0.5 * 10 * np.maximum(abs(self.values), 1.0)
            self.end("No lower point was found: the loss is at the limit of its precision.", small, still)
            self.end(f"The loss has not fallen for {self._patience} steps.", small, quiet)
        return again & self.active

    def find_still(self, there: list[Tensor]) -> Numbers:
        """Return the runs that are at a point."""
        if self.batch:
            return read((self.leaves[0] == there[0]).all(1)).astype(bool)
        return np.bool_(all(map(torch.equal, there, self.leaves)))

    def result(self) -> Result:
        """Return the result of all runs so far."""
        if not self.batch:
            return self._describe(self.point)
        starts = tuple(self._describe(self.point.row(i), (i,)) for i in range(*self.batch))
        values, norms = (torch.as_tensor(each).to(self.best[0].dtype) for each in (self.values, self.norms))
        x, good, reason = self.point.result(self.best), bool(self.good.all()), self.reason or "Still running."
        counts, history = (self.steps, self.evaluations), tuple(self.history)
        seconds = time.perf_counter() - self.began
        return Result(x, values, reason, good, *counts, norms, seconds, history, self.method, starts=starts)

    def _describe(self, point: StartPoint, at: tuple[int, ...] = ()) -> Result:
        """Return the result of one run, by its index in `batch`."""
        best, value, good = [leaf[at] for leaf in self.best], float(self.values[at]), bool(self.good[at])
        reason, counts = self.reasons[sum(at)] or "Still running.", (self.steps, int(self.each[at]))
        norm = float(self.norms[at]) if bool(self.norms[at] < math.inf) else None
        history = [(count, float(values[at])) for count, values in self.history] if at else self.history
        seconds = time.perf_counter() - self.began
        fixed = [None if mask is None else mask[at] for mask in self.variables.find_fixed()]
        problem, x = FoundProblem(self.fun, point, to_vector(best), fixed, J=self.end_jacobian), point.result(best)
        return Result(x, value, reason, good, *counts, norm, seconds, tuple(history), self.method, problem=problem)
