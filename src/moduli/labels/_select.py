"""Along named axes: ``sel`` by label, ``isel`` by position, ``interp`` between labels."""

from __future__ import annotations

import numbers
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ._axes import Axes, cache_by_axes
from ._dates import measure_dates
from ._errors import UnknownLabelError
from ._gather import Gather, index_of, lay_along
from ._index import get
from ._instants import get_dates
from ._label_sequences import show_label
from ._locate import (
    convert_labels,
    freeze_label,
    freeze_labels,
    locate_labels,
    locate_neighbours,
    locate_slice,
    require_labels,
    sort_labels,
)
from ._space import Space
from ._tensor import Tensor, finish, method


@method
def isel(t: Tensor, indexers: Mapping[Any, Any] | None = None, /, **named: Any) -> Tensor:
    """Select by position along named axes.

    Args:
        t: The tensor.
        indexers: Axis (name or position) to index, as a mapping.
        named: Axis name to index: a position (the axis disappears), slice, list, mask or index tensor.

    Raises:
        UnknownLabelError: If an axis does not exist.
        IndexError: If a position is out of range.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[1.0, 2.0], [3.0, 4.0]], row=["a", "b"], column=["p", "q"])
        >>> t.isel(column=0)
        Tensor(row: a=1., b=3.)
        >>> t[{"column": 0}] = 0.0  # the same selection in brackets, which can be assigned
        >>> t.sum("row")
        Tensor(column: p=0., q=6.)
    """
    return get(t, {**(indexers or {}), **named})


@method
def sel(
    t: Tensor,
    indexers: Mapping[Any, Any] | None = None,
    /,
    method: str | None = None,
    tolerance: Any = None,
    **named: Any,
) -> Tensor:
    """Select by label along named axes.

    Args:
        t: The tensor.
        indexers: Axis (name or position) to labels, as a mapping.
        method: The replacement of a label that the axis does not have: its neighbour below (``"pad"``), above
            (``"backfill"``) or the nearer one (``"nearest"``, the greater of two as near). None raises.
        tolerance: How far that neighbour may be.
        named: Axis name to a label (the axis disappears), to a list of labels or a Space (the axis is reordered), or to a
            slice of labels, both ends included. Dates are selected by `numpy.datetime64`, `datetime`, `date`, a Timestamp of
            pandas or ISO text; text that is coarser than the labels, such as ``"1991-05"`` of days, selects all of them in
            that period.

    Raises:
        UnknownLabelError: If an axis or a label does not exist, or no neighbour is within the tolerance.
        TypeError: If a slice is taken of a positional axis, or labels that have no order are compared.
        ValueError: If two of the labels have the same neighbour, or method is none of these.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, 0.5, 2.0], channel=["r", "g", "b"])
        >>> float(t.sel(channel="g")), t.sel(channel=["b", "r"]), t.sel(channel=slice("g", "b"))
        (0.5, Tensor(channel: b=2., r=1.), Tensor(channel: g=0.5000, b=2.0000))
        >>> mo.tensor([0.0, 1.0, 4.0], time=[0.0, 1.0, 2.0]).sel(time=1.2, method="nearest").item()
        1.0
        >>> day = mo.tensor(range(60), time=np.arange("2000-01-01", "2000-03-01", dtype="datetime64[D]"))
        >>> day.sel(time="2000-01-31").item(), len(day.sel(time="2000-02")), len(day.sel(time=slice("2000-01-30", "2000")))
        (30, 29, 31)
    """
    if method is None and tolerance is not None:
        raise ValueError("a tolerance needs a method: 'nearest', 'pad' or 'backfill'")
    axes = t._axes
    if indexers is None and method is None and len(named) == 1:
        # One label is the common case: a look-up, and torch's own selection.
        ((which, labels),) = named.items()
        if type(labels) is str or type(labels) is int:
            plan = axes.run(_plan_label, which, labels)
            if plan is not None:
                axis, position, rest = plan
                return finish(t._data.select(axis, position), rest)
    key: list[Any] = [slice(None)] * t._data.ndim
    for which, labels in {**(indexers or {}), **named}.items():
        axis = axes.axis(which)
        key[axis] = _locate(t, axis, labels, method, tolerance)
    return get(t, tuple(key))


def _locate(t: Tensor, axis: int, labels: Any, method: str | None, tolerance: Any) -> Any:
    """Return the index of labels along an axis: a position, a slice or a Space."""
    axes = t._axes
    if isinstance(labels, slice):
        return locate_slice(axes, axis, labels.start, labels.stop, labels.step)
    several, wanted = freeze_labels(labels, list, range)  # a tuple is one label
    if method is not None:
        return locate_neighbours(axes, axis, several, wanted, method, freeze_label(tolerance))
    place = locate_labels(axes, axis, several, wanted)
    if axes.spaces[axis] is None and isinstance(place, int) and place >= t._data.shape[axis]:
        raise UnknownLabelError(f"{axes.describe(axis)} has size {t._data.shape[axis]} and no position {labels!r}")
    return place


