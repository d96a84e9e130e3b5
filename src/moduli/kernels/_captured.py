"""Numbers that a function takes from around it: part of what was traced, so a change must be noticed."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

__all__ = ["captured"]

_NUMBERS = (bool, int, float, str, type(None))


def captured(fn: Callable[..., Any]) -> Callable[[], tuple[Any, ...]]:
    """A function that gives the numbers which `fn` reads from its closure and its module now."""
    if not isinstance(fn, FunctionType):
        return tuple
    names = [name for name in fn.__code__.co_names if name in fn.__globals__]
    cells = fn.__closure__ or ()
    space = fn.__globals__
    if not names and not cells:
        return tuple

    def now() -> tuple[Any, ...]:
        found: list[Any] = []
        for cell in cells:
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                value = None
            found.append(value if isinstance(value, _NUMBERS) else None)
        for name in names:
            value = space.get(name)
            found.append(value if isinstance(value, _NUMBERS) else None)
        return tuple(found)

    return now
