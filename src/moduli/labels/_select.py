"""Selecting along named axes: ``sel`` by label, ``isel`` by position."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch

from ._axes import Axes, cache_by_axes
from ._errors import UnknownLabelError
from ._index import get
from ._neighbours import locate_neighbours, locate_slice
from ._space import Space
from ._tensor import Tensor, method


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
    """
    key: list[Any] = [slice(None)] * t._data.ndim
    for which, index in {**(indexers or {}), **named}.items():
        key[t._axes.axis(which)] = index
    return get(t, tuple(key))


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
        method: What to take for a label that the axis does not have: its neighbour below (``"pad"``), above
            (``"backfill"``) or the nearer one (``"nearest"``, the greater of two as near). None refuses it.
        tolerance: How far that neighbour may be.
        named: Axis name to a label (the axis disappears), to a list of labels or a Space (the axis is reordered), or to a
            slice of labels, both ends included.

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
    """
    if method is None and tolerance is not None:
        raise ValueError("a tolerance needs a method: 'nearest', 'pad' or 'backfill'")
    key: list[Any] = [slice(None)] * t._data.ndim
    for which, labels in {**(indexers or {}), **named}.items():
        axis = t._axes.axis(which)
        if isinstance(labels, slice):
            key[axis] = locate_slice(t._axes, axis, labels.start, labels.stop, labels.step)
            continue
        several, wanted = _freeze_labels(labels)
        if method is not None:
            wanted = locate_neighbours(t._axes, axis, several, wanted, method, tolerance)
        key[axis] = found = _locate_labels(t._axes, axis, several, wanted)
        if t._axes.spaces[axis] is None and isinstance(found, int) and found >= t._data.shape[axis]:
            raise UnknownLabelError(
                f"{t._axes.describe(axis)} has size {t._data.shape[axis]} and no position {labels!r}"
            )
    return get(t, tuple(key))


def _freeze_labels(labels: Any) -> tuple[bool, Hashable]:
    if isinstance(labels, Tensor):
        labels = labels._data
    if isinstance(labels, (torch.Tensor, np.ndarray)):
        labels = labels.tolist()
    if isinstance(labels, (list, range)):
        return True, tuple(labels)
    return isinstance(labels, Space), labels


@cache_by_axes
def _locate_labels(axes: Axes, axis: int, several: bool, labels: Any) -> int | Space:
    space = axes.spaces[axis]
    # How many positions there are is the data's business; here it only matters that they are positions.
    known = space if space is not None else Space(sys.maxsize, axes.names[axis])
    try:
        if several:
            for label in labels:
                known.index(label)
            return labels if isinstance(labels, Space) else Space(labels)
        return known.index(labels)
    except UnknownLabelError as error:
        if space is None:
            raise UnknownLabelError(f"{axes.describe(axis)} is positional and has no position {labels!r}") from None
        raise UnknownLabelError(f"{axes.describe(axis)}: {error}") from None
