"""Groups of the entries of an axis: by coordinate, label, function, mapping or bins.

The group of each entry depends on labels alone, so it is computed once and cached with the axes. Reductions of groups are in
`_groups.py`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ._axes import Axes, DimLike, cache_by_axes
from ._coords import Coordinate
from ._dates import datetime_component, read_component
from ._errors import UnknownLabelError
from ._gather import Gather
from ._groups import GroupPlan, Groups
from ._label_sequences import show_labels
from ._locate import freeze_label
from ._pairing import align_to_fixed
from ._space import Space
from ._tensor import Tensor, method


@method
def groupby(
    t: Tensor,
    dim: DimLike | None = None,
    groups: Any = None,
    /,
    *,
    bins: int | Sequence[Any] | None = None,
    bin_labels: Sequence[Hashable] | None = None,
    right: bool = True,
    **named: Any,
) -> Groups:
    """Group the entries of an axis; results of reductions have one entry per group.

    ``t.groupby("region")`` groups by a coordinate that is no index, ``t.groupby("time.month")`` by a component of dates,
    ``t.groupby(city=countries)`` by a mapping or another rule, ``t.groupby("height", bins=[0, 10, 100])`` by intervals.

    Args:
        t: The tensor.
        dim: The axis, by name or position, if it is not given as a keyword; alone, also the name of a coordinate or of a
            component of dates.
        groups: The group of each label: a mapping from labels (also a Series of pandas or a DataArray with labels), a function
            of a label, a sequence or a tensor with one group per entry, or the name of a coordinate along the axis. Entries
            whose group is NaN are left out.
        bins: The edges of intervals, in ascending order, or a number of intervals of equal width. Entries outside of them
            are left out. Without it, every label or value of the coordinate is a group.
        bin_labels: A label for each interval; by default its two edges as a tuple.
        right: Whether an interval has its upper edge and not its lower one, or the other way round.
        named: Axis name to groups, as one keyword.

    Returns:
        The groups. Those of a coordinate, a component of dates and bins are sorted, others come in the order in which they
        first occur. The axis of a result has the name of the coordinate or component, otherwise that of the axis.

    Raises:
        UnknownLabelError: If the axis or the coordinate does not exist, or a label has no group.
        ValueError: If a sequence has another length than the axis, or edges are not in order.
        TypeError: If there is not exactly one axis.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, 3.0, 10.0], city=["Rome", "Milan", "Paris"])
        >>> t.groupby(city={"Rome": "Italy", "Milan": "Italy", "Paris": "France"}).mean()
        Tensor(city: Italy=2., France=10.)
        >>> mo.tensor([1.0, 2.0, 4.0], height=[5, 9, 40]).groupby("height", bins=[0, 10, 100]).sum()
        Tensor(height: (0, 10)=3., (10, 100)=4.)
    """
    chosen: dict[Any, Any] = {**({} if dim is None else {_refuse_several(dim): groups}), **named}
    if len(chosen) != 1:
        raise TypeError(f"groupby takes one axis and its groups, as in t.groupby(city=countries), got {list(chosen)}")
    ((which, rule),) = chosen.items()
    if rule is None or isinstance(rule, str):
        edges = tuple(bins) if isinstance(bins, Sequence) or hasattr(bins, "__iter__") else bins  # type: ignore[arg-type]
        names = None if bin_labels is None else tuple(bin_labels)
        size = None if rule is None and isinstance(which, str) and which not in t.names else _size(t, which)
        return Groups(t, _plan_named(t._axes, which, rule, size, edges, names, right))
    if bins is not None:
        raise TypeError("groupby takes groups or bins=, not both; bins are intervals of labels or of a coordinate")
    axis = t._axes.axis(which)
    members = _assign_groups(t, axis, rule)
    return Groups(t, _plan_groups(t._axes, axis, tuple(members), False, t._axes.names[axis]))


def _refuse_several(dim: Any) -> Any:
    if isinstance(dim, (list, tuple)):
        raise TypeError(
            f"groupby takes one key, not {dim!r}; by several coordinates group by pairs of their values, as in "
            "t.groupby(city=list(zip(t.coords['country'], t.coords['year'])))"
        )
    return dim


def _size(t: Tensor, which: DimLike) -> int | None:
    """Return the size of a positional axis; that of a labelled one follows from its labels."""
    axis = t._axes.axis(which)
    return t._data.shape[axis] if t._axes.spaces[axis] is None else None


def _assign_groups(t: Tensor, axis: int, groups: Any) -> Sequence[Hashable]:
    axes, size = t._axes, t._data.shape[axis]
    groups = _read_table(groups)
    if isinstance(groups, Mapping) or callable(groups):
        labels = _list_labels(axes, axis, size)
    if isinstance(groups, Mapping):
        missing = [label for label in labels if label not in groups]
        if missing:  # dates may be of another type or unit
            groups = {freeze_label(label): group for label, group in groups.items()}
            missing = [label for label in labels if label not in groups]
        if missing:
            raise UnknownLabelError(f"{axes.describe(axis)} has labels that belong to no group: {show_labels(missing)}")
        return [groups[label] for label in labels]
    if callable(groups):
        return [groups(label) for label in labels]
    if isinstance(groups, Tensor):
        groups = align_to_fixed(axes.take([axis]), groups._axes, groups._data, "a tensor of groups", None)
    members = list(groups.tolist() if hasattr(groups, "tolist") else groups)
    if len(members) != size:
        raise ValueError(f"{axes.describe(axis)} has size {size}, but {len(members)} groups were given")
    return members


def _read_table(groups: Any) -> Any:
    """Return a Series or a DataArray as a mapping from its labels, or as a list if it has none; other values unmodified."""
    if isinstance(groups, (list, tuple, Mapping, Tensor, torch.Tensor)) or callable(groups):
        return groups
    index: Any = getattr(groups, "index", None)
    if getattr(groups, "indexes", None) is not None and groups.ndim == 1:
        index = groups.indexes.get(groups.dims[0], range(groups.size))
    elif not hasattr(index, "to_numpy"):
        return groups
    array = np.asarray(groups)
    values = list(array) if array.dtype.kind in "mM" else array.tolist()
    if isinstance(index, range) or (getattr(index, "start", None), getattr(index, "step", None)) == (0, 1):
        return values
    return dict(zip(map(freeze_label, index), values, strict=True))


@cache_by_axes
def _list_labels(axes: Axes, axis: int, size: int) -> tuple[Hashable, ...]:
    """Return the labels of an axis; the positions of one that has none."""
    space = axes.spaces[axis]
    return tuple(range(size) if space is None else space)


# -- which entry belongs to which group --------------------------------------------------------------------------------


def plan_members(axes: Axes, axis: int, members: Sequence[int], labels: Space, name: str | None) -> GroupPlan:
    """Return the plan of groups whose numbers are known.

    Args:
        axes: The axes of the tensor.
        axis: The axis whose entries are in groups.
        members: The number of the group of each entry, -1 for none.
        labels: The groups; some may be empty.
        name: The name of the axis of results.
    """
    inside = [at for at, member in enumerate(members) if member >= 0]
    positions, entries = None, axes
    if len(inside) != len(members):
        positions = Gather(inside)
        space = axes.spaces[axis]
        name_of_axis = axes.names[axis]
        entries = axes.put(axis, (name_of_axis, None if space is None else space[inside]))
        entries = axes.carry(entries, {} if name_of_axis is None else {name_of_axis: inside})
        members = [members[at] for at in inside]
    result = axes.put(axis, (name, labels))
    coordinates = axes.coordinates
    if coordinates is not None and name in coordinates.entries and name != axes.names[axis]:
        attrs = coordinates.entries[name].attrs  # the unit of a coordinate becomes that of the labels
        own = {} if result.coordinates is None else result.coordinates.entries
        if attrs:
            result = result.mark(coordinates.replace({**own, name: Coordinate((name,), None, attrs)}))
    sizes = np.bincount(np.asarray(members, np.int64), minlength=len(labels))
    return GroupPlan(axis, labels, Gather(members), tuple(sizes.tolist()), positions, entries, result)


@cache_by_axes
def _plan_groups(axes: Axes, axis: int, groups: tuple[Hashable, ...], ordered: bool, name: str | None) -> GroupPlan:
    """Return the plan for the group of each entry; entries whose group is NaN or NaT belong to none."""
    try:
        distinct = dict.fromkeys(group for group in groups if group == group)
    except TypeError as error:
        raise TypeError(f"groups must be hashable, unlike some of {show_labels(groups)}: {error}") from None
    space = Space(_sort(list(distinct)) if ordered else list(distinct))
    return plan_members(axes, axis, space.locate(groups).tolist(), space, name)


def _sort(groups: list[Any]) -> list[Any]:
    try:
        return sorted(groups)
    except TypeError:  # groups of different types stay in the order of their occurrence
        return groups


@cache_by_axes
def _plan_named(
    axes: Axes,
    which: DimLike,
    rule: str | None,
    size: int | None,
    bins: int | tuple[Any, ...] | None,
    bin_labels: tuple[Hashable, ...] | None,
    right: bool,
) -> GroupPlan:
    """Return the plan for groups by a coordinate, a component of dates, or the labels themselves, perhaps in bins."""
    axis, values, name = find_values(axes, which, rule, size)
    if bins is None:
        if bin_labels is not None:
            raise TypeError("bin_labels are of bins=, the edges of intervals")
        return _plan_groups(axes, axis, tuple(values), True, name)
    members, labels = _cut(values, bins, bin_labels, right, axes.describe(axis))
    return plan_members(axes, axis, members, labels, name)


def find_values(
    axes: Axes, which: DimLike, rule: str | None, size: int | None
) -> tuple[int, Sequence[Hashable], str | None]:
    """Return the axis of a coordinate, its value for each entry, and the name of the result's axis.

    Args:
        axes: The axes of the tensor.
        which: An axis, or the name of a coordinate or of a component of dates, such as ``"time.month"``.
        rule: The name of a coordinate or component along the axis; None for its labels.
        size: The size of the axis if it is positional.
    """
    if rule is None and isinstance(which, str) and which not in axes.names:
        return _find_named_values(axes, which)
    axis = axes.axis(which)
    if rule is None:
        return axis, _list_labels(axes, axis, size or 0), axes.names[axis]
    coordinate = axes.find_coordinate(rule)
    if coordinate is not None and coordinate[0] == axis:
        return (*coordinate, rule)
    component = rule.removeprefix(f"{axes.names[axis]}.")
    return axis, _read_component(axes, axis, component, f"{axes.describe(axis)} has no coordinate {rule!r}"), component


def _find_named_values(axes: Axes, which: str) -> tuple[int, Sequence[Hashable], str]:
    """Return the axis, values and name of a coordinate, or of a component of dates such as ``"time.month"``."""
    coordinate = axes.find_coordinate(which)
    if coordinate is not None:
        return (*coordinate, which)
    prefix, _, component = which.rpartition(".")
    if prefix in axes.names:
        return axes.names.index(prefix), _read_component(axes, axes.names.index(prefix), component), component
    coordinate = axes.find_coordinate(prefix)
    dates = None if coordinate is None else np.array(coordinate[1])
    if coordinate is not None and dates is not None and dates.dtype.kind in "mM":
        try:
            return coordinate[0], read_component(dates, component, f"the values of {prefix!r}"), component
        except ValueError as error:
            raise UnknownLabelError(str(error)) from None
    if axes.coordinates is not None and which in axes.coordinates.entries:
        dims = axes.coordinates.entries[which].dims
        raise UnknownLabelError(
            f"the coordinate {which!r} is along {len(dims)} axes, and groups are along one; make one of them first, as in "
            f"t.stack(all={list(dims)}).groupby({which!r})"
        )
    raise UnknownLabelError(f"there is no axis or coordinate named {which!r}; {axes.listing()}{_list(axes)}")


def _read_component(axes: Axes, axis: int, component: str, otherwise: str = "") -> Sequence[Hashable]:
    """Return a component of the dates along an axis, such as the month."""
    space = axes.spaces[axis]
    if space is None or not space.labelled:
        raise UnknownLabelError(f"{otherwise or axes.describe(axis)} is positional, without dates{_list(axes)}")
    try:
        return datetime_component(space, component)
    except (TypeError, ValueError) as error:
        raise UnknownLabelError(f"{otherwise}{': ' if otherwise else ''}{error}{_list(axes)}") from error


def _list(axes: Axes) -> str:
    names = axes.coordinate_names()
    return f"; further coordinates are {', '.join(map(repr, names))}" if names else "; there are no further coordinates"


def _cut(
    values: Sequence[Any], bins: Any, names: tuple[Hashable, ...] | None, right: bool, called: str
) -> tuple[list[int], Space]:
    """Return the interval of each value, -1 for none, and the labels of the intervals."""
    closed = isinstance(bins, int)  # intervals that are made of the values contain the least and the largest
    if isinstance(bins, int):
        bins = _make_edges(values, bins, called)
    if len(bins) < 2 or any(a >= b for a, b in itertools.pairwise(bins)):
        raise ValueError(f"the edges of bins are two or more in ascending order, got {list(bins)}")
    labels = Space(list(itertools.pairwise(bins)) if names is None else names)
    if len(labels) != len(bins) - 1:
        raise ValueError(f"{len(bins)} edges make {len(bins) - 1} intervals, but {len(labels)} labels were given")
    find = bisect.bisect_left if right else bisect.bisect_right

    def locate(value: Any) -> int:
        if value != value:  # NaN and NaT are in no interval
            return -1
        if closed and value == bins[0 if right else -1]:
            return 0 if right else len(labels) - 1
        at = find(bins, value) - 1
        return at if at < len(labels) else -1

    return list(map(locate, values)), labels


def _make_edges(values: Sequence[Any], bins: int, called: str) -> tuple[Any, ...]:
    """Return the edges of intervals of equal width from the least to the largest value."""
    numbers = [value for value in values if value == value]
    if bins < 1 or not numbers:
        raise ValueError(
            f"bins={bins} intervals can't be made of {called}: it takes at least one interval and one label"
        )
    low, high = min(numbers), max(numbers)
    return (*(low + (high - low) * (at / bins) for at in range(bins)), high)
