"""Checks of a setting when a link is constructed: functions of the link's name, the setting's, and its value.

A schedule (a function of the step) is not checked; NaN is rejected by the link itself, for every setting.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

from torch import Tensor

from .._torch import is_batched, is_fake

Check = Callable[[str, str, Any], None]


def _bound(ok: Callable[[float], bool], wanted: str) -> Check:
    """Return a check of a number, or of a tensor of numbers."""

    def check_number(link: str, key: str, value: Any) -> None:
        if isinstance(value, Tensor) and (is_fake(value) or is_batched(value)):
            return
        numbers = value.detach().double().reshape(-1).tolist() if isinstance(value, Tensor) else [value]
        if isinstance(value, bool) or not isinstance(value, Real | Tensor):
            if not callable(value):
                raise TypeError(f"{link}: {key} is {value!r}; give {wanted}")
        elif any(number == number and not ok(number) for number in numbers):
            raise ValueError(f"{link}: {key} is {value!r}; give {wanted}")

    return check_number


fraction = _bound(lambda x: 0 <= x < 1, "a number from 0 (included) to 1 (excluded)")
probability = _bound(lambda x: 0 <= x <= 1, "a number from 0 to 1")
non_negative = _bound(lambda x: x >= 0, "a number that is not negative")
step_size = _bound(
    lambda x: x >= 0,
    "a number that is not negative; to ascend, make the optimizer with maximize=True, or multiply by m.Mul(-1)",
)
positive = _bound(lambda x: x > 0, "a number above zero")
above_one = _bound(lambda x: x > 1, "a number above 1")


def at_least_one(link: str, key: str, value: Any) -> None:
    """Raise ValueError unless a value is a whole number from one.

    Args:
        link: The name of the link.
        key: The name of the setting.
        value: Its value.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{link}: {key} is {value!r}; give a whole number, at least 1")


def once(check: Check) -> Check:
    """Return a check that also rejects functions of the step: for settings that a link reads only once, at its start."""

    def check_fixed(link: str, key: str, value: Any) -> None:
        if callable(value):
            raise TypeError(f"{link}: {key} is {value!r}; give a number")
        check(link, key, value)

    return check_fixed


def allow(check: Check, *values: Any) -> Check:
    """Return a check that also accepts these values."""

    def check_others(link: str, key: str, value: Any) -> None:
        if not any(value is other or value == other for other in values):
            check(link, key, value)

    return check_others


def one_of(*allowed: Any) -> Check:
    """Return a check that accepts only these values."""

    def check_choice(link: str, key: str, value: Any) -> None:
        if value not in allowed:
            names = ", ".join(map(repr, allowed[:-1]))
            raise ValueError(f"{link}: {key} is {value!r}; it can be {names} or {allowed[-1]!r}")

    return check_choice