def _plan_label(axes: Axes, which: str, label: Hashable) -> tuple[int, int, Axes] | None:
    """Return the axis and position of one label, and the remaining axes; None for a position, or several labels."""
    axis = axes.axis(which)
    position = None if axes.spaces[axis] is None else locate_labels(axes, axis, False, label)
    return (axis, position, axes.carry(axes.drop(axis))) if isinstance(position, int) else None


# -- between labels ------------------------------------------------------------------------------------------------------


@method
def interp(t: Tensor, points: Mapping[Any, Any] | None = None, /, fill: complex | None = None, **named: Any) -> Tensor:
    """Interpolate linearly between the labels of axes; differentiable in the data.

    Along several axes it is multilinear: one axis after the other.

    Args:
        t: The tensor. Integers become the default dtype.
        points: Axis (name or position) to points, as a mapping.
        fill: The value of points outside of the labels; None refuses them.
        named: Axis name to a number (the axis disappears), or to several distinct ones, which become its labels.

    Raises:
        UnknownLabelError: If an axis does not exist.
        TypeError: If an axis is positional, or its labels are not numbers.
        ValueError: If a point is outside of the labels.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([0.0, 10.0, 40.0], time=[0, 1, 2])
        >>> t.interp(time=0.5).item(), t.interp(time=[0.5, 1.5])
        (5.0, Tensor(time: 0.5=5., 1.5=25.))
    """
    data, axes = t._data, t._axes
    if not data.is_floating_point() and not data.is_complex():
        data = data.to(torch.get_default_dtype())
    for which, wanted in {**(points or {}), **named}.items():
        axis = axes.axis(which)
        several, frozen = freeze_labels(wanted, list, range, tuple)
        below, above, weights, outside, left = _plan_points(axes, axis, several, frozen, fill is not None)
        low, high = (data.index_select(axis, index_of(each, data)) for each in (below, above))
        weight = torch.tensor(weights, dtype=data.real.dtype, device=data.device)
        data = low + (high - low) * lay_along(weight, axis, data.ndim)
        if any(outside):
            mask = lay_along(torch.tensor(outside, device=data.device), axis, data.ndim)
            data = torch.where(mask, torch.as_tensor(fill, dtype=data.dtype, device=data.device), data)
        data, axes = (data if several else data.squeeze(axis)), left
    return finish(data, axes)


@cache_by_axes
def _plan_points(
    axes: Axes, axis: int, several: bool, wanted: Any, fills: bool
) -> tuple[Gather, Gather, tuple[float, ...], tuple[bool, ...], Axes]:
    """Return the positions below and above each point, the weight of the upper one, whether it is outside, and the axes."""
    wanted = tuple(wanted) if several else (wanted,)
    sorted_labels, order, labels, points = _measure_points(axes, axis, wanted)
    if not len(labels):
        raise ValueError(f"{axes.describe(axis)} has no labels to interpolate between")
    outside = ~((points >= labels[0]) & (points <= labels[-1]))
    if outside.any() and not fills:
        raise ValueError(
            f"{show_label(wanted[int(outside.argmax())])} is outside of the labels of {axes.describe(axis)}, from "
            f"{show_label(sorted_labels[0])} to {show_label(sorted_labels[-1])}; give fill= for such points"
        )
    below = np.clip(np.searchsorted(labels, points, side="right") - 1, 0, len(labels) - 1)
    # At a label itself its neighbour is not used, so that a NaN there does not spread.
    above = np.where((labels[below] == points) | outside, below, np.minimum(below + 1, len(labels) - 1))
    width = labels[above] - labels[below]
    weights = np.where(width > 0, (points - labels[below]) / np.where(width > 0, width, 1.0), 0.0)
    positions = np.array(order)
    left = axes.put_labels(axis, Space(convert_labels(axes, axis, wanted))) if several else axes.drop(axis)
    low, high = Gather(positions[below]), Gather(positions[above])
    return low, high, tuple(weights.tolist()), tuple(outside.tolist()), left


def _measure_points(
    axes: Axes, axis: int, wanted: tuple[Any, ...]
) -> tuple[Sequence[Any], Sequence[int], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the labels of an axis in ascending order, their positions, and labels and points as numbers."""
    sorted_labels, order = sort_labels(axes, axis, "interp")
    dates = get_dates(require_labels(axes, axis, "interp"))
    if dates is not None:
        ordered, points = measure_dates(dates[list(order)], convert_labels(axes, axis, wanted))
        return sorted_labels, order, ordered, points
    if not all(isinstance(each, numbers.Real) for each in (*sorted_labels, *wanted)):
        raise TypeError(
            f"interp needs numbers or dates, unlike the labels of {axes.describe(axis)} or the points {list(wanted)}"
        )
    return sorted_labels, order, np.array(sorted_labels, np.float64), np.array(wanted, np.float64)
