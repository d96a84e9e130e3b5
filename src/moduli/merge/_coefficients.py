"""Coefficients: one number for every name, or numbers by glob pattern."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase, translate
from functools import cache
from math import isfinite
from numbers import Real
from typing import Any, TypeAlias

from ._errors import MergeError

Coefficient: TypeAlias = float | Mapping[str, float] | Callable[[str], float]
"""A number; a mapping from glob patterns of parameter names to numbers, of which the first that matches wins; or a function
from a name to its number.

In a pattern `<0-15>` stands for a whole number from 0 to 15: ``{"*.layers.<0-15>.*": 0.3, "*": 0.7}``.
"""


class Coefficients:
    """A coefficient that was checked, and is looked up by name.

    Args:
        value: A number, a mapping from glob pattern to number, or a function from a name to a number.
        what: What errors call it, such as `"t"` or `"weights[1]"`.
        low: The least number allowed.
        high: The greatest number allowed.

    Raises:
        MergeError: If a number is not finite or is out of bounds, or the mapping is empty.
        TypeError: If the value is none of them.
    """

    __slots__ = ("_bounds", "_patterns", "_what")

    def __init__(
        self, value: Coefficient, what: str, *, low: float = float("-inf"), high: float = float("inf")
    ) -> None:
        self._what, self._bounds = what, (low, high)
        self._patterns: list[tuple[str, float]] | Callable[[str], float]
        if callable(value):
            self._patterns = value
            return
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else [("*", value)]
        self._patterns = [
            (
                pattern,
                self._check_number(number, f"{what}[{pattern!r}]" if isinstance(value, Mapping) else what, pattern),
            )
            for pattern, number in items
        ]
        if not self._patterns:
            raise MergeError(f"{what} is an empty mapping; give a number, or at least {{'*': number}}")

    def _check_number(self, number: Any, where: str, pattern: Any = "") -> float:
        if not isinstance(pattern, str) or not isinstance(number, Real):
            raise TypeError(
                f"{where} is {type(number).__name__}; it must be a number, or a mapping from glob patterns of "
                "parameter names to numbers"
            )
        found, (low, high) = float(number), self._bounds
        if not isfinite(found) or not low <= found <= high:
            bounds = f"at least {low:g}" * isfinite(low) + f" and at most {high:g}" * isfinite(high)
            raise MergeError(f"{where} is {found}; it must be {bounds or 'finite'}")
        return found

    def __call__(self, name: str) -> float:
        """The number for a name.

        Raises:
            MergeError: If no pattern matches the name.
        """
        if callable(self._patterns):
            return self._check_number(self._patterns(name), f"{self._what} of {name!r}")
        for pattern, number in self._patterns:
            if _matches(name, pattern):
                return number
        raise MergeError(
            f"{self._what} has no number for {name!r}: none of its patterns "
            f"{', '.join(repr(pattern) for pattern, _ in self._patterns)} matches; "
            "add one that does, such as '*' at the end"
        )

    @property
    def number(self) -> float:
        """The number, where there is one for all names.

        Raises:
            MergeError: If there are numbers by name.
        """
        if callable(self._patterns) or [pattern for pattern, _ in self._patterns] != ["*"]:
            raise MergeError(f"{self._what} has numbers by name, but is used for whole models here; give one number")
        return self._patterns[0][1]

    def check(self, names: Sequence[str]) -> None:
        """Refuse names that no pattern matches, and patterns that match no name: one misspelt would go unnoticed.

        Raises:
            MergeError: If there is either.
        """
        for name in names:
            self(name)
        for pattern, _ in () if callable(self._patterns) else self._patterns:
            if pattern != "*" and not any(_matches(name, pattern) for name in names):
                shown = ", ".join(map(repr, names[:4])) + (", ..." if len(names) > 4 else "")
                raise MergeError(
                    f"the pattern {pattern!r} of {self._what} matches none of the {len(names)} names that are merged "
                    f"({shown}); correct or remove it"
                )


def layered(text: str) -> dict[str, float]:
    """Numbers by layer, as they are written in one line: ``layers.0-15:0.3,layers.16-31:0.7,*:0.5``.

    A part of a name stands for all names that contain it; a number at its end is one layer, and two are a range of layers.

    Raises:
        MergeError: If it is written otherwise.

    Example:
        >>> layered("layers.0-15:0.3, lm_head:0, *:1")
        {'*layers.<0-15>.*': 0.3, '*lm_head*': 0.0, '*': 1.0}
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        place, colon, number = part.strip().rpartition(":")
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        if not colon or not place or value != value:
            raise MergeError(
                f"{part.strip()!r} is no number for a layer; write it as layers.0-15:0.3, or *:0.5 for all others"
            )
        layers = re.fullmatch(r"(.*\.)([0-9]+)(?:-([0-9]+))?", place)
        if layers is not None:
            place = f"*{layers[1]}<{layers[2]}-{layers[3] or layers[2]}>.*"
        elif "*" not in place:
            place = f"*{place}*"
        found[place] = value
    return found


def _matches(name: str, pattern: str) -> bool:
    """Whether a glob pattern matches a name; in it, `<0-15>` stands for a whole number from 0 to 15."""
    if "<" not in pattern:
        return fnmatchcase(name, pattern)
    compiled, ranges = _compile_pattern(pattern)
    found = compiled.match(name)
    return found is not None and all(
        low <= int(number) <= high for number, (low, high) in zip(found.groups(), ranges, strict=True)
    )


@cache
def _compile_pattern(pattern: str) -> tuple[re.Pattern[str], list[tuple[int, int]]]:
    pieces = re.split(r"<([0-9]+)-([0-9]+)>", pattern)
    texts, ranges = pieces[0::3], list(zip(map(int, pieces[1::3]), map(int, pieces[2::3]), strict=True))
    # A number is whole: no digit stands before or after it.
    parts = [translate(text).removeprefix("(?s:").removesuffix(")\\Z").removesuffix(")\\z") for text in texts]
    return re.compile("(?s:" + r"(?<![0-9])([0-9]+)(?![0-9])".join(parts) + r")\Z"), ranges


def per_model(
    value: Coefficient | Sequence[Coefficient] | None, count: int, what: str, **bounds: float
) -> tuple[Coefficients, ...]:
    """Check one coefficient for each model: a sequence gives each its own, anything else is the same for all; None is 1.

    Raises:
        MergeError: If a sequence does not have one coefficient per model.
    """
    if value is None:
        value = 1.0
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        return (Coefficients(value, what, **bounds),) * count
    if len(value) != count:
        raise MergeError(f"{what} has {len(value)} entries for {count} models; give one per model")
    return tuple(Coefficients(each, f"{what}[{index}]", **bounds) for index, each in enumerate(value))
