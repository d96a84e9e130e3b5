"""Selecting along named axes: ``sel`` by label, ``isel`` by position."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch

from ._axes import Axes, static
from ._errors import UnknownLabelError
from ._index import get
from ._space import Space
from ._tensor import Tensor, method

__all__ = ["isel", "sel"]


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
def sel(t: Tensor, indexers: Mapping[Any, Any] | None = None, /, **named: Any) -> Tensor:
    """Select by label along named axes.

    Args:
        t: The tensor.
        indexers: Axis (name or position) to labels, as a mapping.
        named: Axis name to a label (the axis disappears), or to a list of labels or a Space (the axis is reordered).

    Raises:
        UnknownLabelError: If an axis or a label does not exist.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, 0.5, 2.0], channel=["r", "g", "b"])
        >>> float(t.sel(channel="g"))
        0.5
        >>> t.sel(channel=["b", "r"])
        Tensor(channel: b=2., r=1.)
    """
    key: list[Any] = [slice(None)] * t._data.ndim
    for which, labels in {**(indexers or {}), **named}.items():
        axis = t._axes.axis(which)
        if isinstance(labels, slice):
            raise TypeError("sel takes a label, a list of labels or a Space; for a slice of positions use isel")
        several, wanted = _frozen(labels)
        key[axis] = found = _located(t._axes, axis, several, wanted)
        if t._axes.spaces[axis] is None and isinstance(found, int) and found >= t._data.shape[axis]:
            raise UnknownLabelError(
                f"{t._axes.describe(axis)} has size {t._data.shape[axis]} and no position {labels!r}"
            )
    return get(t, tuple(key))


def _frozen(labels: Any) -> tuple[bool, Hashable]:
    if isinstance(labels, Tensor):
        labels = labels._data
    if isinstance(labels, (torch.Tensor, np.ndarray)):
        labels = labels.tolist()
    if isinstance(labels, (list, range)):
        return True, tuple(labels)
    return isinstance(labels, Space), labels


@static
def _located(axes: Axes, axis: int, several: bool, labels: Any) -> int | Space:
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
