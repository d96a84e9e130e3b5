"""A link's settings when it is made: collected from its arguments, and their ranges checked.

A schedule (a function of the step) is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Ranges = Mapping[Callable[..., None], tuple[str, ...]]
"""The arguments of a link that a check is for, by check."""


def collect_settings(arguments: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """The arguments of a constructor by name, but for `others`, which are no settings.

    Args:
        arguments: The constructor's `locals()`, before it has variables of its own.
        *others: Names to leave out.
    """
    return {key: value for key, value in arguments.items() if key not in ("self", "__class__", *others)}


def check_settings(link: Any, arguments: Mapping[str, Any], *others: str) -> dict[str, Any]:
    """`collect_settings`, after the checks in the link's table `ranges`."""
    for check, keys in link.ranges.items():
        check(type(link).__name__, **{key: arguments[key] for key in keys})
    return collect_settings(arguments, *others)


def _read_numbers(value: Any) -> list[float] | None:
    """The numbers in a setting, or None where it is a function of the step."""
    if isinstance(value, Tensor):
        found: list[float] = value.detach().double().reshape(-1).tolist()
        return found
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return [float(value)]


def _check(link: str, key: str, value: Any, ok: Any, wanted: str) -> None:
    numbers = _read_numbers(value)
    if numbers is None:
        if callable(value):
            return
        raise TypeError(f"{link}: {key} is {value!r}; give {wanted}")
    # A NaN is refused by the link itself, for every setting.
    if any(number == number and not ok(number) for number in numbers):
        raise ValueError(f"{link}: {key} is {value!r}; give {wanted}")


def fraction(link: str, **settings: Any) -> None:
    """Numbers in [0, 1): memories of running means."""
    for key, value in settings.items():
        _check(link, key, value, lambda x: 0 <= x < 1, "a number from 0 (included) to 1 (excluded)")


def probability(link: str, **settings: Any) -> None:
    """Numbers in [0, 1]."""
    for key, value in settings.items():
        _check(link, key, value, lambda x: 0 <= x <= 1, "a number from 0 to 1")


def non_negative(link: str, **settings: Any) -> None:
    """Numbers that are not negative."""
    for key, value in settings.items():
        _check(link, key, value, lambda x: x >= 0, "a number that is not negative")


def positive(link: str, **settings: Any) -> None:
    """Numbers above zero."""
    for key, value in settings.items():
        _check(link, key, value, lambda x: x > 0, "a number above zero")


def above_one(link: str, **settings: Any) -> None:
    """Numbers above one, of which there is one for all steps."""
    for key, value in settings.items():
        if not value > 1:
            raise ValueError(f"{link}: {key} is {value!r}; give a number above 1")


def check_at_least_one(link: str, **settings: Any) -> None:
    """Whole numbers from one."""
    for key, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{link}: {key} is {value!r}; give a whole number, at least 1")


def allow_none(check: Callable[..., None]) -> Callable[..., None]:
    """A check that lets None pass."""

    def check_given(link: str, **settings: Any) -> None:
        check(link, **{key: value for key, value in settings.items() if value is not None})

    return check_given


def choice(link: str, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """One of a few values."""
    if value not in allowed:
        names = ", ".join(map(repr, allowed[:-1]))
        raise ValueError(f"{link}: {key} is {value!r}; it can be {names} or {allowed[-1]!r}")
