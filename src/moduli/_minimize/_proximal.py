"""Minimisation of a function plus penalties that have no gradient: FISTA with backtracking and restarts.

A. Beck, M. Teboulle, "A fast iterative shrinkage-thresholding algorithm for linear inverse problems", SIAM J. Imaging Sci. 2
(2009); B. O'Donoghue, E. Candès, "Adaptive restart for accelerated gradient schemes", Found. Comput. Math. 15 (2015).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._point import loss_of, value_of
from ._result import Result
from ._single import EndOfRun, SingleRun

PROXIMAL = {"auto": True, "fista": True, "proximalgradient": False, "ista": False}
"""The methods that take penalties by their proximal operators, each with whether it has momentum."""

Point = list[Tensor]


def read_proximal(method: Any) -> str:
    """Return the name of a proximal method, without hyphens; raise ValueError for other methods."""
    name = "".join(filter(str.isalnum, method.lower())) if isinstance(method, str) else ""
    if name not in PROXIMAL:
        raise ValueError(f"minimize: with prox= the method is 'fista' or 'proximal-gradient', not {method!r}")
    return name


class ProximalSum:
    """The smooth function and its penalties on lists of tensors, counted in the record of a run.

    Args:
        run: The record, with the user's function.
        prox: For each leaf its proximal operator, or None.
    """

    def __init__(self, run: SingleRun, prox: list[Callable[[Tensor, Any], Tensor] | None]) -> None:
        self.run, self.prox = run, prox

    def evaluate(self, point: Point, gradient: bool) -> tuple[float, Point]:
        """Return the smooth function and, where it is wanted, its gradient."""
        run = self.run
        run.check_limit()
        leaves = [leaf.detach().requires_grad_() for leaf in point]
        with torch.set_grad_enabled(gradient):
            data = loss_of(run.point.call(run.fun, leaves), True)
            loss = value_of(data) if data.numel() > 1 else loss_of(data, False)
        if not gradient:
            return float(loss), []
        if not loss.requires_grad:
            raise EndOfRun("The function does not depend on x in a way that can be differentiated.")
        return float(loss), list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))

    def move(self, point: Point, gradient: Point, step: float) -> Point:
        """Return the proximal point of a step against the gradient.

        Args:
            point: The point.
            gradient: The gradient there.
            step: The step size.
        """
        moved = [x - step * g for x, g in zip(point, gradient, strict=True)]
        return [x if prox is None else prox(x, step) for x, prox in zip(moved, self.prox, strict=True)]

    def measure_penalty(self, point: Point) -> float:
        """Return the sum of the penalties that define a value."""
        pairs = zip(point, self.prox, strict=True)
        return sum(float(prox.value(x)) for x, prox in pairs if prox is not None and hasattr(prox, "value"))


def run_proximal(
    run: SingleRun,
    prox: list[Any],
    *,
    momentum: bool,
    tol: float,
    steps: int | None,
    after: Callable[[], bool],
) -> Result:
    """Minimise a function plus penalties, and return the result.

    The step is halved until the function is below its quadratic model there, and doubled at restarts.

    Args:
        run: The record of the run.
        prox: For each leaf its proximal operator, or None.
        momentum: Whether gradients are taken ahead of the point.
        tol: The largest component of the gradient mapping, (y - prox(y - t g)) / t, at the end.
        steps: The largest number of steps.
        after: Called after each step; a true result ends the run.
    """
    problem, step, s = ProximalSum(run, prox), 1.0, 1.0
    x = y = [leaf.detach().clone() for leaf in run.leaves]
    eps = torch.finfo(x[0].dtype).eps
    try:
        with torch.no_grad():
            while bool(run.active):
                f, g = problem.evaluate(y, True)
                _check_finite(run, f, g)
                new, value, step, clear = _backtrack(problem, y, f, g, step, eps)
                size = max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(y, new, strict=True)) / step
                _record(run, new, value + problem.measure_penalty(new), size)
                if size <= tol:
                    reason = f"The proximal point is the point itself: the gradient mapping is at most {tol:.2g}."
                    run.end(reason, True)
                if run.count_step(after, steps):
                    break
                uphill = sum(_dot(a - b, b - c) for a, b, c in zip(y, new, x, strict=True))
                if not momentum or uphill > 0:
                    y, s, step = new, 1.0, step * (2.0 if momentum and clear else 1.0)
                else:
                    s, last = (1 + math.sqrt(1 + 4 * s * s)) / 2, s
                    y = [b + (last - 1) / s * (b - a) for a, b in zip(x, new, strict=True)]
                x = new
    except EndOfRun as end:
        run.end(str(end), False)
    # Error bars can't be computed from the function's derivatives if a penalty has a corner.
    return replace(run.result(), problem=None)


def _check_finite(run: SingleRun, f: float, g: Point) -> None:
    """Raise EndOfRun if the loss or its gradient is not finite."""
    if not math.isfinite(f) or not all(bool(one.isfinite().all()) for one in g):
        place = "at the start" if run.steps == 0 else "along the way"
        raise EndOfRun(f"The loss or its gradient is not finite {place}: the loss is {f}.")


def _backtrack(
    problem: ProximalSum, y: Point, f: float, g: Point, step: float, eps: float
) -> tuple[Point, float, float, bool]:
    """Return the proximal point of the first step that is short enough, the function there, and the step.

    Also return whether the comparison was above rounding: otherwise a step that is too long would not be detected.
    """
    while True:
        new = problem.move(y, g, step)
        value, _ = problem.evaluate(new, False)
        moves = [b - a for a, b in zip(y, new, strict=True)]
        slope = sum(_dot(one, d) for one, d in zip(g, moves, strict=True))
        square = sum(_dot(d, d) for d in moves)
        # Differences of values below their rounding are ignored.
        if value <= f + slope + 0.5 * square / step + 16 * eps * abs(f):
            return new, value, step, square / step > 1e4 * eps * abs(f)
        step *= 0.5
        if step < 1e-30:
            raise EndOfRun("No step was short enough for the function to follow its gradient.")


def _dot(a: Tensor, b: Tensor) -> float:
    """Return the real inner product."""
    product = a.conj() * b
    return float((product.real if product.is_complex() else product).sum())


def _record(run: SingleRun, point: Point, value: float, size: float) -> None:
    """Store the point, if it is as low as the best so far or nearly."""
    noise = 64 * torch.finfo(point[0].dtype).eps * abs(value)
    if value <= float(run.values) + noise or not math.isfinite(float(run.values)):
        run.best = [leaf.clone() for leaf in point]
        run.values, run.norms = np.float64(value), np.float64(size)
    run.lowest = np.fmin(run.lowest, np.float64(value))
