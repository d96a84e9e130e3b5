"""Moré's version of the Levenberg-Marquardt method: a trust region in variables scaled by the columns of the Jacobian.

J. J. Moré, "The Levenberg-Marquardt algorithm: implementation and theory", in Numerical Analysis, Lecture Notes in
Mathematics 630 (1978). The singular value decomposition of the scaled Jacobian is used instead of its QR factorisation,
because it gives the damped step for every damping by a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
EPS = float(np.finfo(np.float64).eps)


def measure(vector: Array) -> float:
    """Return the length of a vector."""
    return math.sqrt(vector @ vector)


@dataclass(frozen=True)
class LeastSquaresOptions:
    """The tolerances of a fit, and the updates that replace exact Jacobians.

    Attributes:
        ftol: End when the actual and the predicted relative reduction of the sum of squares are at most this.
        xtol: End when the relative error of every variable is at most this, estimated from the length of the last step and the
            rate at which steps get shorter; or when the trust region is smaller than a hundredth of this.
        gtol: End when the cosine of the angle between the residuals and every column of the Jacobian is at most this.
        tol: End when the largest component of the gradient is at most this.
        factor: The first trust region, relative to the scaled starting point.
        scale: The size of a change of each variable, or None for the norms of the columns of the Jacobian.
        broyden: Whether Broyden's rank-one updates replace the Jacobian between failures, for at most n steps.
        geodesic: Whether steps follow the curvature of the model to second order (Transtrum and Sethna, 2012).
        eps: The relative rounding of the residuals.
    """

    ftol: float = 1e-15
    xtol: float = 1e-8
    gtol: float = 1e-13
    tol: float = 0.0
    factor: float = 1.0
    scale: Array | None = None
    broyden: bool = False
    geodesic: bool = False
    eps: float = EPS


class Residuals(NamedTuple):
    """The functions of a fit.

    Attributes:
        values: Returns the residuals at a point; infinite ones where the model is not defined.
        jacobian: Returns their Jacobian at a point, exactly.
        curve: Returns the second derivative of the residuals along a direction.
    """

    values: Callable[[Array], Array]
    jacobian: Callable[[Array], Array]
    curve: Callable[[Array, Array], Array]


class FitState:
    """The point of a fit, its residuals and Jacobian, and the trust region around it.

    Args:
        functions: The residuals and their derivatives.
        x: The starting point.
        low: Lower bounds, minus infinity where open.
        high: Upper bounds.
        options: Tolerances and variants.
    """

    @np.errstate(over="ignore")
    def __init__(self, functions: Residuals, x: Array, low: Array, high: Array, options: LeastSquaresOptions) -> None:
        self.functions, self.x, self.low, self.high, self.options = functions, x, low, high, options
        self.r = functions.values(x)
        self.norm = measure(self.r)
        self.J = np.zeros((len(self.r), len(x)))
        self.D = np.zeros(len(x)) if options.scale is None else 1 / options.scale
        self.delta = self.damping = 0.0
        self.last = math.inf
        self.shorten = 1.0
        self.first = True

    def scale_columns(self) -> None:
        """Set the scale of each variable to the largest norm of its column so far."""
        if self.options.scale is None:
            norms = np.linalg.norm(self.J, axis=0)
            self.D = np.maximum(self.D, np.where((self.D == 0) & (norms == 0), 1.0, norms))

    def update_jacobian(self, step: Array, change: Array) -> None:
        """Apply Broyden's update, if that is an option, for a step and the change of the residuals along it."""
        if self.options.broyden:
            self.J = self.J + np.outer(change - self.J @ step, step) / (float(step @ step) or 1.0)

    def find_pushed(self, gradient: Array) -> Mask:
        """Return the mask of the variables at a bound that the gradient pushes against."""
        return ((self.x <= self.low) & (gradient > 0)) | ((self.x >= self.high) & (gradient < 0))

    def find_cosine(self, gradient: Array) -> float:
        """Return the largest cosine of the angle between the residuals and a column of the Jacobian."""
        norms = np.linalg.norm(self.J, axis=0)
        with np.errstate(all="ignore"):
            cosines = np.abs(gradient) / (norms * self.norm)
        return float(np.max(np.where(norms > 0, cosines, 0.0), initial=0.0))


