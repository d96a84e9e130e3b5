"""Derivative-free methods: the simplex of Nelder and Mead, Powell's directions, coordinate descent, CMA-ES.

Each yields after every step the reason why it ended, or "", and whether it succeeded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

Vector = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Function = Callable[[Vector], float]
DirectMethod = Callable[[Function, Vector, float], Iterator[tuple[str, bool]]]


def nelder_mead(f: Function, x0: Vector, tol: float) -> Iterator[tuple[str, bool]]:
    """Minimise by a simplex that is reflected, expanded and shrunk, with the coefficients of Gao and Han (2012).

    Args:
        f: The function.
        x0: The starting point.
        tol: The relative gain of a restart below which it ends.
    """
    n = len(x0)
    restarts, best_before = 0, math.inf
    while True:
        size = 0.05 if restarts % 2 == 0 else 0.3
        simplex = [x0] + [x0 + (size * x0[i] if x0[i] else size * 0.01) * np.eye(n)[i] for i in range(n)]
        values = [f(x) for x in simplex]
        while True:
            order = np.argsort(values, kind="stable")
            simplex, values = [simplex[i] for i in order], [values[i] for i in order]
            spread = max(float(np.abs(x - simplex[0]).max()) for x in simplex[1:])
            small = spread <= 1e-10 * max(1.0, float(np.abs(simplex[0]).max()))
            if small and values[-1] - values[0] <= 1e-13 * max(1e-3, abs(values[0])):
                break
            yield "", False
            _move_simplex(f, simplex, values)
        x0, restarts = simplex[0], restarts + 1
        # A simplex can collapse before a minimum: start a new one at that point, until that gains nothing.
        if best_before - values[0] <= tol * max(1e-12, abs(values[0])) or restarts > 20:
            yield "The simplex has shrunk to a point, and a new one there finds nothing lower.", True
            return
        best_before = values[0]


def _move_simplex(f: Function, simplex: list[Vector], values: list[float]) -> None:
    """Replace the worst point of a sorted simplex, or shrink it; both lists are changed.

    Args:
        f: The function.
        simplex: The points, the best one first.
        values: The values of the function there.
    """
    n = len(simplex) - 1
    beta, gamma, delta = (1 + 2 / n, 0.75 - 1 / (2 * n), 1 - 1 / n) if n > 1 else (2.0, 0.5, 0.5)
    centre = sum(simplex[:-1]) / n
    away = centre - simplex[-1]
    reflected = centre + away
    at = f(reflected)
    if at < values[0]:
        expanded = centre + beta * away
        further = f(expanded)
        simplex[-1], values[-1] = (expanded, further) if further < at else (reflected, at)
    elif at < values[-2]:
        simplex[-1], values[-1] = reflected, at
    else:
        nearer = centre + (gamma if at < values[-1] else -gamma) * away
        there = f(nearer)
        if there < min(at, values[-1]):
            simplex[-1], values[-1] = nearer, there
        else:
            simplex[1:] = [simplex[0] + delta * (x - simplex[0]) for x in simplex[1:]]
            values[1:] = [f(x) for x in simplex[1:]]


def _line(f: Function, x: Vector, value: float, d: Vector, first: float) -> tuple[Vector, float, float]:
    """Return the minimum along a line: bracketed by growing steps, then by parabolic interpolation or golden sections."""
    a, fa, b = 0.0, value, first
    fb = f(x + b * d)
    if fb > fa:
        a, fa, b, fb = b, fb, a, fa
    c = b + 1.618 * (b - a)
    fc = f(x + c * d)
    for _ in range(60):
        if not fc < fb:
            break
        a, fa, b, fb = b, fb, c, fc
        c = b + 1.618 * (b - a)
        fc = f(x + c * d)
    step = before = abs(c - a)
    for _ in range(60):
        tol = 1e-9 * abs(b) + 1e-12
        if abs(c - a) <= 4 * tol:
            break
        far = c if abs(c - b) > abs(a - b) else a
        p, q = (b - a) * (fb - fc), (b - c) * (fb - fa)
        new = b - 0.5 * ((b - a) * p - (b - c) * q) / (p - q) if p != q else math.inf
        # Half of the step before the last, at most: otherwise parabolas do not converge.
        if not (min(a, c) < new < max(a, c) and abs(new - b) < 0.5 * before):
            new = b + 0.381966011250105 * (far - b)
        elif abs(new - b) < tol:
            new = b + math.copysign(tol, far - b)
        before, step = step, abs(new - b)
        fn = f(x + new * d)
        beyond = (new > b) == (c > a)  # between b and c
        if fn <= fb:
            a, fa, c, fc, b, fb = (b, fb, c, fc, new, fn) if beyond else (a, fa, b, fb, new, fn)
        else:
            a, fa, c, fc = (a, fa, new, fn) if beyond else (new, fn, c, fc)
    return (x + b * d, fb, b) if fb < value else (x, value, 0.0)


def descend_along(f: Function, x0: Vector, tol: float, replaces: bool) -> Iterator[tuple[str, bool]]:
    """Minimise along a set of directions in turn, initially the coordinates, then along the sum of their steps.

    Args:
        f: The function.
        x0: The starting point.
        tol: The relative gain that counts as none.
        replaces: Whether the sum of steps replaces a direction (Powell, 1964), or not (Hooke and Jeeves' pattern).
    """
    directions = list(np.eye(len(x0)))
    x, value, quiet = x0, f(x0), 0
    sizes = np.full(len(x0), 0.1) * np.maximum(1.0, np.abs(x0))
    while quiet < 2:
        yield "", False
        start, before, drop, which = x, value, 0.0, 0
        for i, d in enumerate(directions):
            last = value
            x, value, moved = _line(f, x, value, d, float(sizes[i]))
            sizes[i] = max(abs(moved), 0.1 * sizes[i], 1e-10)
            if last - value > drop:
                drop, which = last - value, i
        if before - value <= tol * (abs(before) + abs(value)) * 0.5 + 1e-300:
            quiet, directions = quiet + 1, list(np.eye(len(x0)))
            continue
        quiet, way = 0, x - start
        if replaces:
            beyond = f(x + way)
            # Keep the old directions unless the new one is worth it (Brent's and Acton's test)
            t = 2 * (before - 2 * value + beyond) * (before - value - drop) ** 2 - drop * (before - beyond) ** 2
            if not (beyond < before and t < 0):
                continue
            directions[which], directions[-1] = directions[-1], way / float(np.abs(way).max())
        x, value, _ = _line(f, x, value, way, 1.0)
    yield "No direction of the set leads lower.", True


def cmaes(f: Function, x0: Vector, tol: float) -> Iterator[tuple[str, bool]]:
    """Minimise by generations of `evolve.CMAES` around x0, whose initial step is a third of its size (at least 0.3).

    Args:
        f: The function.
        x0: The starting point.
        tol: The tolerance of `evolve.CMAES`.
    """
    from ..evolve import CMAES  # imported here because only this method needs it

    f(x0)
    search = CMAES(torch.from_numpy(x0), sigma=0.3 * max(1.0, float(np.abs(x0).max())), tol=tol)
    while (reason := search.should_stop()) is None:
        search.tell([f(row) for row in search.ask().numpy()])
        yield "", False
    yield str(reason), reason.success


DIRECT: dict[str, DirectMethod] = {
    "nelder-mead": nelder_mead,
    "powell": partial(descend_along, replaces=True),
    "cd": partial(descend_along, replaces=False),
    "cmaes": cmaes,
}
"""The methods by name."""
