"""The search of More and Thuente.

* The line search of More and Thuente: a step that satisfies the strong Wolfe conditions, in few evaluations.
* A step length that satisfies the strong Wolfe conditions.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from typing import Any

from ...optim import Setting
from ...optim import ranges as check
from ._base import LineSearchBase, Trials

Trial = tuple[float, float, float]
"""A length, the value there, and the slope there."""


def _cubic(p: Trial, q: Trial, toward: float) -> tuple[float, float]:
    """Return the numbers that determine the minimiser of the cubic through two points with slopes: theta, and gamma with a sign."""
    (a, fa, da), (b, fb, db) = p, q
    theta = 3 * (fa - fb) / (b - a) + da + db
    scale = max(abs(theta), abs(da), abs(db))
    inside = (theta / scale) ** 2 - (da / scale) * (db / scale) if scale > 0 else 0.0
    return theta, math.copysign(scale * math.sqrt(max(inside, 0.0)), toward)


def trial_step(low: Trial, other: Trial, new: Trial, bracketed: bool, least: float, most: float) -> float:
    """Return the next trial, from the lowest point, the other end of the interval and the newest point (section 4)."""
    (al, fl, gl), (at, ft, gt) = low, new
    toward = at - al
    if ft > fl:
        # Case 1: the value rose. Between the minimisers of the cubic and the quadratic, nearer to the lower end.
        theta, gamma = _cubic(low, new, toward)
        cubic = al + ((gamma - gl) + theta) / (((gamma - gl) + gamma) + gt) * toward
        quadratic = al + gl / ((fl - ft) / toward + gl) / 2 * toward
        return cubic if abs(cubic - al) < abs(quadratic - al) else cubic + (quadratic - cubic) / 2
    if gt * math.copysign(1.0, gl) < 0:
        # Case 2: lower, with slopes of opposite signs: the minimiser of cubic or secant that is farther from the new point.
        theta, gamma = _cubic(low, new, -toward)
        cubic = at + ((gamma - gt) + theta) / (((gamma - gt) + gamma) + gl) * -toward
        secant = at + gt / (gt - gl) * -toward
        return cubic if abs(cubic - at) > abs(secant - at) else secant
    if abs(gt) < abs(gl):
        # Case 3: lower, same sign, flatter. The cubic only where it tends to infinity that way, or is beyond the point.
        theta, gamma = _cubic(low, new, -toward)
        r = ((gamma - gt) + theta) / ((gamma + (gl - gt)) + gamma) if ((gamma + (gl - gt)) + gamma) != 0 else 0.0
        cubic = at - r * toward if r < 0 and gamma != 0 else (most if at > al else least)
        secant = at + gt / (gt - gl) * -toward
        if bracketed:
            best = cubic if abs(cubic - at) < abs(secant - at) else secant
            limit = at + 0.66 * (other[0] - at)
            return min(limit, best) if at > al else max(limit, best)
        best = cubic if abs(cubic - at) > abs(secant - at) else secant
        return max(least, min(most, best))
    # Case 4: lower, same sign, no flatter.
    if bracketed:
        theta, gamma = _cubic(new, other, other[0] - at)
        return at + ((gamma - gt) + theta) / (((gamma - gt) + gamma) + other[2]) * (other[0] - at)
    return most if at > al else least


def _narrow(low: Trial, other: Trial, new: Trial) -> tuple[Trial, Trial, bool]:
    """Return the new interval: its lowest end, its other end, and whether it contains a minimiser."""
    if new[1] > low[1]:
        return low, new, True
    if new[2] * math.copysign(1.0, low[2]) < 0:
        return new, low, True
    return new, other, False


def _tilt(slope: float, *trials: Trial) -> list[Trial]:
    """Return trials of the function minus a line through zero."""
    return [(a, f - a * slope, d - slope) for a, f, d in trials] if slope else list(trials)


def _narrow_tilted(slope: float, *trials: Trial) -> tuple[Trial, Trial, bool]:
    """Return the ends that `_narrow` chooses on the function minus a line, with their own values."""
    tilted = _tilt(slope, *trials)
    low, other, closed = _narrow(*tilted)
    own = {id(key): trial for key, trial in zip(tilted, trials, strict=True)}
    return own[id(low)], own[id(other)], closed


def _find_limits(low: Trial, other: Trial, following: float, bracketed: bool) -> tuple[float, float]:
    """Return the smallest and largest length of the trial after the next."""
    if bracketed:
        return min(low[0], other[0]), max(low[0], other[0])
    return following + 1.1 * (following - low[0]), following + 4 * (following - low[0])


def _parabola_minimum(start: Trial, new: Trial, left: float | None) -> float | None:
    """Return the minimiser along the line if three values show that the function is a parabola there, and it pays off.

    With exact steps quasi-Newton and conjugate directions end after n steps on a quadratic function (Nocedal and Wright,
    theorem 6.4), while steps that only meet Wolfe's conditions can take many times as long if it is badly conditioned.
    """
    (_, f0, d0), (a, f, d) = start, new
    if left is None or abs(d) <= left * abs(d0):
        return None
    size = a * (abs(d0) + abs(d))
    off = abs(f - f0 - 0.5 * a * (d0 + d))
    visible = 1e-9 * size > 4e-16 * max(abs(f0), abs(f))
    return a * d0 / (d0 - d) if visible and off <= 1e-9 * size and d > d0 else None


def _try_exact(
    exact: float, accepted: tuple[float, float, float], enough: float, lowest: float, best: float | None
) -> Generator[float, tuple[float, float], tuple[float | None, bool, float, float | None]]:
    """Try the minimum of a parabola; return it if it is better than the accepted point, otherwise that point."""
    f, d = yield exact
    if f <= enough and abs(d) < abs(accepted[2]):
        return exact, True, min(lowest, f), exact if f < lowest else best
    return accepted[0], True, lowest, best


def more_thuente_trials(
    loss: float,
    slope: float,
    first: float,
    *,
    c1: float,
    c2: float,
    most: float,
    maxiter: int,
    width: float = 0.1,
    parabola: float | None = None,
) -> Generator[float, tuple[float, float], tuple[float | None, bool, float, float | None]]:
    r"""A length with $\phi(a) \le \phi(0) + c_1 a \phi'(0)$ and $|\phi'(a)| \le c_2 |\phi'(0)|$.

    It yields the lengths to try and is sent the value and the slope there, so that many searches can be evaluated at once.

    Args:
        loss: The value at 0.
        slope: The slope at 0, negative.
        first: The first length to try.
        c1: The first constant.
        c2: The second constant.
        most: The longest step.
        maxiter: The largest number of evaluations.
        width: Stop when the interval is this small relative to its upper end.
        parabola: Where the function is a parabola along the line to rounding, and more than this fraction of the slope is
            left at a length that would be accepted, go to the parabola's minimum.

    Returns:
        The length (the best end of the interval where the search ended otherwise; None where there is none), whether
        both conditions hold there, and the lowest value that was seen with its length.
    """
    demanded = c1 * slope
    low = other = (0.0, loss, slope)
    bracketed, first_stage = False, True
    span, span_before = most, 2 * most
    a = min(first, most)
    least, upper = 0.0, a + 4 * a
    ceiling = most
    lowest, best = math.inf, None
    for _ in range(maxiter):
        f, d = yield a
        if f < lowest:
            lowest, best = f, a
        if f == -math.inf:
            return a, False, lowest, best
        if not math.isfinite(f) or not math.isfinite(d):
            # Outside of the function's domain: no longer step is of use.
            ceiling = a
            a = low[0] + 0.1 * (a - low[0]) if not bracketed else 0.5 * (low[0] + a)
            upper = min(upper, ceiling)
            if a == low[0] or abs(a - low[0]) <= 1e-16 * max(ceiling, 1e-300):
                break
            continue
        new = (a, f, d)
        enough = loss + a * demanded
        if f <= enough and abs(d) <= c2 * -slope:
            exact = _parabola_minimum((0.0, loss, slope), new, parabola)
            if exact is None or exact > most:
                return a, True, lowest, best
            return (yield from _try_exact(exact, new, loss + exact * demanded, lowest, best))
        first_stage = first_stage and not (f <= enough and d >= 0)
        ended = a == most and f <= enough and d <= demanded
        if ended or (bracketed and (a <= least or a >= upper or upper - least <= width * upper)):
            break
        # While no point has satisfied the first condition with a rising slope, search on the function minus the line that the
        # condition demands, which has its minimisers where both conditions hold.
        tilt = demanded if first_stage and f <= low[1] and f > enough else 0.0
        fallback = 0.5 * (low[0] + a) if bracketed else min(4 * a, most)
        ends = _tilt(tilt, low, other, new)
        try:
            following = trial_step(ends[0], ends[1], ends[2], bracketed, least, upper)
        except (ZeroDivisionError, OverflowError):
            following = fallback
        low, other, closed = _narrow_tilted(tilt, low, other, new)
        bracketed = bracketed or closed
        if bracketed:
            if abs(other[0] - low[0]) >= 0.66 * span_before:
                following = low[0] + 0.5 * (other[0] - low[0])
            span_before, span = span, abs(other[0] - low[0])
        least, upper = _find_limits(low, other, following, bracketed)
        a = min(max(following, 0.0), min(most, ceiling))
        if not math.isfinite(a):
            break
        if bracketed and (a <= least or a >= upper or upper - least <= width * upper):
            a = low[0]
        if a == 0.0:
            break
    return (low[0] if low[0] > 0 else None), False, lowest, best


class StrongWolfe(LineSearchBase):
    r"""Searches for a length where the value has fallen enough and the slope has flattened enough.

    $f(x - a u) \le f(x) + c_1 a \phi'(0),\qquad |\phi'(a)| \le c_2 |\phi'(0)|,\qquad \phi(a) = f(x - a u)$.

    Quasi-Newton links need the second condition for their curvature, conjugate gradients a tight one (`c2=0.1`). With
    `mo.closure(fn, fixed=True)` the loss and gradient of the accepted point are handed to the next step.

    Args:
        c1: The fraction of the decrease promised by the slope that is asked for.
        c2: The fraction of the slope that may be left.
        a_init: The first length: "fixed" (`init_value`), "previous" (the last one), "first-order" (the last one, times
            the ratio of slopes), "quadratic" (the minimiser of a parabola with the last decrease), "quadratic-clip"
            (that times 1.01, at most 1).
        a_max: The longest step.
        init_value: The first length where nothing else is known.
        maxiter: The largest number of evaluations.
        tol_change: End when the interval is this small relative to its upper end.
        adaptive: Halve the first length after a search that found no lower point.
        fallback: Where the conditions can't be met, take the lowest point found if it is lower than the start.
        plus_minus: Where the update points uphill, search along minus the update (otherwise along the gradient).
        parabola: Where the function is exactly quadratic along the line, and more than this fraction of the slope is left,
            go to the minimum of the parabola at the price of one more evaluation; None for never.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
        >>> rosenbrock = mo.closure(lambda: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2, fixed=True)
        >>> opt = mo.Optimizer([w], m.LBFGS(), m.StrongWolfe())
        >>> for _ in range(40):
        ...     _ = opt.step(rosenbrock)
        >>> torch.allclose(w.data, torch.ones(2, dtype=torch.float64))
        True

    References:
        J. J. More, D. J. Thuente, "Line search algorithms with guaranteed sufficient decrease", ACM TOMS 20 (1994);
        J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., section 3.5.
    """

    members = "matrix"
    uses_slopes = True
    ranges = {check.one_of("fixed", "previous", "first-order", "quadratic", "quadratic-clip"): ("a_init",)}

    c1: Setting = 1e-4
    c2: Setting = 0.9
    a_init: str = "fixed"
    a_max: Setting = 1e12
    init_value: Setting = 1.0
    maxiter: int = 25
    tol_change: Setting = 1e-9
    adaptive: bool = True
    fallback: bool = True
    plus_minus: bool = False
    parabola: float | None = 0.1

    def collect(self, given: Mapping[str, Any]) -> None:
        c1, c2 = given["c1"], given["c2"]
        if isinstance(c1, int | float) and isinstance(c2, int | float) and not 0 < c1 < c2 < 1:
            raise ValueError(f"StrongWolfe: c1 is {c1} and c2 is {c2}; they obey 0 < c1 < c2 < 1")
        super().collect(given)

    def choose_first_length(self, loss: float, slope: float, settings: Any, memory: dict[str, Any]) -> float:
        """Return the first length to try."""
        kind, start = settings["a_init"], float(settings["init_value"])
        last = memory.get("last")
        out = start
        if kind != "fixed" and last is not None:
            a, slope_before, loss_before = last
            if kind == "previous":
                out = a
            elif kind == "first-order":
                out = a * slope_before / slope
            else:
                out = 2 * (loss - loss_before) / slope
                if kind == "quadratic-clip":
                    out = min(1.0, 1.01 * out)
        if not math.isfinite(out) or out <= 0:
            out = start
        return out * (memory.get("scale", 1.0) if settings["adaptive"] else 1.0)

    def trials(self, loss: float, slope: float, settings: Any, memory: dict[str, Any]) -> Trials:
        """Search for a length where both conditions hold, and return it."""
        length, good, lowest, best = yield from more_thuente_trials(
            loss,
            slope,
            self.choose_first_length(loss, slope, settings, memory),
            c1=settings["c1"],
            c2=settings["c2"],
            most=settings["a_max"],
            maxiter=settings["maxiter"],
            width=settings["tol_change"],
            parabola=settings["parabola"],
        )
        if not good:
            length = best if lowest == -math.inf or (settings["fallback"] and lowest < loss) else None
        if length is None:
            scale = memory.get("scale", 1.0)
            memory["scale"] = scale / 2 if scale > 1e-30 else 1.0
            return None
        memory["scale"] = 1.0
        memory["last"] = (length, slope, loss)
        return length

    def reset_for_online(self) -> None:
        """Clear the last step length."""
        super().reset_for_online()
        self.global_state.pop("last", None)
