"""Checks of settings when a link is made. A schedule (a function of the step) is not checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


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
    """Refuse settings that are not above one."""
    for key, value in settings.items():
        _check(link, key, value, lambda x: x > 1, "a number above 1")


def at_least_one(link: str, **settings: Any) -> None:
    """Whole numbers from one."""
    for key, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{link}: {key} is {value!r}; give a whole number, at least 1")


def once(check: Callable[..., None]) -> Callable[..., None]:
    """A check that refuses functions of the step: for what a link reads when it begins, and never again."""

    def check_fixed(link: str, **settings: Any) -> None:
        for key, value in settings.items():
            if callable(value):
                raise TypeError(f"{link}: {key} is {value!r}; give a number")
        check(link, **settings)

    return check_fixed


def allow(check: Callable[..., None], *values: Any) -> Callable[..., None]:
    """A check that lets these values pass, too."""

    def check_others(link: str, **settings: Any) -> None:
        check(
            link, **{key: value for key, value in settings.items() if not any(value is v or value == v for v in values)}
        )

    return check_others


def one_of(*allowed: Any) -> Callable[..., None]:
    """A check that lets only these values pass."""

    def check_choices(link: str, **settings: Any) -> None:
        for key, value in settings.items():
            choice(link, key, value, allowed)

    return check_choices


def choice(link: str, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """One of a few values."""
    if value not in allowed:
        names = ", ".join(map(repr, allowed[:-1]))
        raise ValueError(f"{link}: {key} is {value!r}; it can be {names} or {allowed[-1]!r}")
