"""BFGS and L-BFGS over small vectors in NumPy, equal to the chains of `m.BFGS` and `m.LBFGS` with `m.StrongWolfe`.

A step of a chain costs some forty operations of torch, several times the evaluation of a function of a few numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..m import StrongWolfe
from ..m.line_search import run_trials
from ..m.quasi_newton import PairMemory
from ._single import EndOfRun, SingleRun

Array = np.ndarray[Any, np.dtype[Any]]


class DescentPoint(NamedTuple):
    """A point, with the loss, the gradient and its largest component there."""

    x: Array
    loss: float
    g: Array
    norm: float


LARGEST = 10_000
"""The length of vectors above which torch's operations are faster than NumPy's."""


def fits_numpy(leaves: list[Tensor]) -> bool:
    """Return whether the leaves are few real numbers of one precision on the CPU, whose memory NumPy can write."""
    dtype = leaves[0].dtype
    plain = all(leaf.is_cpu and leaf.dtype is dtype and leaf.is_contiguous() for leaf in leaves)
    return plain and dtype in (torch.float32, torch.float64) and sum(leaf.numel() for leaf in leaves) <= LARGEST


class InverseOfPairs:
    """The inverse Hessian of the last ten pairs of steps s and changes y of the gradient (`m.LBFGS`).

    Args:
        like: A vector with the length and dtype of the variables.
    """

    def __init__(self, like: Tensor) -> None:
        self.pairs = PairMemory({}, like, 10)

    def multiply(self, g: Array) -> Array | None:
        """Return the inverse Hessian times a vector, or None before there is a pair."""
        direction: Array | None = self.pairs.direction(g) if self.pairs.slots else None
        return direction

    def learn(self, before: DescentPoint, after: DescentPoint) -> None:
        """Add the pair of a step, unless it is dominated by rounding."""
        s, y = after.x - before.x, after.g - before.g
        sy, yy = float(s @ y), float(y @ y)
        rounding = self.pairs.eps * math.sqrt(float(s @ s) * yy)
        if math.inf > sy > max(rounding, self.pairs.tiny) and math.inf > yy > self.pairs.tiny:
            self.pairs.add(s, y, sy)

    def clear(self) -> None:
        """Remove all pairs."""
        self.pairs.clear()


class InverseMatrix:
    """The inverse Hessian as a matrix that is updated by every pair (`m.BFGS`).

    Args:
        like: A vector with the length and dtype of the variables.
    """

    def __init__(self, like: Tensor) -> None:
        self.tiny, self.like = torch.finfo(like.dtype).tiny, like.numpy()
        self.H: Array | None = None

    def multiply(self, g: Array) -> Array | None:
        """Return the inverse Hessian times a vector, or None before there is a pair."""
        return None if self.H is None else self.H @ g

    def learn(self, before: DescentPoint, after: DescentPoint) -> None:
        """Update the matrix by the pair of a step, unless the curvature along it is not positive."""
        s, y = after.x - before.x, after.g - before.g
        sy, yy = float(s @ y), float(y @ y)
        if not math.inf > sy > self.tiny:
            return
        H = self.H
        if H is None:
            # A quadratic function needs no scale: the small matrix would cost more steps than it saves trials.
            scaled = yy > 0 and math.isfinite(yy) and not _is_parabola(before, after, s)
            H = np.diag(np.full_like(self.like, sy / yy if scaled else 1.0))
        Hy = H @ y
        half = (0.5 * (1 + float(y @ Hy) / sy) * s - Hy) / sy
        turned = np.outer(s, half)
        H += turned
        H += turned.T
        self.H = H if np.isfinite(H.diagonal()).all() else None

    def clear(self) -> None:
        """Start from the identity again."""
        self.H = None


def _is_parabola(before: DescentPoint, after: DescentPoint, s: Array) -> bool:
    """Return whether values and slopes show that the function is exactly quadratic along the step."""
    first, last = float(s @ before.g), float(s @ after.g)
    size = 1e-9 * (abs(first) + abs(last))
    visible = size > 4e-16 * max(abs(before.loss), abs(after.loss))
    return visible and abs(after.loss - before.loss - 0.5 * (first + last)) <= size


MATRICES: dict[str, Callable[[Tensor], InverseOfPairs | InverseMatrix]] = {
    "bfgs": InverseMatrix,
    "lbfgs": InverseOfPairs,
}
"""The inverse Hessians of methods by name."""


@cache
def _make_search() -> StrongWolfe:
    """Return the line search of all runs; its state is passed to it at every call."""
    return StrongWolfe()


class Descent:
    """A run of a quasi-Newton method.

    Args:
        run: The record of the run.
        tol: The largest component of the gradient at the end.
    """

    def __init__(self, run: SingleRun, tol: float) -> None:
        self.run, self.tol = run, tol
        self.eps = torch.finfo(run.leaves[0].dtype).eps
        # NumPy writes the memory of the leaves, which no graph has saved when they are written.
        self.memory = [leaf.detach().numpy().reshape(-1) for leaf in run.leaves]
        x = np.concatenate(self.memory)
        self.inverse = MATRICES[run.method](torch.from_numpy(x))
        self.search = _make_search()
        self.remembered: dict[str, Any] = {}
        self.here = self.evaluate(x)

    def place(self, x: Array) -> None:
        """Write a vector into the leaves."""
        if len(self.memory) == 1:
            self.memory[0][:] = x
            return
        at = 0
        for memory in self.memory:
            memory[:] = x[at : at + memory.size]
            at += memory.size

    def evaluate(self, x: Array) -> DescentPoint:
        """Return a point with the loss and the gradient there, and record it if it is the best."""
        run = self.run
        self.place(x)
        seen, data, loss = run.read_loss()
        if not data.requires_grad:
            run.judge_one(loss, self.eps, seen, None)
            raise NoDerivative
        g = self.join(torch.autograd.grad(data, run.leaves, allow_unused=True))
        norm = float(np.maximum.reduce(np.abs(g)))
        # The gradient of transformed variables is not that of the point which the function sees.
        run.judge_one(loss, self.eps, seen, norm if math.isfinite(norm) and not run.variables.transform else None)
        if not run.active:
            raise EndOfRun(run.reason)
        return DescentPoint(x, loss, g, norm)

    def join(self, grads: Sequence[Tensor | None]) -> Array:
        """Return the gradients of all leaves as one vector, zero where the function does not depend on a leaf."""
        if len(grads) == 1 and grads[0] is not None:
            return grads[0].numpy().reshape(-1)
        pairs = zip(grads, self.memory, strict=True)
        parts = [np.zeros_like(memory) if grad is None else grad.numpy().reshape(-1) for grad, memory in pairs]
        return np.concatenate(parts)

    def watch(self) -> None:
        """End the run if the gradient vanishes, or the function seems to be unbounded."""
        run, norm = self.run, self.here.norm
        if run.steps == 0 and math.isfinite(norm):
            run.steepness = np.float64(norm)
        run.check_gradient(self.here.loss, norm, self.tol)
        if run.active:
            run.look_far(self.probe)

    def probe(self, points: list[Tensor]) -> None:
        """Evaluate the function at other points, and restore the present ones."""
        try:
            self.place(np.concatenate([point.numpy().reshape(-1) for point in points]))
            with torch.no_grad():
                self.run.evaluate()
        finally:
            self.place(self.here.x)

    def begin_again(self) -> None:
        """Clear the inverse Hessian and the state of the line search."""
        self.inverse.clear()
        self.remembered.clear()

    def find_direction(self) -> tuple[Array, float]:
        """Return the direction d of the next step x - a d, and the slope along it; the gradient's where that goes uphill."""
        g = self.here.g
        size = float(g @ g)
        d = self.inverse.multiply(g)
        if d is None:
            return (g / math.sqrt(size), -math.sqrt(size)) if 1 < size < math.inf else (g, -size)
        slope = -float(g @ d)
        if not slope < 0 or not math.isfinite(slope):
            length = float(d @ d)
            ratio = math.sqrt(length / size) if math.isfinite(length) and length > 0 else 1 / math.sqrt(size)
            return ratio * g, -size * ratio
        return d, slope

    def step(self) -> bool:
        """Search along the direction; return whether a lower point was found."""
        before = self.here
        d, slope = self.find_direction()
        if not slope < 0 or not math.isfinite(slope):
            return False
        points: dict[float, DescentPoint] = {}

        def along(a: float) -> tuple[float, float]:
            point = points[a] = self.evaluate(before.x - a * d)
            fall = -float(point.g @ d)
            loss = math.inf if math.isnan(point.loss) else point.loss
            return loss, fall if math.isfinite(fall) else math.inf

        a = run_trials(self.search.trials(before.loss, slope, self.search.defaults, self.remembered), along)
        if a is None or a == 0.0:
            self.place(before.x)
            return False
        self.here = points[a]
        self.place(self.here.x)
        self.inverse.learn(before, self.here)
        return bool((self.here.x != before.x).any())


class NoDerivative(Exception):
    """The function does not depend on the variables in a way that torch can differentiate."""


@torch.enable_grad()
@np.errstate(all="ignore")  # a run that ends for it says so
def run_quasi_newton(run: SingleRun, *, tol: float, steps: int | None, after: Callable[[], bool]) -> None:
    """Make steps until the run ends.

    Args:
        run: The record of the run; its method is a name of `MATRICES`.
        tol: The largest component of the gradient at the end.
        steps: The largest number of steps.
        after: Called after each step; a true result ends the run.

    Raises:
        EndOfRun: Where an evaluation ended it.
    """
    try:
        descent = Descent(run, tol)
        descent.watch()
        while run.active:
            lowest = run.lowest
            moved = descent.step()
            if run.count_step(after, steps):
                return
            if run.check_progress(np.bool_(not moved), lowest):
                descent.begin_again()
            descent.watch()
    except NoDerivative:
        fact = "The function does not depend on x in a way that can be differentiated"
        run.end(f"{fact}; method='nelder-mead' looks at values only.", False)
