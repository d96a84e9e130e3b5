"""Reindexing to other labels, alignment of tensors, and several axes as one: reindex, align, stack, unstack."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ._axes import Axes, DimLike, DimsLike, as_key, as_pair, cache_by_axes, split_names
from ._concat import flatten
from ._coords import AxisCoordinates, Coordinate, stack_dims
from ._gather import Gather, gather
from ._locate import convert_labels, find_neighbours, freeze_label, freeze_labels, require_labels
from ._pairing import describe_difference
from ._shape import relabel
from ._space import Space
from ._tensor import Tensor, finish, method
from ._windows import choose_fill


@method
def reindex(
    t: Tensor,
    labels: Mapping[Any, Any] | None = None,
    /,
    method: str | None = None,
    tolerance: Any = None,
    fill: complex | None = None,
    **named: Any,
) -> Tensor:
    """Give axes other labels: entries are taken by label, and those that are missing are filled.

    Args:
        t: The tensor.
        labels: Axis (name or position) to labels, as a mapping.
        method: What to take for a label that the axis does not have: its neighbour below (``"pad"``), above
            (``"backfill"``) or the nearer one (``"nearest"``). None fills it.
        tolerance: How far that neighbour may be.
        fill: The value of missing entries; NaN by default, which integers and booleans do not have.
        named: Axis name to labels: a list, an array or a Space.

    Returns:
        The tensor with these labels.

    Raises:
        TypeError: If an axis is positional, or integers miss entries and have no fill.
        ValueError: If method is none of these.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, 2.0], x=["a", "b"])
        >>> t.reindex(x=["b", "c"]), t.reindex(x=["b", "c"], fill=0.0)
        (Tensor(x: b=2., c=nan), Tensor(x: b=2., c=0.))
    """
    for which, wanted in {**(labels or {}), **named}.items():
        axis = t._axes.axis(which)
        _, frozen = freeze_labels(wanted, list, range, tuple)
        plan, axes = _plan_reindex(t._axes, axis, frozen, method, freeze_label(tolerance))
        data = t._data
        value = fill
        if plan.missing:
            data, value = choose_fill(data, fill, "t.reindex(..., fill=0)")
        t = finish(gather(data, axis, plan, value), axes)
    return t


@cache_by_axes
def _plan_reindex(axes: Axes, axis: int, wanted: Any, method: str | None, tolerance: Any) -> tuple[Gather, Axes]:
    own = require_labels(axes, axis, "reindex")
    if method is None and tolerance is not None:
        raise ValueError("a tolerance needs a method: 'nearest', 'pad' or 'backfill'")
    space = wanted if isinstance(wanted, Space) else Space(convert_labels(axes, axis, wanted))
    if not space.labelled:
        raise TypeError(f"reindex takes labels for {axes.describe(axis)}, not {space!r}")
    if method is None:
        positions = own.locate(space)
    else:
        positions = np.array(find_neighbours(axes, axis, space, method, tolerance, "reindex"), np.int64)
    plan, name = Gather(positions), axes.names[axis]
    # Labels without an entry have no value of further coordinates either.
    result = axes.put_labels(axis, space.rename(name))
    return plan, result if plan.missing else axes.carry(result, {} if name is None else {name: positions.tolist()})


@method
def reindex_like(t: Tensor, other: Tensor, *, fill: complex | None = None) -> Tensor:
    """Give the axes that another tensor has, too, its labels.

    Args:
        t: The tensor.
        other: The other one. Axes that it does not have, or that are positional there, stay as they are.
        fill: The value of missing entries; NaN by default.

    Returns:
        The tensor with these labels.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0], x=["a", "b"]).reindex_like(mo.zeros(x=["b", "c"]))
        Tensor(x: b=2., c=nan)
    """
    shared = {
        name: space
        for name, space in zip(other._axes.names, other._axes.spaces, strict=True)
        if name is not None and name in t._axes.names and space is not None and space.labelled
    }
    return reindex(t, shared, fill=fill)


def align(*tensors: Tensor, join: str = "inner", fill: complex | None = None) -> tuple[Tensor, ...]:
    """Bring tensors to the same labels on the axes that they share by name.

    Args:
        tensors: The tensors; all axes have names.
        join: Which labels: those of all (``"inner"``), of any (``"outer"``: those of the first in order, then the new ones),
            of the first (``"left"``) or the last tensor (``"right"``) that has the axis, or ``"exact"``, which refuses others.
        fill: The value of missing entries; NaN by default.

    Returns:
        The tensors, in the same order.

    Raises:
        ValueError: If join is none of these, labels differ under ``"exact"``, or positional axes differ in size.

    Example:
        >>> import moduli as mo
        >>> a, b = mo.tensor([1.0, 2.0], x=["a", "b"]), mo.tensor([3.0, 4.0], x=["b", "c"])
        >>> mo.align(a, b)
        (Tensor(x: b=2.), Tensor(x: b=3.))
        >>> mo.align(a, b, join="outer")[1]
        Tensor(x: a=nan, b=3., c=4.)
    """
    if join not in ("inner", "outer", "left", "right", "exact"):
        raise ValueError(f"the join of align is 'inner', 'outer', 'left', 'right' or 'exact', not {join!r}")
    if not tensors:
        return ()
    joined, positional = _join_axes(tensors[0]._axes, tuple(t._axes for t in tensors[1:]), join)
    for name, numbers in positional:
        sizes = [tensors[number]._data.shape[axis] for number, axis in numbers]
        if len(set(sizes)) > 1:
            raise ValueError(f"axis {name!r} is positional in one of the tensors, and its sizes differ: {sizes}")
    return tuple(
        reindex(t, {name: space for name, space in joined if _has_labels(t._axes, name)}, fill=fill) for t in tensors
    )


_Places = tuple[tuple[int, int], ...]


@cache_by_axes
def _join_axes(
    axes: Axes, others: tuple[Axes, ...], join: str
) -> tuple[tuple[tuple[str, Space], ...], tuple[tuple[str, _Places], ...]]:
    """Return the labels of axes that have to change, and the axes that are positional somewhere, as (tensor, axis)."""
    places: dict[str, list[tuple[int, int]]] = {}
    operands = (axes, *others)
    for number, each in enumerate(operands):
        for axis, name in enumerate(each.names):
            if name is None:
                raise ValueError(f"align goes by name, and a tensor has an axis without one: {each.listing()}")
            if not each.stretches(axis):
                places.setdefault(name, []).append((number, axis))
    spaces = {name: [operands[number].spaces[axis] for number, axis in each] for name, each in places.items()}
    joined = [
        (name, _join_spaces(name, [space for space in each if space is not None], join))
        for name, each in spaces.items()
        if None not in each and len(set(each)) > 1
    ]
    positional = [(name, tuple(places[name])) for name, each in spaces.items() if None in each]
    return tuple(joined), tuple(positional)


def _has_labels(axes: Axes, name: str) -> bool:
    return name in axes.names and not axes.stretches(axes.names.index(name))


def _join_spaces(name: str, spaces: Sequence[Space], join: str) -> Space:
    result = spaces[-1] if join == "right" else spaces[0]
    for space in spaces[1:]:
        if join == "exact" and not result.has_labels_of(space):
            raise ValueError(describe_difference(result, space, f"the labels of axis {name!r} differ:"))
        if join in ("inner", "outer"):
            result = result & space if join == "inner" else result | space
    return result


# -- several axes as one, and back -----------------------------------------------------------------------------------------


def stack_axes(t: Tensor, dims: Mapping[str, DimsLike] | None = None, /, **named: DimsLike) -> Tensor:
    """Make one axis of several, as `flatten` does, and keep the labels of each as a further coordinate along it.

    Args:
        t: The tensor.
        dims: Name of the new axis to the axes, as a mapping.
        named: Name of the new axis to the names of the axes, in the order in which they are run through.

    Returns:
        The tensor. Positional axes count as labelled by their positions. `unstack` is the way back.

    Raises:
        ValueError: If an axis has no name or is BROADCAST.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[1.0, 2.0], [3.0, 4.0]], y=["a", "b"], x=[0, 1])
        >>> t.stack(pixel="y x")
        Tensor(pixel: ('a', 0)=1., ('a', 1)=2., ('b', 0)=3., ('b', 1)=4.)
    """
    for name, group in {**(dims or {}), **named}.items():
        chosen = t._axes.axes(as_key(group))
        for axis in chosen:
            if t._axes.names[axis] is None:
                raise ValueError(f"stack needs names, to go back by, and axis {axis} has none")
            if t._axes.spaces[axis] is None:
                t = relabel(t, axis, range(t._data.shape[axis]))
        flat = flatten(t, chosen, name)
        t = finish(flat._data, _mark_levels(t._axes, flat._axes, chosen, name))
    return t


@cache_by_axes
def _mark_levels(axes: Axes, flat: Axes, chosen: tuple[int, ...], name: str) -> Axes:
    levels = [(axes.names[axis], axes.spaces[axis]) for axis in chosen]
    labels = list(itertools.product(*(space for _, space in levels if space is not None)))
    coordinates = axes.coordinates or AxisCoordinates({})
    group = {level: len(space) for level, space in levels if level is not None and space is not None}
    entries = {key: stack_dims(entry, group, name) for key, entry in coordinates.entries.items() if key not in group}
    for at, (level, _) in enumerate(levels):
        if level is not None:
            entries[level] = Coordinate((name,), _box([label[at] for label in labels]), {})
    return flat.mark(coordinates.replace(entries))


def _box(values: Sequence[Hashable]) -> np.ndarray[Any, Any]:
    """Return an array of objects, which leaves tuples and other labels unmodified."""
    boxed: np.ndarray[Any, Any] = np.empty(len(values), object)
    boxed[:] = values
    return boxed


@method
def unstack(
    t: Tensor, dim: DimLike, names: str | Sequence[str] | None = None, *, fill: complex | None = None
) -> Tensor:
    """Make several axes of one whose labels are tuples, the inverse of `stack`.

    Args:
        t: The tensor.
        dim: The axis, by name or position.
        names: The names of the new axes; by default those of the coordinates that `stack` left.
        fill: The value of combinations that are missing; NaN by default.

    Returns:
        The tensor. The labels of each new axis are in the order in which they first occur.

    Raises:
        ValueError: If the labels are not tuples of one length, or the names are not known.
        TypeError: If the axis is positional, or integers miss entries and have no fill.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, 2.0, 3.0], pixel=[("a", 0), ("a", 1), ("b", 1)])
        >>> t.unstack("pixel", "y x")
        Tensor(y: ['a', 'b'], x: [0, 1])
             0   1
        a   1.  2.
        b  nan  3.
    """
    axis = t._axes.axis(dim)
    chosen = tuple(split_names(names)) if isinstance(names, str) else None if names is None else tuple(names)
    plan, sizes, axes = _plan_unstack(t._axes, axis, chosen)
    data, value = choose_fill(t._data, fill, "t.unstack(..., fill=0)") if plan.missing else (t._data, fill)
    data = gather(data, axis, plan, value)
    return finish(data.unflatten(axis, sizes), axes)  # type: ignore[no-untyped-call]


@cache_by_axes
def _plan_unstack(axes: Axes, axis: int, names: tuple[str, ...] | None) -> tuple[Gather, tuple[int, ...], Axes]:
    space = require_labels(axes, axis, "unstack")
    labels: Sequence[Any] = space.labels
    counts = {len(label) if type(label) is tuple else 0 for label in labels}
    if len(counts) != 1 or not min(counts):
        raise ValueError(
            f"the labels of {axes.describe(axis)} are not tuples of one length, to be unstacked: {space!r}"
        )
    levels = [list(dict.fromkeys(each)) for each in zip(*labels, strict=True)]
    names = _find_levels(axes, axis, labels) if names is None else names
    if len(names) != len(levels):
        raise ValueError(
            f"the labels of {axes.describe(axis)} have {len(levels)} parts, but the names of the new axes are {list(names)}; "
            "give one name each, as in t.unstack('pixel', 'y x')"
        )
    spaces = [Space(level, name) for level, name in zip(levels, names, strict=True)]
    plan = Gather(space.locate(list(itertools.product(*levels))))
    return plan, tuple(map(len, spaces)), axes.put(axis, *map(as_pair, spaces))


def _find_levels(axes: Axes, axis: int, labels: Sequence[Any]) -> tuple[str, ...]:
    """Return the names of the coordinates along an axis whose values are the parts of its labels."""
    names = []
    coordinates = {name: axes.find_coordinate(name) for name in axes.coordinate_names()}
    for part in zip(*labels, strict=True):
        for name, coordinate in coordinates.items():
            if coordinate is not None and coordinate[0] == axis and tuple(coordinate[1]) == part and name not in names:
                names.append(name)
                break
    return tuple(names)


Tensor.stack = stack_axes  # type: ignore[attr-defined,method-assign,assignment,unused-ignore]