class Factors(NamedTuple):
    """The singular value decomposition of the scaled Jacobian of the free variables, and the residuals in its basis."""

    s: Array
    Vt: Array
    u: Array

    @classmethod
    def of(cls, J: Array, D: Array, r: Array) -> Factors:
        """Decompose J / D.

        Args:
            J: The Jacobian.
            D: The scales of its columns.
            r: The residuals.
        """
        U, s, Vt = np.linalg.svd(J / D, full_matrices=False)
        return cls(s, Vt, U.T @ r)

    def solve(self, damping: float) -> Array:
        """Return the scaled step that minimises |r + J q|^2 + damping |q|^2."""
        if damping > 0:
            coefficients = self.s * self.u / (self.s**2 + damping)
        else:
            full = self.s > EPS * len(self.s) * self.s.max(initial=0.0)
            coefficients = np.where(full, self.u / np.where(full, self.s, 1.0), 0.0)
        step: Array = -(coefficients @ self.Vt)
        return step

    def find_damping(self, delta: float, damping: float) -> float:
        """Return a damping whose step has the length `delta`, to a tenth (Moré, algorithm 5.5)."""
        length = measure(self.solve(0.0))
        deficient = bool((self.s <= EPS * len(self.s) * self.s.max(initial=0.0)).any())
        if length <= 1.1 * delta:
            return 0.0
        gradient = measure(self.s * self.u)
        high = gradient / delta
        low = 0.0
        if not deficient:
            low = (length - delta) / (self._slope(0.0, length) or 1.0)
        damping = min(max(damping, low), high) or gradient / max(length, delta)
        for _ in range(10):
            step = self.solve(damping)
            length = measure(step)
            excess = length - delta
            if abs(excess) <= 0.1 * delta:
                break
            if excess > 0:
                low = max(low, damping)
            else:
                high = min(high, damping)
            damping = damping + (length / delta) * excess / (self._slope(damping, length) or 1.0)
            if not low <= damping <= high:
                damping = max(1e-3 * high, math.sqrt(low * high))
        return damping

    def _slope(self, damping: float, length: float) -> float:
        """Return minus the derivative of the step's length by the damping."""
        full = self.s > 0
        s, u = self.s[full], self.u[full]
        return float(np.sum(s**2 * u**2 / (s**2 + damping) ** 3)) / length if length > 0 else 0.0


class Trial(NamedTuple):
    """A proposed step, its scaled length, and the reduction and slope that the linear model predicts."""

    step: Array
    length: float
    predicted: float
    slope: float


@np.errstate(over="ignore")
def propose(state: FitState, gradient: Array) -> Trial:
    """Return the damped step within the bounds: variables that would leave them are set to their bound, the others solved again."""
    fixed = state.find_pushed(gradient)
    step = np.zeros_like(state.x)
    for attempt in range(len(step) + 1):
        free = ~fixed
        if not free.any():
            break
        right = state.r + state.J[:, fixed] @ step[fixed] if attempt else state.r
        factors = Factors.of(state.J[:, free], state.D[free], right)
        if attempt == 0:
            state.damping = factors.find_damping(state.delta, state.damping)
        step[free] = factors.solve(state.damping) / state.D[free]
        over = free & ((state.x + step < state.low) | (state.x + step > state.high))
        if not over.any():
            break
        step = np.where(over, np.clip(state.x + step, state.low, state.high) - state.x, step)
        fixed = fixed | over
    if state.damping == 0:
        step = state.shorten * step
    length = measure(state.D * step)
    if state.functions.curve is not None and state.options.geodesic and not fixed.any():
        step = _bend(state, step)
    linear = measure(state.J @ step) / state.norm
    damped = math.sqrt(state.damping) * length / state.norm
    if fixed.any() or state.shorten < 1:  # the step is no minimum of the damped model: evaluate the model itself
        after = measure(state.r + state.J @ step) / state.norm
        return Trial(step, length, 1 - after**2, float(gradient @ step) / state.norm**2)
    return Trial(step, length, linear**2 + 2 * damped**2, -(linear**2 + damped**2))


def _bend(state: FitState, step: Array) -> Array:
    """Return the step with half of its geodesic acceleration, if that is small compared with the step."""
    curvature = state.functions.curve(state.x, step)
    if not np.isfinite(curvature).all():
        return step
    bend = Factors.of(state.J, state.D, curvature).solve(state.damping) / state.D
    small = 2 * measure(state.D * bend) <= 0.75 * measure(state.D * step)
    return step + 0.5 * bend if small else step


