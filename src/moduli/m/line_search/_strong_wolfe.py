"""The search of More and Thuente.

* The line search of More and Thuente: a step that satisfies the strong Wolfe conditions, in few evaluations.
* A step length that satisfies the strong Wolfe conditions.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ...optim import Setting
from ...optim import ranges as check
from ._base import LineSearchBase, Trials

Trial = tuple[float, float, float]
"""A length, the value there, and the slope there."""
Value = tuple[float | None, float]
"""A length, and the value there; None and infinity before the first trial."""
Search = Generator[float, tuple[float, float], tuple[float | None, bool, Value]]
"""A search that yields lengths, is sent values and slopes, and returns as `more_thuente_trials` does."""


def _cubic(p: Trial, q: Trial, toward: float) -> tuple[float, float]:
    """Return the numbers that determine the minimiser of the cubic through two points with slopes: theta, and gamma with a sign."""
    (a, fa, da), (b, fb, db) = p, q
    theta = 3 * (fa - fb) / (b - a) + da + db
    scale = max(abs(theta), abs(da), abs(db))
    inside = (theta / scale) ** 2 - (da / scale) * (db / scale) if scale > 0 else 0.0
    return theta, math.copysign(scale * math.sqrt(max(inside, 0.0)), toward)


def trial_step(low: Trial, other: Trial, new: Trial, bracketed: bool, least: float, most: float) -> float:
    """Return the next trial (section 4).

    Args:
        low: The point with the lowest value.
        other: The other end of the interval.
        new: The newest point.
        bracketed: Whether the interval contains a minimiser.
        least: The lower limit of the trial.
        most: Its upper limit.
    """
    (al, fl, gl), (at, ft, gt) = low, new
    toward = at - al

    def measure_distance(a: float) -> float:
        return abs(a - at)

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
        return max(secant, cubic, key=measure_distance)
    if abs(gt) < abs(gl):
        # Case 3: lower, same sign, flatter. The cubic only where it tends to infinity that way, or is beyond the point.
        theta, gamma = _cubic(low, new, -toward)
        r = ((gamma - gt) + theta) / ((gamma + (gl - gt)) + gamma) if ((gamma + (gl - gt)) + gamma) != 0 else 0.0
        cubic = at - r * toward if r < 0 and gamma != 0 else (most if at > al else least)
        secant = at + gt / (gt - gl) * -toward
        if not bracketed:
            return max(least, min(most, max(secant, cubic, key=measure_distance)))
        best, limit = min(secant, cubic, key=measure_distance), at + 0.66 * (other[0] - at)
        return min(limit, best) if at > al else max(limit, best)
    # Case 4: lower, same sign, no flatter.
    if bracketed:
        theta, gamma = _cubic(new, other, other[0] - at)
        return at + ((gamma - gt) + theta) / (((gamma - gt) + gamma) + other[2]) * (other[0] - at)
    return most if at > al else least


def _narrow(ends: list[Trial], tilted: list[Trial]) -> tuple[Trial, Trial, bool]:
    """Return the lowest end and the other end of the new interval, and whether it contains a minimiser.

    Args:
        ends: The lowest end, the other end and the newest point.
        tilted: The same points, by which the ends are chosen.
    """
    low, other, new = ends
    if tilted[2][1] > tilted[0][1]:
        return low, new, True
    if tilted[2][2] * math.copysign(1.0, tilted[0][2]) < 0:
        return new, low, True
    return new, other, False


def _tilt(slope: float, trials: list[Trial]) -> list[Trial]:
    """Return trials of the function minus a line through zero."""
    return [(a, f - a * slope, d - slope) for a, f, d in trials] if slope else trials


@dataclass(slots=True)
class _Interval:
    """The interval of a search: its lowest end, its other end, and the limits of the next trial (section 2).

    Args:
        low: The end with the lowest value.
        other: The other end.
        most: The longest step.
        width: The search ends when the interval is this small relative to its upper limit.
        ceiling: The shortest length outside of the function's domain, or the longest step.
        upper: The upper limit of the next trial.
        span: The length of the interval.
        span_before: The length before that.
        least: The lower limit of the next trial.
        bracketed: Whether it contains a minimiser.
        first_stage: Whether no point has satisfied the first condition with a rising slope.
    """

    low: Trial
    other: Trial
    most: float
    width: float
    ceiling: float
    upper: float
    span: float
    span_before: float
    least: float = 0.0
    bracketed: bool = False
    first_stage: bool = True

    def is_exhausted(self, a: float) -> bool:
        """Return whether a minimiser is enclosed so closely that a trial at a is of no use."""
        short = self.upper - self.least <= self.width * self.upper
        return self.bracketed and (a <= self.least or a >= self.upper or short)

    def retreat(self, a: float) -> float:
        """Return a shorter trial than one outside of the function's domain: no longer step is of use."""
        low = self.low[0]
        self.ceiling, self.upper = a, min(self.upper, a)
        return 0.5 * (low + a) if self.bracketed else low + 0.1 * (a - low)

    def advance(self, new: Trial, demanded: float, enough: float) -> float:
        """Replace an end by the newest point, and return the next trial.

        Args:
            new: The newest point.
            demanded: The slope of the line of the first condition.
            enough: The value of that line at the newest point.
        """
        ends, (a, f, d) = [self.low, self.other, new], new
        self.first_stage = self.first_stage and not (f <= enough and d >= 0)
        # While no point has satisfied the first condition with a rising slope, search on the function minus the line that the
        # condition demands, which has its minimisers where both conditions hold.
        tilted = _tilt(demanded if self.first_stage and enough < f <= self.low[1] else 0.0, ends)
        try:
            following = trial_step(tilted[0], tilted[1], tilted[2], self.bracketed, self.least, self.upper)
        except (ZeroDivisionError, OverflowError):
            following = 0.5 * (self.low[0] + a) if self.bracketed else min(4 * a, self.most)
        self.low, self.other, closed = _narrow(ends, tilted)
        self.bracketed = self.bracketed or closed
        low, other = self.low[0], self.other[0]
        if not self.bracketed:
            self.least, self.upper = following + 1.1 * (following - low), following + 4 * (following - low)
        else:
            if abs(other - low) >= 0.66 * self.span_before:
                following = low + 0.5 * (other - low)
            self.span_before, self.span = self.span, abs(other - low)
            self.least, self.upper = min(low, other), max(low, other)
        a = min(max(following, 0.0), min(self.most, self.ceiling))
        return low if math.isfinite(a) and self.is_exhausted(a) else a


