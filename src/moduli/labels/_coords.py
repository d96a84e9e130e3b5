"""Further coordinates: values along axes beside their labels, such as the region of each station; names and attributes.

They are stored with the Axes of a tensor. Selecting entries selects their values, dropping an axis drops its coordinates, and a
result has the coordinates on which its operands agree. Only labels pair axes, coordinates never do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

Array = np.ndarray[Any, Any]


class Coordinate(NamedTuple):
    """Values along axes, or the attributes of the labels of one axis."""

    dims: tuple[str, ...]
    """The names of the axes."""
    values: Array | None
    """One value per entry; None where the labels of the axis are the values."""
    attrs: Mapping[Hashable, Any]
    """Attributes, such as the unit."""


class About(NamedTuple):
    """The name and attributes of a tensor."""

    name: Hashable = None
    attrs: Mapping[Hashable, Any] = {}
    """Attributes, such as the unit."""
    dataset: Mapping[Hashable, Any] | None = None
    """The attributes of the dataset that the tensor came from."""


@final
class AxisCoordinates:
    """The further coordinates of one tensor, its name and its attributes. Immutable; equal if everything in them is."""

    __slots__ = ("about", "entries", "origin")

    def __init__(self, entries: Mapping[str, Coordinate], about: About | None = None, origin: Hashable = None) -> None:
        self.entries: Final = dict(entries)
        self.about: Final = about
        self.origin: Final = origin
        """The equivalent coordinates of another library; operations that change axes drop it."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AxisCoordinates):
            return NotImplemented
        return (
            self.entries.keys() == other.entries.keys()
            and self.origin == other.origin
            and _equal(self.about, other.about)
            and all(_equal(entry, other.entries[name]) for name, entry in self.entries.items())
        )

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.entries)))

    def __reduce__(self) -> tuple[type[AxisCoordinates], tuple[Any, ...]]:
        return AxisCoordinates, (self.entries, self.about, self.origin)

    def find(self, name: str) -> tuple[str, Sequence[Hashable]] | None:
        """Return the axis and the values of a coordinate along one axis, or None."""
        entry = self.entries.get(name)
        if entry is None or entry.values is None or len(entry.dims) != 1:
            return None
        # `tolist` would convert NumPy's dates to integers or Python's dates; labels are NumPy's scalars.
        return entry.dims[0], list(entry.values) if entry.values.dtype.kind in "mM" else entry.values.tolist()

    def keep(self, names: Iterable[str | None], changed: Iterable[str | None] = ()) -> AxisCoordinates | None:
        """Return the coordinates of a tensor that has some of the axes, None if there are none.

        Args:
            names: The names of the axes.
            changed: The axes whose entries differ: values along them are dropped, attributes of their labels are not.
        """
        own, others = set(names), set(changed)
        entries = {
            name: entry
            for name, entry in self.entries.items()
            if own.issuperset(entry.dims) and (entry.values is None or others.isdisjoint(entry.dims))
        }
        return _make(entries, self.about)

    def pick(self, positions: Mapping[str, slice | Sequence[int]]) -> AxisCoordinates | None:
        """Return the coordinates of selected entries of axes."""
        return _make({name: _pick(entry, positions) for name, entry in self.entries.items()}, self.about)

    def rename(self, names: Mapping[str, str | None]) -> AxisCoordinates | None:
        """Return the coordinates with other names of axes and coordinates, without those along an unnamed axis."""
        entries = {}
        for name, entry in self.entries.items():
            own, dims = names.get(name, name), tuple(names.get(dim, dim) for dim in entry.dims)
            if own is not None and None not in dims:
                entries[own] = entry._replace(dims=dims)  # type: ignore[arg-type]
        return _make(entries, self.about)

    def replace(self, entries: Mapping[str, Coordinate]) -> AxisCoordinates:
        """Return other coordinates with the same name and attributes of the tensor."""
        return AxisCoordinates(entries, self.about)