def fit_least_squares(state: FitState) -> Iterator[tuple[str, bool]]:
    """Make steps until the fit has converged; yield after each the reason why it ended, or "", and whether it succeeded.

    Args:
        state: The starting point, which is moved.
    """
    options = state.options
    fresh, updates = False, 0
    while True:
        if not fresh:
            state.J, updates, fresh = state.functions.jacobian(state.x), 0, True
        if state.norm == 0.0:
            yield "All residuals are zero.", True
        if not np.isfinite(state.J).all():
            yield "The derivatives of the residuals are not finite.", False
        state.scale_columns()
        if state.first:
            state.delta = options.factor * (measure(state.D * state.x) or 1.0)
        gradient = np.where(state.find_pushed(g := state.J.T @ state.r), 0.0, g)
        largest = float(np.abs(gradient).max(initial=0.0))
        if updates == 0 and largest <= options.tol:
            yield f"The gradient vanishes: its largest component is at most {options.tol:.2g}.", True
        if updates == 0 and state.find_cosine(gradient) <= options.gtol:
            yield "The residuals are orthogonal to the columns of the Jacobian.", True
        accepted, reason = _find_step(state, g, exact=updates == 0)
        fresh = False
        if accepted and options.broyden and updates < len(state.x):
            fresh, updates = True, updates + 1
        yield reason, True


def _find_step(state: FitState, g: Array, *, exact: bool) -> tuple[bool, str]:
    """Shorten the step until it is accepted or the fit ends; return whether it was accepted, and the reason to end or "".

    Args:
        state: The fit.
        g: The gradient.
        exact: Whether the Jacobian is exact; else it may be why a step fails, so only one is tried, and no reason counts.
    """
    accepted, reason = _try_step(state, propose(state, g))
    if not exact:
        return accepted, reason if accepted else ""
    while not accepted and not reason:
        accepted, reason = _try_step(state, propose(state, g))
    return accepted, reason


@np.errstate(over="ignore")
def _try_step(state: FitState, trial: Trial) -> tuple[bool, str]:
    """Move if the sum of squares falls as predicted, and adapt the trust region; return whether, and the reason to end or ""."""
    options = state.options
    if state.first:
        state.delta = min(state.delta, trial.length)
    there = np.clip(state.x + trial.step, state.low, state.high)
    r = state.functions.values(there)
    norm = measure(r)
    reduction = 1 - (norm / state.norm) ** 2 if 0.1 * norm < state.norm else -1.0
    ratio = reduction / trial.predicted if trial.predicted > 0 else 0.0
    _adapt_region(state, trial, norm, reduction, ratio)
    size = measure(state.D * state.x)
    # A change of the sum below rounding is not informative: the step is then accepted because of the model.
    rounding = 64 * options.eps
    level = trial.predicted <= rounding and abs(reduction) <= rounding
    accepted = ratio >= 1e-4 or level
    if accepted:
        state.update_jacobian(there - state.x, r - state.r)
        state.x, state.r, state.norm, state.first = there, r, norm, False
        if _is_accurate(state, trial):
            return True, f"The steps have become short: the point is known to {options.xtol:.2g} of itself."
    if level or (abs(reduction) <= options.ftol and trial.predicted <= options.ftol and ratio <= 2):
        return accepted, f"The sum of squares falls by at most {options.ftol:.2g} of itself."
    if state.delta <= 0.01 * options.xtol * size or trial.length <= EPS * size:
        return accepted, f"The next steps are at most {0.01 * options.xtol:.2g} of the point."
    if state.delta <= EPS * EPS:
        return accepted, "No lower point was found: the loss is at the limit of its precision."
    return accepted, ""


def _is_accurate(state: FitState, trial: Trial) -> bool:
    """Whether the relative error of every variable, estimated from the lengths of the last two steps, is within `xtol`."""
    before = state.last
    rate, state.last = max(0.01, trial.length / state.last), trial.length if state.damping == 0 else math.inf
    error = np.abs(trial.step) * rate / (1 - rate) if rate < 1 and math.isfinite(before) else math.inf
    return bool((error <= state.options.xtol * np.abs(state.x)).all())


def _adapt_region(state: FitState, trial: Trial, norm: float, reduction: float, ratio: float) -> None:
    """Shrink or grow the trust region.

    Args:
        state: The fit before the step.
        trial: The step.
        norm: The length of the residuals after it.
        reduction: The relative reduction of the sum of squares.
        ratio: The reduction divided by the predicted one.
    """
    if not ratio > 0.25:
        shrink = 0.5 if reduction >= 0 else 0.5 * trial.slope / (trial.slope + 0.5 * reduction)
        if not 0.1 * norm < state.norm or shrink < 0.1:
            shrink = 0.1
        state.delta = shrink * min(state.delta, trial.length / 0.1)
        state.damping /= shrink
    elif state.damping == 0 or ratio >= 0.75:
        state.delta = trial.length / 0.5
        state.damping *= 0.5
    if state.damping == 0:
        # With large residuals, Gauss-Newton steps oscillate: the minimum of the parabola along the step gives the length of
        # the next one.
        bend = 2 * trial.slope + reduction
        longer = trial.slope / bend if bend < 0 else 2.0
        state.shorten = min(1.0, max(0.1, state.shorten * longer)) if ratio < 0.75 or state.shorten < 1 else 1.0
