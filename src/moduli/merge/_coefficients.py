"""Coefficients: one number for every name, or numbers by glob pattern."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isfinite
from numbers import Real
from typing import Any, TypeAlias, TypeVar

from .._texts import shorten
from ..layout import match_name, suggest_name
from ._models import MergeError

Coefficient: TypeAlias = float | Mapping[str, float] | Callable[[str], float]
"""A number; a mapping from glob patterns of parameter names to numbers, of which the first that matches wins; or a function
from a name to its number.

In a pattern, `<0-15>` matches a whole number from 0 to 15: ``{"*.layers.<0-15>.*": 0.3, "*": 0.7}``.
"""

T = TypeVar("T")


class Coefficients:
    """A checked coefficient, looked up by name.

    Args:
        value: A number, a mapping from glob pattern to number, or a function from a name to a number.
        what: Its name in errors, such as `"t"` or `"weights[1]"`.
        low: The lower bound.
        high: The upper bound.

    Raises:
        MergeError: If a number is not finite or is out of bounds, or the mapping is empty.
        TypeError: If the value is none of these.
    """

    def __init__(self, value: Coefficient, what: str, *, low: float = -inf, high: float = inf) -> None:
        self._what, self._bounds = what, (low, high)
        self._function = value if callable(value) else None
        self._patterns: dict[str, float] = {}
        if isinstance(value, Mapping):
            self._patterns = {key: self._check(each, f"{what}[{shorten(key)}]", key) for key, each in value.items()}
            if not value:
                raise MergeError(f"{what} is an empty mapping; give a number, or at least {{'*': number}}")
        elif not callable(value):
            self._patterns = {"*": self._check(value, what)}
        #: Whether there is one number for all names.
        self.is_number = self._patterns.keys() == {"*"}

    def _check(self, number: Any, where: str, pattern: Any = "") -> float:
        if not isinstance(pattern, str) or not isinstance(number, Real):
            allowed = "it must be a number, or a mapping from glob patterns of parameter names to numbers"
            raise TypeError(f"{where} is {type(number).__name__}; {allowed}")
        low, high = self._bounds
        try:
            value = float(number)
        except OverflowError:  # an integer of more than 308 digits
            value = inf
        if not isfinite(value) or not low <= value <= high:
            bounds = f"at least {low:g}" * isfinite(low) + f" and at most {high:g}" * isfinite(high)
            raise MergeError(f"{where} is {value}; it must be {bounds or 'finite'}")
        return value

    def __call__(self, name: str) -> float:
        """Return the number for a name.

        Raises:
            MergeError: If no pattern matches the name.
        """
        if self.is_number:
            return self._patterns["*"]
        if self._function is not None:
            return self._check(self._function(name), f"{self._what} of {shorten(name)}")
        value = find_by_pattern(self._patterns, name)
        if value is None:
            patterns = shorten(list(self._patterns)).strip("[]")
            reason = f"none of its patterns {patterns} matches; add one that does, such as '*' at the end"
            raise MergeError(f"{self._what} has no number for {shorten(name)}: {reason}")
        return value

    @property
    def number(self) -> float:
        """The number of a coefficient that is the same for all names.

        Raises:
            MergeError: If there are numbers by name.
        """
        if list(self._patterns) != ["*"]:
            raise MergeError(f"{self._what} has numbers by name, but is used for whole models here; give one number")
        return self._patterns["*"]

    def check(self, names: Sequence[str]) -> None:
        """Raise if a name matches no pattern, or a pattern matches no name.

        Raises:
            MergeError: In both cases.
        """
        for name in names:
            self(name)
        check_patterns(self._patterns, names, self._what)


def layered(text: str) -> dict[str, float]:
    """Parse numbers by layer, written as ``layers.0-15:0.3,layers.16-31:0.7,*:0.5``, into numbers by pattern.

    A part of a name matches all names that contain it; a number at its end is one layer, and two are a range of layers.

    Raises:
        MergeError: If the text has another form.

    Example:
        >>> layered("layers.0-15:0.3, lm_head:0, *:1")
        {'*layers.<0-15>.*': 0.3, '*lm_head*': 0.0, '*': 1.0}
    """
    numbers: dict[str, float] = {}
    for part in text.split(","):
        place, colon, number = part.strip().rpartition(":")
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        if not colon or not place or value != value:
            raise MergeError(
                f"{shorten(part.strip())} is no number for a layer; write layers.0-15:0.3, or *:0.5 for all others"
            )
        layers = re.fullmatch(r"(.*\.)([0-9]+)(?:-([0-9]+))?", place)
        if layers is not None:
            place = f"*{layers[1]}<{layers[2]}-{layers[3] or layers[2]}>.*"
        elif "*" not in place:
            place = f"*{place}*"
        numbers[place] = value
    return numbers


def find_by_pattern(table: Mapping[str, T], name: str) -> T | None:
    """Return the value of the first pattern that matches a name; None if there is none."""
    return next((value for pattern, value in table.items() if match_name(name, pattern)), None)


def check_patterns(table: Iterable[str], names: Sequence[str], what: str) -> None:
    """Raise if a pattern matches no name, because it is probably misspelt.

    Args:
        table: The patterns.
        names: The names.
        what: The argument with the patterns, for errors.

    Raises:
        MergeError: If there is one.
    """
    for pattern in table:
        if pattern != "*" and not any(match_name(name, pattern) for name in names):
            listed = ", ".join(map(repr, names[:4])) + (", ..." if len(names) > 4 else "")
            hint = suggest_name(pattern, names)
            reason = f"matches none of the {len(names)} names that are merged ({listed});{hint} correct or remove it"
            raise MergeError(f"the pattern {shorten(pattern)} of {what} {reason}")


def per_model(
    value: Coefficient | Sequence[Coefficient] | None, count: int, what: str, **bounds: float
) -> tuple[Coefficients, ...]:
    """Return one checked coefficient per model.

    Args:
        value: A sequence with one coefficient per model, or one coefficient for all; None for 1.
        count: The number of models.
        what: The argument, for errors.
        **bounds: The bounds of numbers, as for `Coefficients`.

    Raises:
        MergeError: If a sequence does not have one coefficient per model.
    """
    value = 1.0 if value is None else value
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        return (Coefficients(value, what, **bounds),) * count
    if len(value) != count:
        raise MergeError(f"{what} has {len(value)} entries for {count} models; give one per model")
    return tuple(Coefficients(each, f"{what}[{index}]", **bounds) for index, each in enumerate(value))
