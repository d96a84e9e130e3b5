"""Least-squares fits: Levenberg and Marquardt's method on a user's residuals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ._derivatives import VectorFunction, flatten_values
from ._least_squares import Array, FitState, LeastSquaresOptions, Residuals, fit_least_squares
from ._point import to_numpy, to_vector
from ._single import EndOfRun, SingleRun, describe_start


def run_fit(
    run: SingleRun,
    options: LeastSquaresOptions,
    mode: str | None,
    *,
    steps: int | None,
    after: Callable[[], bool],
) -> None:
    """Fit until the run ends.

    Args:
        run: The record of the run, with the user's residuals.
        options: Tolerances and variants.
        mode: The mode in which the Jacobian is computed (`VectorFunction`).
        steps: The largest number of steps.
        after: Called after each step; a true result ends the run.

    Raises:
        EndOfRun: If an evaluation ends it.
    """
    variables = run.variables
    function = VectorFunction(run.fun, run.point, mode, variables.seen if variables.transform else None)
    start = to_vector(run.leaves)
    exact = torch.finfo(start.dtype).eps
    if exact > 1e-10:
        options = replace(options, eps=exact, ftol=max(options.ftol, 8 * exact), xtol=max(options.xtol, 8 * exact))

    def locate(x: Array) -> Tensor:
        return torch.from_numpy(x).to(start)

    gaps: list[int] = []  # the number of NaNs of each evaluation that is not finite

    def evaluate(x: Array) -> Array:
        vector = locate(x)
        with torch.no_grad():
            run.check_limit()
            ready, run.ready = run.ready, None
            values = function(vector) if ready is None else flatten_values(ready[1]).detach()
        numbers: Array = to_numpy(values)
        if math.isfinite(numbers.sum()):
            return numbers
        gaps.append(int(np.isnan(numbers).sum()))
        return np.nan_to_num(numbers, nan=math.inf, posinf=math.inf, neginf=-math.inf)

    def differentiate(x: Array) -> Array:
        run.jacobians += 1
        return to_numpy(function.jacobian(locate(x), len(state.r)))

    def curve(x: Array, direction: Array) -> Array:
        return to_numpy(function.curve(locate(x), locate(direction)))

    low, high = read_side(run, variables.low, -math.inf), read_side(run, variables.high, math.inf)
    state = FitState(Residuals(evaluate, differentiate, curve), to_numpy(start), low, high, options)
    if not math.isfinite(state.norm):
        raise EndOfRun(describe_start(state.norm, gaps[0] if gaps else 0, len(state.r)))
    _record(run, state, function)
    try:
        for reason, success in fit_least_squares(state):
            _record(run, state, function)
            if reason:
                run.end(reason, success)
            if run.count_step(after, steps):
                break
    except EndOfRun as end:
        run.end(str(end), False)
    _describe_end(run, state, function, differentiate(state.x))


def _record(run: SingleRun, state: FitState, function: VectorFunction) -> None:
    """Store the point of the fit as the best: its sum of squares never grows."""
    vector = torch.from_numpy(state.x).to(run.best[0].device)
    with torch.no_grad():
        run.best = [leaf.detach() for leaf in function.point_of(vector)]
    run.values = run.lowest = np.float64(0.5 * state.norm**2)
    run.norms = np.float64(math.inf)


def _describe_end(run: SingleRun, state: FitState, function: VectorFunction, J: Array) -> None:
    """Store the gradient and the Jacobian at the end."""
    gradient = J.T @ state.r
    run.norms = np.abs(np.where(state.find_pushed(gradient), 0.0, gradient)).max(initial=0.0)
    if function.see is None:
        run.end_jacobian = torch.from_numpy(J)


def read_side(run: SingleRun, sides: list[Tensor | None], end: float) -> Array:
    """Return the bounds of all variables on one side as a vector.

    Args:
        run: The record of the run.
        sides: The bounds of each leaf; None where open.
        end: The value for open bounds: plus or minus infinity.
    """
    if run.variables.transform:
        sides = [None] * len(sides)
    pairs = zip(sides, run.leaves, strict=True)
    # Complex leaves have no bounds; infinities would become NaN in them, so open bounds are marked separately.
    wide = [torch.full_like(leaf, 0.0) if side is None else side for side, leaf in pairs]
    vector = to_numpy(to_vector(wide))
    closed = to_vector(
        [torch.full_like(leaf, 0.0 if side is None else 1.0) for side, leaf in zip(sides, run.leaves, strict=True)]
    )
    return np.where(to_numpy(closed) != 0, vector, end)
