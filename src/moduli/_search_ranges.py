"""Ranges and scales of the numbers that are worth tuning, declared once: `lab.race(tune=)`, `m.PBT` and `merge.search` read them.

A number is looked up in the attribute `search_ranges` of its class (and of the bases), a mapping from names of arguments to
ranges, and then in `BY_NAME`. A class without an argument of a name may still declare a range for it: `Adam` says which step sizes
suit it, and the range holds for the `LR` that follows in the chain.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class SearchRange(NamedTuple):
    """An interval in which a number is searched for, and the scale on which samples are uniform.

    Attributes:
        low: The smallest value.
        high: The largest value.
        scale: ``"linear"``; ``"log"`` for step sizes, uniform in log x; ``"one_minus"`` for decay rates, uniform in log(1 - x).

    >>> SearchRange(1e-4, 1.0, "log").value_at(0.5), SearchRange(0.9, 0.999, "one_minus").value_at(0.5)
    (0.01, 0.99)
    """

    low: float
    high: float
    scale: str = "linear"

    def value_at(self, fraction: float) -> float:
        """Return the value at a fraction of the way from `low` to `high`, to four digits.

        Args:
            fraction: A number from 0 to 1.
        """
        if self.scale == "log":
            value = float(f"{self.low * (self.high / self.low) ** fraction:.4g}")
        elif self.scale == "one_minus":
            rest = (1 - self.low) * ((1 - self.high) / (1 - self.low)) ** fraction
            value = round(1 - float(f"{rest:.4g}"), 12)
        else:
            value = float(f"{self.low + (self.high - self.low) * fraction:.4g}")
        return min(max(value, self.low), self.high)


def make_range(name: str, low: float, high: float, like: SearchRange | None = None) -> SearchRange:
    """Return a range between two limits, on the scale of another one where that is possible.

    Args:
        name: What error messages call the number.
        low: The smallest value.
        high: The largest value.
        like: A range whose scale is taken over; None, or a scale that the limits do not fit, gives ``"log"`` for positive
            limits a factor of ten or more apart, and otherwise ``"linear"``.

    Raises:
        ValueError: If the limits are not finite, or not in order.

    >>> make_range("lr", 1e-3, 1.0).scale, make_range("x", -1.0, 1.0).scale
    ('log', 'linear')
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"the range of {name!r} is {low} to {high}; give two finite numbers, the lower first")
    scale = "linear" if like is None else like.scale
    if scale == "one_minus" and high < 1:
        return SearchRange(low, high, scale)
    return SearchRange(low, high, "log" if low > 0 and (scale == "log" or high >= 10 * low) else "linear")


_LONG = SearchRange(0.9, 0.9999, "one_minus")

BY_NAME: Mapping[str, SearchRange] = {
    "lr": SearchRange(1e-4, 1.0, "log"),
    "learning_rate": SearchRange(1e-4, 1.0, "log"),
    "momentum": SearchRange(0.5, 0.99, "one_minus"),
    "nesterov_momentum": SearchRange(0.5, 0.99, "one_minus"),
    "beta": SearchRange(0.5, 0.999, "one_minus"),
    "beta1": SearchRange(0.5, 0.99, "one_minus"),
    "beta2": _LONG,
    "beta3": _LONG,
    "shampoo_beta": SearchRange(0.8, 0.999, "one_minus"),
    "smoothing": SearchRange(0.8, 0.999, "one_minus"),
    "weight_decay": SearchRange(1e-5, 0.1, "log"),
    "sigma": SearchRange(0.01, 1.0, "log"),
    "rho": SearchRange(0.01, 0.5, "log"),
    "inertia": SearchRange(0.2, 0.9),
    "cognitive": SearchRange(0.1, 2.0),
    "social": SearchRange(0.1, 2.0),
}
"""The ranges of arguments with these names, where a class declares no others."""


def find_search_ranges(make: Callable[..., Any]) -> dict[str, SearchRange]:
    """Return the ranges of the arguments of a class or a function, by name, in the order of its arguments.

    Arguments whose default switches something off (zero, None), and those that are no numbers, have none, unless the class
    declares it.

    Args:
        make: A class of links or of optimizers, or a function.

    >>> from moduli import m
    >>> find_search_ranges(m.Adam)["beta1"]
    SearchRange(low=0.5, high=0.99, scale='one_minus')
    """
    declared = find_declared_ranges(make)
    ranges = {}
    for name, parameter in inspect.signature(make).parameters.items():
        number = parameter.default
        missing = number is parameter.empty
        is_tunable = missing or (isinstance(number, int | float) and not isinstance(number, bool) and number != 0)
        limits = declared.get(name, BY_NAME.get(name) if is_tunable else None)
        if limits is not None:
            ranges[name] = limits
    return ranges


def find_declared_ranges(make: Any) -> dict[str, SearchRange]:
    """Return what the attributes `search_ranges` of a class and of its bases declare; those of the class itself win.

    Args:
        make: A class; anything else declares nothing.
    """
    kinds = reversed(inspect.getmro(make)) if inspect.isclass(make) else ()
    return {name: limits for kind in kinds for name, limits in vars(kind).get("search_ranges", {}).items()}


UNIT_STEPS = SearchRange(1e-4, 0.1, "log")
"""Step sizes for links whose update has entries of magnitude about one, such as Adam."""
SIGN_STEPS = SearchRange(1e-5, 0.01, "log")
"""Step sizes for links whose update consists of signs, such as Lion."""
OWN_STEPS = SearchRange(0.1, 3.0, "log")
"""Factors for links that find the size of a step themselves, such as Prodigy."""
