"""Further coordinates: values along axes beside their labels, as the region of each station.

They hang on the Axes of a tensor and follow it: what selects entries selects their values, what drops an axis drops its
coordinates, and operands keep those on which they agree. They never pair anything; labels do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

Array = np.ndarray[Any, Any]


class Coordinate(NamedTuple):
    """Values along axes, or what is known of the labels of one axis."""

    dims: tuple[str, ...]
    """The names of the axes."""
    values: Array | None
    """One value per entry; None where the labels of the axis are the values."""
    attrs: Mapping[Hashable, Any]
    """What else is known, as the unit."""


@final
class AxisCoordinates:
    """The further coordinates of one tensor. Immutable; equal if everything in them is."""

    __slots__ = ("entries", "origin")

    def __init__(self, entries: Mapping[str, Coordinate], origin: Hashable = None) -> None:
        self.entries: Final = dict(entries)
        self.origin: Final = origin
        """What another library said of a tensor with exactly these axes; operations that change them lose it."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AxisCoordinates):
            return NotImplemented
        return (
            self.entries.keys() == other.entries.keys()
            and self.origin == other.origin
            and all(_agree(entry, other.entries[name]) for name, entry in self.entries.items())
        )

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.entries)))

    def __reduce__(self) -> tuple[type[AxisCoordinates], tuple[Any, ...]]:
        return AxisCoordinates, (self.entries, self.origin)

    def find(self, name: str) -> tuple[str, Sequence[Hashable]] | None:
        """Return the axis and the values of a coordinate along one axis, or None."""
        entry = self.entries.get(name)
        if entry is None or entry.values is None or len(entry.dims) != 1:
            return None
        # NumPy's dates as a list would be integers or Python's; their own scalars make labels.
        return entry.dims[0], list(entry.values) if entry.values.dtype.kind in "mM" else entry.values.tolist()

    def keep(self, names: Iterable[str | None]) -> AxisCoordinates | None:
        """Return the coordinates along some of the axes, None if there are none."""
        known = set(names)
        return _make({name: entry for name, entry in self.entries.items() if known.issuperset(entry.dims)})

    def pick(self, positions: Mapping[str, slice | Sequence[int]]) -> AxisCoordinates | None:
        """Return the coordinates of selected entries of axes."""
        return _make({name: _pick(entry, positions) for name, entry in self.entries.items()})


def merge(several: Sequence[AxisCoordinates]) -> AxisCoordinates | None:
    """Return the coordinates of operands, without those that they disagree on."""
    entries: dict[str, Coordinate] = {}
    conflicts: set[str] = set()
    for name, entry in (item for each in several for item in each.entries.items()):
        if not _agree(entries.setdefault(name, entry), entry):
            conflicts.add(name)
    origins = [each.origin for each in several if each.origin is not None]
    origin = origins[0] if origins and not conflicts and all(each == origins[0] for each in origins) else None
    return _make({name: entry for name, entry in entries.items() if name not in conflicts}, origin)


def _make(entries: Mapping[str, Coordinate], origin: Hashable = None) -> AxisCoordinates | None:
    return AxisCoordinates(entries, origin) if entries or origin is not None else None


def _pick(entry: Coordinate, positions: Mapping[str, slice | Sequence[int]]) -> Coordinate:
    values = entry.values
    if values is None or positions.keys().isdisjoint(entry.dims):
        return entry
    for axis, name in enumerate(entry.dims):
        if name in positions:
            chosen = positions[name]
            values = values[(slice(None),) * axis + (chosen if isinstance(chosen, slice) else np.asarray(chosen, int),)]
    return entry._replace(values=values)


def _agree(first: Coordinate, second: Coordinate) -> bool:
    if first is second:
        return True
    return first.dims == second.dims and _equal(first.values, second.values) and _equal(first.attrs, second.attrs)


def _equal(first: Any, second: Any) -> bool:
    """Whether values or attributes are the same; NaN is equal to NaN."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_equal(value, second[key]) for key, value in first.items())
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        same = first == second
        return bool(np.all(same | ((first != first) & (second != second))))
    return type(first) is type(second) and bool(np.all(first == second))
