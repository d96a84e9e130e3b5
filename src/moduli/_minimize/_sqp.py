"""Sequential quadratic programming: a quasi-Newton model of the Lagrangian, linearised constraints, an exact merit function.

M. J. D. Powell, "A fast algorithm for nonlinearly constrained optimization calculations" (1978); J. Nocedal, S. J. Wright,
Numerical Optimization, 2nd ed., chapter 18; D. Kraft, "A software package for sequential quadratic programming" (1988).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ._quadratic import QuadraticSolution, solve_quadratic

Array = np.ndarray[Any, np.dtype[np.float64]]


class ConstrainedProblem(NamedTuple):
    """A function with constraints, on vectors of NumPy.

    Attributes:
        value: Returns the function at a point; infinity outside of its domain. A call counts as an evaluation.
        gradient: Returns its gradient at the point that was evaluated last.
        constraints: Returns the constraints at a point, equations first, the others at least zero.
        jacobian: Returns the Jacobian of the constraints at a point.
        equalities: The number of equations.
        low: Lower bounds, minus infinity where open.
        high: Upper bounds.
        curvature: Returns an estimate of the second derivatives at a point, positive semidefinite, or None.
    """

    value: Callable[[Array], float]
    gradient: Callable[[Array], Array]
    constraints: Callable[[Array], Array]
    jacobian: Callable[[Array], Array]
    equalities: int
    low: Array
    high: Array
    curvature: Callable[[Array], Array | None]


class SqpState:
    """A point with its derivatives, multipliers, and the model of the Lagrangian's second derivatives.

    Args:
        problem: The function and its constraints.
        x: The starting point, which is within the bounds.
        tol: The residual of the conditions of Karush, Kuhn and Tucker at which it has converged.
    """

    def __init__(self, problem: ConstrainedProblem, x: Array, tol: float) -> None:
        self.problem, self.x, self.tol = problem, x, tol
        self.f, self.c = problem.value(x), problem.constraints(x)
        self.g, self.A = problem.gradient(x), problem.jacobian(x)
        curvature = problem.curvature(x)
        self.B = np.eye(len(x)) if curvature is None else _regularise(curvature)
        self.fresh = curvature is None
        self.penalties = np.zeros(len(self.c))
        self.multipliers = np.zeros(len(self.c))
        self.bound_multipliers = np.zeros(len(x))
        self.kkt = math.inf

    def measure_violation(self, c: Array) -> Array:
        """Return the violation of each constraint."""
        equalities = self.problem.equalities
        return np.concatenate([np.abs(c[:equalities]), np.maximum(-c[equalities:], 0.0)])

    def measure_merit(self, f: float, c: Array) -> float:
        """Return the exact penalty function."""
        return f + float(self.penalties @ self.measure_violation(c))

    def measure_kkt(self) -> float:
        """Return the largest violation of the conditions of Karush, Kuhn and Tucker with the present multipliers.

        The gradient is compared with the sizes of its terms, so that the units of the function do not matter above one.
        """
        slope = self.g - self.A.T @ self.multipliers - self.bound_multipliers
        terms = max(1.0, float(np.abs(self.g).max(initial=0.0)), float(np.abs(self.multipliers).max(initial=0.0)))
        violation = float(self.measure_violation(self.c).max(initial=0.0))
        inequalities = slice(self.problem.equalities, None)
        slack = np.minimum(np.abs(self.c[inequalities]), np.abs(self.multipliers[inequalities]))
        return max(float(np.abs(slope).max(initial=0.0)) / terms, violation, float(slack.max(initial=0.0)))


def _regularise(H: Array) -> Array:
    """Return a matrix with eigenvalues away from zero."""
    size = float(np.abs(H).max(initial=0.0)) or 1.0
    return 0.5 * (H + H.T) + 1e-8 * size * np.eye(len(H))


def minimize_by_sqp(state: SqpState) -> Iterator[tuple[str, bool]]:
    """Make steps until the conditions of Karush, Kuhn and Tucker hold; yield why it ended, or "", and whether that is a success."""
    failures, stuck, least = 0, 0, math.inf
    while True:
        solution, relaxed = _solve_subproblem(state)
        if solution is None:
            yield "The linearised constraints can not be met, not even in part.", False
            return
        count = len(state.c)
        step = solution.x[: len(state.x)]
        state.multipliers = solution.multipliers[:count]
        state.bound_multipliers = _sum_bounds(state, solution.multipliers[count:])
        state.kkt = state.measure_kkt()
        if state.kkt <= state.tol:
            yield f"The conditions of Karush, Kuhn and Tucker hold to {state.kkt:.2g}, at most {state.tol:.2g}.", True
            return
        # Powell's rule: penalties follow the multipliers down slowly.
        sizes = np.abs(state.multipliers)
        state.penalties = np.maximum(sizes, 0.5 * (state.penalties + sizes))
        violation = float(state.measure_violation(state.c).max(initial=0.0))
        stuck, least = (stuck + 1 if violation > 0.99 * least else 0), min(least, violation)
        if stuck > 40 and violation > max(state.tol, 1e-6):
            yield f"The constraints can not be met: the least violation found is {least:.2g}.", False
            return
        if _search_along(state, step, relaxed):
            failures = 0
            yield "", False
            continue
        failures += 1
        if failures > 1:
            # If not even the gradient direction leads lower, only rounding is left.
            short = float(np.abs(step).max(initial=0.0)) <= 1e-6 * max(1.0, float(np.abs(state.x).max(initial=0.0)))
            if violation > max(state.tol, 1e-6):
                yield f"The constraints can not be met: the least violation found is {violation:.2g}.", False
            else:
                yield "No lower point was found: the loss is at the limit of its precision.", short
            return
        state.B, state.fresh = np.eye(len(state.x)), True
        yield "", False


def _sum_bounds(state: SqpState, multipliers: Array) -> Array:
    """Return for each variable the multiplier of its lower bound less that of its upper bound."""
    out = np.zeros(len(state.x))
    lows, highs = np.flatnonzero(np.isfinite(state.problem.low)), np.flatnonzero(np.isfinite(state.problem.high))
    out[lows] += multipliers[: len(lows)]
    out[highs] -= multipliers[len(lows) : len(lows) + len(highs)]
    return out


def _solve_subproblem(state: SqpState) -> tuple[QuadraticSolution | None, float]:
    """Solve the quadratic program at the point, and return it with the part of the violation that it had to leave."""
    problem, n = state.problem, len(state.x)
    lows, highs = np.isfinite(problem.low), np.isfinite(problem.high)
    identity = np.eye(n)
    rows = np.vstack([state.A, identity[lows], -identity[highs]])
    right = np.concatenate([-state.c, (problem.low - state.x)[lows], (state.x - problem.high)[highs]])
    L = _factorise(state.B)
    solution = solve_quadratic(L, state.g, rows, right, problem.equalities)
    if solution is not None and np.isfinite(solution.x).all():
        return solution, 0.0
    # The linearised constraints contradict each other: one more variable, at a high price, leaves a part of them open.
    violated = np.where(state.measure_violation(state.c) > 0, state.c, 0.0)
    open_column = np.concatenate([-violated, np.zeros(len(rows) - len(state.c))])
    wide: Any = np.block([[rows, open_column[:, None]], [np.zeros(n), np.ones(1)], [np.zeros(n), -np.ones(1)]])
    price = 100.0 * max(1.0, float(np.abs(state.g).max(initial=0.0)), float(state.penalties.max(initial=0.0)))
    corner: Any = np.block([[L, np.zeros((n, 1))], [np.zeros(n), np.array([math.sqrt(price)])]])
    relaxed = solve_quadratic(
        corner, np.append(state.g, price), wide, np.append(right, [0.0, -1.0]), problem.equalities
    )
    if relaxed is None or not np.isfinite(relaxed.x).all():
        return None, 1.0
    return QuadraticSolution(relaxed.x, relaxed.multipliers[: len(rows)]), float(np.clip(relaxed.x[n], 0.0, 1.0))


def _factorise(B: Array) -> Array:
    """Return the Cholesky factor of a matrix, with as much of the identity as it needs."""
    shift, size = 0.0, float(np.abs(np.diag(B)).max(initial=0.0)) or 1.0
    while True:
        try:
            factor: Any = np.linalg.cholesky(B + shift * np.eye(len(B)))
            return np.asarray(factor)
        except np.linalg.LinAlgError:
            shift = max(10 * shift, 1e-12 * size)


def _search_along(state: SqpState, step: Array, relaxed: float) -> bool:
    """Go along a step until the merit function has fallen enough, and learn from it; return whether it has."""
    problem = state.problem
    start = state.measure_merit(state.f, state.c)
    drop = (1 - relaxed) * float(state.penalties @ state.measure_violation(state.c))
    slope = float(state.g @ step) - drop
    if slope >= 0:  # the model of the curvature is not positive enough along the step
        slope = -float(step @ state.B @ step)
    rounding = 32 * np.finfo(np.float64).eps * max(1.0, abs(start))
    length = 1.0
    for attempt in range(25):
        there = np.clip(state.x + length * step, problem.low, problem.high)
        f, c = problem.value(there), problem.constraints(there)
        merit = state.measure_merit(f, c)
        if math.isfinite(merit) and merit <= start + 1e-4 * length * slope + rounding:
            return _accept(state, there, f, c)
        if attempt == 0 and math.isfinite(merit) and _try_correction(state, step, c, start, slope):
            return True
        if math.isfinite(merit):
            best = -0.5 * slope * length**2 / (merit - start - slope * length)
            length = min(max(best, 0.1 * length), 0.5 * length)
        else:
            length *= 0.2
    return False


def _try_correction(state: SqpState, step: Array, c: Array, start: float, slope: float) -> bool:
    """Correct a full step to second order, where only the curvature of the constraints makes it look bad (Maratos)."""
    problem = state.problem
    active = np.flatnonzero(state.multipliers != 0)
    if not len(active) or np.abs(c[active]).max() <= state.tol:
        return False
    back = np.linalg.lstsq(state.A[active], -c[active], rcond=None)[0]
    if np.linalg.norm(back) > 0.5 * np.linalg.norm(step):
        return False
    there = np.clip(state.x + step + back, problem.low, problem.high)
    f, corrected = problem.value(there), problem.constraints(there)
    merit = state.measure_merit(f, corrected)
    return math.isfinite(merit) and merit <= start + 1e-4 * slope and _accept(state, there, f, corrected)


def _accept(state: SqpState, there: Array, f: float, c: Array) -> bool:
    """Move to a point, and update the model of the Lagrangian by BFGS, damped so that it stays positive definite (Powell)."""
    problem = state.problem
    g, A = problem.gradient(there), problem.jacobian(there)
    s = there - state.x
    y = g - state.g - (A - state.A).T @ state.multipliers
    state.x, state.f, state.c, state.g, state.A = there, f, c, g, A
    sy, ss = float(s @ y), float(s @ s)
    if not math.isfinite(sy) or ss == 0.0:
        return ss > 0.0
    if state.fresh and sy > 0:
        # The first difference gives the scale of the function.
        state.B, state.fresh = float(y @ y) / sy * np.eye(len(s)), False
    Bs = state.B @ s
    sBs = float(s @ Bs)
    if sy < 0.2 * sBs:
        theta = 0.8 * sBs / (sBs - sy)
        y = theta * y + (1 - theta) * Bs
        sy = float(s @ y)
    with np.errstate(all="ignore"):
        updated = state.B - np.outer(Bs, Bs) / sBs + np.outer(y, y) / sy if sy > 0 and sBs > 0 else state.B
    if np.isfinite(updated).all():
        state.B = updated
    return True
