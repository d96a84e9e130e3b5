"""Coefficients: one number for every name, or numbers by glob pattern."""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import isfinite
from numbers import Real
from typing import Any, TypeAlias

from ._errors import MergeError

__all__ = ["Coefficient", "Coefficients", "per_model"]

Coefficient: TypeAlias = float | Mapping[str, float]
"""A number, or a mapping from glob patterns of parameter names to numbers; the first pattern that matches wins."""


class Coefficients:
    """A coefficient that was checked, and is looked up by name.

    Args:
        value: A number, or a mapping from glob pattern to number.
        what: What errors call it, such as `"t"` or `"weights[1]"`.
        low: The least number allowed.
        high: The greatest number allowed.

    Raises:
        MergeError: If a number is not finite or is out of bounds, or the mapping is empty.
        TypeError: If the value is neither a number nor such a mapping.
    """

    __slots__ = ("_patterns", "_what")

    def __init__(
        self, value: Coefficient, what: str, *, low: float = float("-inf"), high: float = float("inf")
    ) -> None:
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else [("*", value)]
        self._what = what
        self._patterns: list[tuple[str, float]] = []
        for pattern, number in items:
            where = f"{what}[{pattern!r}]" if isinstance(value, Mapping) else what
            if not isinstance(pattern, str) or not isinstance(number, Real):
                raise TypeError(
                    f"{where} is {type(number).__name__}; it must be a number, or a mapping from glob patterns of "
                    "parameter names to numbers"
                )
            number = float(number)
            if not isfinite(number) or not low <= number <= high:
                bounds = f"at least {low:g}" * isfinite(low) + f" and at most {high:g}" * isfinite(high)
                raise MergeError(f"{where} is {number}; it must be {bounds or 'finite'}")
            self._patterns.append((pattern, number))
        if not self._patterns:
            raise MergeError(f"{what} is an empty mapping; give a number, or at least {{'*': number}}")

    def __call__(self, name: str) -> float:
        """The number for a name.

        Raises:
            MergeError: If no pattern matches the name.
        """
        for pattern, number in self._patterns:
            if fnmatchcase(name, pattern):
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
            MergeError: If there are numbers by pattern.
        """
        if [pattern for pattern, _ in self._patterns] != ["*"]:
            raise MergeError(f"{self._what} is a mapping, but is used for whole models here; give one number")
        return self._patterns[0][1]

    def check(self, names: Sequence[str]) -> None:
        """Refuse names that no pattern matches, and patterns that match no name: one misspelt would go unnoticed.

        Raises:
            MergeError: If there is either.
        """
        for name in names:
            self(name)
        for pattern, _ in self._patterns:
            if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                shown = ", ".join(map(repr, names[:4])) + (", ..." if len(names) > 4 else "")
                raise MergeError(
                    f"the pattern {pattern!r} of {self._what} matches none of the {len(names)} names that are merged "
                    f"({shown}); correct or remove it"
                )


def per_model(
    value: Coefficient | Sequence[Coefficient], count: int, what: str, **bounds: float
) -> tuple[Coefficients, ...]:
    """Check one coefficient for each model: a sequence gives each its own, anything else is the same for all.

    Raises:
        MergeError: If a sequence does not have one coefficient per model.
    """
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        return (Coefficients(value, what, **bounds),) * count
    if len(value) != count:
        raise MergeError(f"{what} has {len(value)} entries for {count} models; give one per model")
    return tuple(Coefficients(each, f"{what}[{index}]", **bounds) for index, each in enumerate(value))
