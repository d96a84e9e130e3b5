"""Small dense quadratic programs, by the dual active-set method of Goldfarb and Idnani.

D. Goldfarb, A. Idnani, "A numerically stable dual method for solving strictly convex quadratic programs", Mathematical
Programming 27 (1983).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]


class QuadraticSolution(NamedTuple):
    """The minimiser of a quadratic program, and the multipliers of all its constraints (zero where inactive)."""

    x: Array
    multipliers: Array


def solve_quadratic(L: Array, g: Array, A: Array, b: Array, equalities: int) -> QuadraticSolution | None:
    """Minimise g'x + |L'x|^2 / 2 where A x >= b, with equality in the first rows.

    Args:
        L: The Cholesky factor of the Hessian, which is positive definite.
        g: The gradient at zero.
        A: The normals of the constraints, one in each row.
        b: Their right-hand sides.
        equalities: How many rows are equations.

    Returns:
        The solution, or None where the constraints contradict each other.
    """
    x = -np.linalg.solve(L.T, np.linalg.solve(L, g))
    scaled = np.asarray(
        np.linalg.solve(L, A.T), dtype=np.float64
    )  # the normals where the Hessian is the identity, one in each column
    norms = np.maximum(np.linalg.norm(A, axis=1), 1e-300)
    active: list[int] = []
    signs = np.ones(len(b))
    u = np.zeros(0)
    for _ in range(40 * (len(b) + len(g)) + 40):
        slack = A @ x - b
        p = _find_violated(slack, norms, active, equalities)
        if p is None:
            break
        signs[p] = -1.0 if p < equalities and slack[p] > 0 else 1.0
        added = _add_constraint(x, u, p, active, signs, L, A, b, scaled, equalities)
        if added is None:
            return None
        x, u = added
    multipliers = np.zeros(len(b))
    multipliers[active] = signs[active] * u
    return QuadraticSolution(x, multipliers)


def _find_violated(slack: Array, norms: Array, active: list[int], equalities: int) -> int | None:
    """Return the constraint that is violated most, equations first; None where all hold."""
    distance = slack / norms
    distance[active] = 0.0
    distance[:equalities] = -np.abs(distance[:equalities])
    limits = 1e-11 * np.maximum(1.0, np.abs(slack / norms))
    for rows in (slice(0, equalities), slice(equalities, None)):
        part = distance[rows]
        if part.size:
            worst = int(part.argmin())
            if part[worst] < -limits[rows][worst]:
                return worst + (rows.start or 0)
    return None


def _add_constraint(
    x: Array,
    u: Array,
    p: int,
    active: list[int],
    signs: Array,
    L: Array,
    A: Array,
    b: Array,
    scaled: Array,
    equalities: int,
) -> tuple[Array, Array] | None:
    """Make a violated constraint hold, dropping others whose multipliers would become negative.

    Args:
        x: The minimiser over the active constraints.
        u: Their multipliers.
        p: The constraint.
        active: The active constraints, in the order of `u`; changed.
        signs: Minus one where an equation is met from above.
        L: The Cholesky factor of the Hessian.
        A: The normals.
        b: The right-hand sides.
        scaled: The normals divided by the factor.
        equalities: How many of the first rows are equations, which are never dropped.

    Returns:
        The new minimiser and multipliers, or None where the constraint contradicts the active ones.
    """
    u = np.append(u, 0.0)
    normal, d = signs[p] * A[p], signs[p] * scaled[:, p]
    while True:
        if active:
            Q, R = np.linalg.qr(scaled[:, active] * signs[active])
            inside = Q.T @ d
            r = np.linalg.solve(R, inside)
            rest = d - Q @ inside
        else:
            r, rest = np.zeros(0), d
        droppable = [k for k, index in enumerate(active) if index >= equalities and r[k] > 0]
        blocking = min(droppable, key=lambda k: u[k] / r[k], default=None)
        dual = math.inf if blocking is None else float(u[blocking] / r[blocking])
        primal, z = math.inf, np.zeros_like(x)
        if float(rest @ rest) > 1e-22 * max(float(d @ d), 1e-300):
            z = np.linalg.solve(L.T, rest)
            primal = -float(normal @ x - signs[p] * b[p]) / float(z @ normal)
        step = min(dual, primal)
        if step == math.inf:
            return None
        x = x + (step * z if primal < math.inf else 0.0)
        u = u + step * np.append(-r, 1.0)
        if step == primal:
            active.append(p)
            return x, u
        del active[blocking or 0]
        u = np.delete(u, blocking or 0)