def _parabola_minimum(start: Trial, new: Trial, left: float | None, most: float) -> float | None:
    """Return the minimiser along the line if three values show that the function is a parabola there, and it pays off.

    With exact steps quasi-Newton and conjugate directions end after n steps on a quadratic function (Nocedal and Wright,
    theorem 6.4), while steps that only meet Wolfe's conditions can take many times as long if it is badly conditioned.

    Args:
        start: The point at 0.
        new: The newest point.
        left: The fraction of the slope that has to be left at the newest point; None for no parabola.
        most: The longest step.
    """
    (_, f0, d0), (a, f, d) = start, new
    if left is None or abs(d) <= left * abs(d0):
        return None
    size = a * (abs(d0) + abs(d))
    off = abs(f - f0 - 0.5 * a * (d0 + d))
    visible = 1e-9 * size > 4e-16 * max(abs(f0), abs(f))
    if not (visible and off <= 1e-9 * size and d > d0):
        return None
    exact = a * d0 / (d0 - d)
    return exact if exact <= most else None


def _try_exact(exact: float, accepted: Trial, enough: float, lowest: Value) -> Search:
    """Try the minimum of a parabola; return it if it is better than the accepted point, otherwise that point."""
    f, d = yield exact
    if f <= enough and abs(d) < abs(accepted[2]):
        return exact, True, min(lowest, (exact, f), key=itemgetter(1))
    return accepted[0], True, lowest


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
) -> Search:
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
        both conditions hold there, and the lowest value that was seen, after its length.
    """
    demanded = c1 * slope
    start = (0.0, loss, slope)
    a = min(first, most)
    interval = _Interval(start, start, most, width, ceiling=most, upper=a + 4 * a, span=most, span_before=2 * most)
    lowest: Value = (None, math.inf)
    for _ in range(maxiter):
        f, d = yield a
        lowest = min(lowest, (a, f), key=itemgetter(1))
        if f == -math.inf:
            return a, False, lowest
        if not all(map(math.isfinite, (f, d))):
            a = interval.retreat(a)
            if abs(a - interval.low[0]) <= 1e-16 * max(interval.ceiling, 1e-300):
                break
            continue
        new = (a, f, d)
        enough = loss + a * demanded
        if f <= enough and abs(d) <= c2 * -slope:
            exact = _parabola_minimum(start, new, parabola, most)
            if exact is None:
                return a, True, lowest
            return (yield from _try_exact(exact, new, loss + exact * demanded, lowest))
        ended = a == most and f <= enough and d <= demanded
        if ended or interval.is_exhausted(a):
            break
        a = interval.advance(new, demanded, enough)
        if a == 0.0 or not math.isfinite(a):
            break
    return interval.low[0] or None, False, lowest


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
        """Return the first length to try.

        Args:
            loss: The value at 0.
            slope: The slope at 0.
            settings: The settings in force.
            memory: The state of the search.
        """
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
        length, good, (best, lowest) = yield from more_thuente_trials(
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
