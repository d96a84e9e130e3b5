"""Confidence intervals of fitted parameters: by Student's t, and by the profile of the sum of squares.

D. M. Bates, D. G. Watts, Nonlinear Regression Analysis and Its Applications (1988), chapters 2 and 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ._derivatives import VectorFunction, allow_derivatives
from ._point import value_of

if TYPE_CHECKING:
    from ._result import FoundProblem


def find_t_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t distribution; the normal one for infinite degrees of freedom.

    >>> round(find_t_quantile(0.975, 10), 4), round(find_t_quantile(0.975, math.inf), 4)
    (2.2281, 1.96)
    """
    if probability < 0.5:
        return -find_t_quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while _compute_t_probability(high, freedom) < probability:
        high *= 2
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if _compute_t_probability(middle, freedom) < probability else (low, middle)
    return 0.5 * (low + high)


def _compute_t_probability(t: float, freedom: float) -> float:
    """Return the probability that Student's t is below t, which is not negative."""
    if math.isinf(freedom):
        return 0.5 * (1 + math.erf(t / math.sqrt(2)))
    return 1 - 0.5 * _compute_beta(freedom / (freedom + t * t), 0.5 * freedom, 0.5)


def _compute_beta(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function, by its continued fraction (Lentz's method)."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):
        return 1 - _compute_beta(1 - x, b, a)
    log = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    fraction = d
    for m in range(1, 10_000):
        change = 1.0
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / ((1 + numerator * d) or tiny)
            c = (1 + numerator / c) or tiny
            change *= c * d
        fraction *= change
        if abs(change - 1) < 1e-15:
            break
    return math.exp(log) * fraction / a


@allow_derivatives()
def find_intervals(problem: FoundProblem, level: float, by: str) -> tuple[Tensor, Tensor]:
    """Return the lower and upper ends of the interval of every real number.

    Args:
        problem: The function, and the point.
        level: The probability that an interval covers the true value.
        by: "t" for the linear model of the residuals, "profile" for the profile of the sum of squares.
    """
    if not 0 < level < 1:
        raise ValueError(f"confidence_interval: level is {level}; it is a probability, as 0.95")
    if by not in ("t", "profile"):
        raise ValueError(f"confidence_interval: by is {by!r}; it is 't' or 'profile'")
    freedom = problem.count_freedom()
    if not freedom > 0:
        raise ValueError("confidence_interval: there are no more residuals than parameters, which leaves no error bars")
    quantile = find_t_quantile(0.5 + 0.5 * level, freedom)
    errors = problem.compute_covariance().diagonal().sqrt()
    if by == "t":
        return problem.at - quantile * errors, problem.at + quantile * errors
    if problem.constraints:
        raise ValueError("confidence_interval: profiles are taken without constraints; by='t' follows them")
    low, high = problem.at.clone(), problem.at.clone()
    profile = LikelihoodProfile(problem, freedom)
    for i in range(len(errors)):
        if not bool(profile.fixed[i]):
            low[i] = profile.find_end(i, -1, float(errors[i]), quantile)
            high[i] = profile.find_end(i, 1, float(errors[i]), quantile)
    return low, high


class LikelihoodProfile:
    """The minimum of a function over all variables except one, as a function of that one.

    Args:
        problem: The function, and its minimum.
        freedom: The degrees of freedom of its residuals; infinite for a negative log-likelihood.
    """

    def __init__(self, problem: FoundProblem, freedom: float) -> None:
        self.function = VectorFunction(problem.fun, problem.point)
        self.at = problem.at.detach()
        self.fixed = problem.find_fixed()
        self.low, self.high = problem.find_sides()
        with torch.no_grad():
            self.scalar = self.function(self.at).numel() == 1
            self.least = self.measure(self.at)
        # Twice the loss grows by the variance of one residual for each squared standard error.
        self.variance = 1.0 if math.isinf(freedom) else 2 * self.least / freedom

    def measure(self, vector: Tensor) -> float:
        """Return the loss at a vector."""
        values = self.function(vector)
        return float(value_of(values.reshape(()) if self.scalar else values))

    def refit(self, i: int, value: float, start: Tensor) -> Tensor:
        """Return the point with the least loss among those where variable i has a value.

        Args:
            i: The variable.
            value: Its value.
            start: The starting point.
        """
        from . import minimize  # this module is imported by that one

        at = start.clone()
        at[i] = value
        free = ~self.fixed
        free[i] = False
        if not bool(free.any()):
            return at

        def residuals(numbers: Tensor) -> Tensor:
            values = self.function(at.masked_scatter(free, numbers))
            return values.reshape(()) if self.scalar else values

        method = "bfgs" if self.scalar else "lm"
        x: Tensor = minimize(residuals, at[free], method, lower=self.low[free], upper=self.high[free]).x
        return at.masked_scatter(free, x)

    def find_end(self, i: int, sign: int, error: float, quantile: float) -> float:
        """Return the end of an interval, where the profile has grown by the squared quantile.

        Args:
            i: The variable.
            sign: The direction: -1 for the lower end, 1 for the upper one.
            error: Its standard error.
            quantile: The width of the interval in standard errors of a linear model.
        """
        centre, bound = float(self.at[i]), float(self.high[i] if sign > 0 else self.low[i])
        step = error * quantile if math.isfinite(error) and error > 0 else max(abs(centre), 1.0)
        start = self.at

        def excess(distance: float) -> float:
            nonlocal start
            there = self.refit(i, centre + sign * distance, start)
            with torch.no_grad():
                growth = 2 * (self.measure(there) - self.least) / self.variance if self.variance > 0 else math.inf
            if math.isfinite(growth):
                start = there
            return min(math.sqrt(max(growth, 0.0)), 1e9) - quantile if not math.isnan(growth) else 1e9

        limit = abs(bound - centre)
        return centre + sign * _find_root(excess, step, limit, quantile)


def _find_root(excess: Callable[[float], float], step: float, limit: float, quantile: float) -> float:
    """Return the root of a growing function that starts at minus the quantile: by growing steps, then false position."""
    near, low = 0.0, -quantile
    far = min(step, limit)
    high = excess(far) if far > 0 else -quantile
    for _ in range(40):
        if high >= 0 or far >= limit:
            break
        near, low, far = far, high, min(2 * far, limit)
        high = excess(far)
    if high < 0:
        return limit if math.isfinite(limit) else math.inf
    for _ in range(60):
        if far - near <= 1e-8 * far:
            break
        guess = near - low * (far - near) / (high - low)
        if not near < guess < far:
            guess = 0.5 * (near + far)
        at = excess(guess)
        if abs(at) <= 1e-7:
            return guess
        # The Illinois rule: the value at the end that stays is halved.
        if at < 0:
            near, low, high = guess, at, 0.5 * high
        else:
            far, high, low = guess, at, 0.5 * low
    return 0.5 * (near + far)