def merge(several: Sequence[AxisCoordinates]) -> AxisCoordinates | None:
    """Return the coordinates of operands, without those that they disagree on."""
    entries, complete = _agree_on([each.entries for each in several])
    descriptions = [each.about for each in several if each.about is not None]
    about = None
    if descriptions:
        first = descriptions[0]
        name = first.name if all(each.name == first.name for each in descriptions) else None
        dataset = first.dataset if all(_equal(each.dataset, first.dataset) for each in descriptions) else None
        about = About(name, _agree_on([each.attrs for each in descriptions])[0], dataset)
    origins = [each.origin for each in several if each.origin is not None]
    origin = origins[0] if origins and complete and all(each == origins[0] for each in origins) else None
    return _make(entries, about, origin)


def _agree_on(several: Sequence[Mapping[Any, Any]]) -> tuple[dict[Any, Any], bool]:
    """Return the entries of mappings without those that differ, and whether none do."""
    entries: dict[Any, Any] = {}
    conflicts: set[Any] = set()
    for name, entry in (item for each in several for item in each.items()):
        if not _equal(entries.setdefault(name, entry), entry):
            conflicts.add(name)
    return {name: entry for name, entry in entries.items() if name not in conflicts}, not conflicts


def concatenate(several: Sequence[AxisCoordinates | None], dim: str) -> dict[str, Coordinate]:
    """Return the coordinates along an axis of tensors that are concatenated along it: those that all of them have."""
    entries = [{} if each is None else each.entries for each in several]
    joined = {}
    for name, entry in entries[0].items():
        parts = [each[name] for each in entries if name in each and each[name].dims == entry.dims]
        values = [part.values for part in parts if part.values is not None]
        if dim in entry.dims and len(values) == len(several):
            joined[name] = entry._replace(values=np.concatenate(values, entry.dims.index(dim)))
    return joined


def stack_dims(entry: Coordinate, group: Mapping[str, int], name: str) -> Coordinate:
    """Return a coordinate along an axis that is flattened from several.

    Args:
        entry: The coordinate.
        group: The size of each flattened axis, in the order of flattening.
        name: The name of the new axis.
    """
    if entry.values is None or group.keys().isdisjoint(entry.dims):
        return entry
    rest = [dim for dim in entry.dims if dim not in group]
    order = [entry.dims.index(dim) for dim in (*group, *rest) if dim in entry.dims]
    sizes = [size if dim in entry.dims else 1 for dim, size in group.items()]
    values = entry.values.transpose(order)
    left = values.shape[len(order) - len(rest) :]
    whole = np.broadcast_to(values.reshape(*sizes, *left), (*group.values(), *left))
    return entry._replace(dims=(name, *rest), values=whole.reshape(-1, *left))


def _make(
    entries: Mapping[str, Coordinate], about: About | None = None, origin: Hashable = None
) -> AxisCoordinates | None:
    empty = not entries and about is None and origin is None
    return None if empty else AxisCoordinates(entries, about, origin)


def _pick(entry: Coordinate, positions: Mapping[str, slice | Sequence[int]]) -> Coordinate:
    values = entry.values
    if values is None or positions.keys().isdisjoint(entry.dims):
        return entry
    for axis, name in enumerate(entry.dims):
        if name in positions:
            chosen = positions[name]
            values = values[(slice(None),) * axis + (chosen if isinstance(chosen, slice) else np.asarray(chosen, int),)]
    return entry._replace(values=values)


def _equal(first: Any, second: Any) -> bool:
    """Whether values, attributes or tuples of them are the same; NaN is equal to NaN."""
    if first is second:
        return True
    if isinstance(first, (Coordinate, About)) and type(first) is type(second):
        return all(map(_equal, first, second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_equal(value, second[key]) for key, value in first.items())
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        same = first == second
        return bool(np.all(same | ((first != first) & (second != second))))
    return type(first) is type(second) and bool(np.all(first == second))
