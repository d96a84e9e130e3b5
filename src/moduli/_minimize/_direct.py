"""Methods that look at values only: the simplex of Nelder and Mead, Powell's directions, coordinate descent, CMA-ES.

Each yields after every step a reason to end, or "", and whether that is a success.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

Vector = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Function = Callable[[Vector], float]


def nelder_mead(f: Function, x0: Vector, tol: float) -> Iterator[tuple[str, bool]]:
    """A simplex that is reflected, stretched and shrunk; coefficients as Gao and Han (2012) for many variables."""
    n = len(x0)
    alpha, beta, gamma, delta = 1.0, 1 + 2 / n, 0.75 - 1 / (2 * n), 1 - 1 / n
    if n == 1:
        beta, gamma, delta = 2.0, 0.5, 0.5
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
            centre = sum(simplex[:-1]) / n
            away = centre - simplex[-1]
            reflected = centre + alpha * away
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
                    simplex = [simplex[0]] + [simplex[0] + delta * (x - simplex[0]) for x in simplex[1:]]
                    values = [values[0]] + [f(x) for x in simplex[1:]]
        x0, restarts = simplex[0], restarts + 1
        # A simplex can collapse before a minimum: start a new one from where it did, until that gains nothing.
        if best_before - values[0] <= tol * max(1e-12, abs(values[0])) or restarts > 20:
            yield "The simplex has shrunk to a point, and a new one there finds nothing lower.", True
            return
        best_before = values[0]


def _line(f: Function, x: Vector, value: float, d: Vector, first: float) -> tuple[Vector, float, float]:
    """The minimum along a line: bracketed by steps that grow, then Brent's parabolas and golden sections."""
    golden = 0.381966011250105
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
    low, high = min(a, c), max(a, c)
    best = second = third = b
    f1 = f2 = f3 = fb
    step = before = high - low
    for _ in range(60):
        middle = 0.5 * (low + high)
        tol = 1e-9 * abs(best) + 1e-12
        if abs(best - middle) <= 2 * tol - 0.5 * (high - low):
            break
        parabola = False
        if abs(before) > tol:
            r = (best - second) * (f1 - f3)
            q = (best - third) * (f1 - f2)
            p = (best - third) * q - (best - second) * r
            q = 2 * (q - r)
            p = -p if q > 0 else p
            q = abs(q)
            if abs(p) < abs(0.5 * q * before) and q * (low - best) < p < q * (high - best):
                before, step, parabola = step, p / q, True
        if not parabola:
            before = (high if best < middle else low) - best
            step = golden * before
        new = best + (step if abs(step) >= tol else math.copysign(tol, step))
        fn = f(x + new * d)
        if fn <= f1:
            low, high = (best, high) if new >= best else (low, best)
            third, f3, second, f2, best, f1 = second, f2, best, f1, new, fn
        else:
            low, high = (new, high) if new < best else (low, new)
            if fn <= f2 or second == best:
                third, f3, second, f2 = second, f2, new, fn
            elif fn <= f3 or third in (best, second):
                third, f3 = new, fn
    return (x + best * d, f1, best) if f1 < value else (x, value, 0.0)


def powell(f: Function, x0: Vector, tol: float) -> Iterator[tuple[str, bool]]:
    """Minima along a set of directions, one of which is replaced by the way they went together (Powell, 1964)."""
    directions = list(np.eye(len(x0)))
    x, value, quiet = x0, f(x0), 0
    while True:
        yield "", False
        start, before, drop, which = x, value, 0.0, 0
        for i, d in enumerate(directions):
            last = value
            x, value, _ = _line(f, x, value, d, 0.1 * max(1.0, float(np.abs(x).max())))
            if last - value > drop:
                drop, which = last - value, i
        if _gains_nothing(before, value, tol):
            quiet += 1
            if quiet > 1:
                yield "No direction of the set leads lower.", True
                return
            directions = list(np.eye(len(x0)))
            continue
        quiet = 0
        way = x - start
        beyond = f(x + way)
        # Keep the old directions unless the new one is worth it (Brent's and Acton's test)
        t = 2 * (before - 2 * value + beyond) * (before - value - drop) ** 2 - drop * (before - beyond) ** 2
        if beyond < before and t < 0:
            x, value, _ = _line(f, x, value, way, 1.0)
            directions[which] = directions[-1]
            directions[-1] = way / float(np.abs(way).max())


def coordinate_descent(f: Function, x0: Vector, tol: float) -> Iterator[tuple[str, bool]]:
    """Minima along the coordinates in turn, then along the way they went together (Hooke and Jeeves' pattern)."""
    x, value, quiet = x0, f(x0), 0
    sizes = np.full(len(x0), 0.1) * np.maximum(1.0, np.abs(x0))
    while quiet < 2:
        yield "", False
        start, before = x, value
        for i, axis in enumerate(np.eye(len(x0))):
            x, value, moved = _line(f, x, value, axis, float(sizes[i]))
            sizes[i] = max(abs(moved), 0.1 * sizes[i], 1e-10)
        if (x != start).any():
            x, value, _ = _line(f, x, value, x - start, 1.0)
        quiet = quiet + 1 if _gains_nothing(before, value, tol) else 0
    yield "No coordinate leads lower.", True


def _gains_nothing(before: float, value: float, tol: float) -> bool:
    return before - value <= tol * (abs(before) + abs(value)) * 0.5 + 1e-300


def cmaes(f: Function, x0: Vector, tol: float) -> Iterator[tuple[str, bool]]:
    """Generations of `evolve.CMAES` around x0, whose first step is a third of its size (at least 0.3)."""
    from ..evolve import CMAES  # a room that only this method needs

    f(x0)
    search = CMAES(torch.from_numpy(x0), sigma=0.3 * max(1.0, float(np.abs(x0).max())), tol=tol)
    while (reason := search.should_stop()) is None:
        search.tell([f(row) for row in search.ask().numpy()])
        yield "", False
    yield str(reason), reason.success


DIRECT: dict[str, Callable[[Function, Vector, float], Iterator[tuple[str, bool]]]] = {
    "nelder-mead": nelder_mead,
    "powell": powell,
    "cd": coordinate_descent,
    "cmaes": cmaes,
}
"""The methods by name."""
