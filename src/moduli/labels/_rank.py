"""Operations along one axis that depend on order: argmax, sort, cumulative sums, softmax, flip, roll."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import torch

from ._axes import SCALAR, Axes, DimLike, DimsLike, as_key, cache_by_axes, intern
from ._fold import has_nan
from ._reduce import amax, amin, reduce_axes
from ._space import Space
from ._tensor import Tensor, finish, method, wrap


class Ranked(NamedTuple):
    """Values along an axis in order, and the positions they came from.

    Example:
        >>> import moduli as mo
        >>> values, indices = mo.tensor([3.0, 1.0], x=["a", "b"]).sort("x")
        >>> values.data.tolist(), indices.data.tolist()
        ([1.0, 3.0], [1, 0])
    """

    values: Tensor
    indices: Tensor


@cache_by_axes
def _rank_axes(axes: Axes, dim: DimLike) -> tuple[int, Axes]:
    """Return an axis, and the axes after ranking along it: it has positions only, since lines are ordered differently."""
    at = axes.axis(dim)
    return at, axes.put(at, (axes.names[at], None))


def _reduce_one(axes: Axes, dim: DimLike, keepdim: bool) -> tuple[int, Axes]:
    at = axes.axis(dim)
    return at, axes.run(reduce_axes, at, keepdim)[1]


# -- the largest and the smallest --------------------------------------------------------------------------------------


@method
def argmax(t: Tensor, dim: DimLike | None = None, keepdim: bool = False, *, labels: bool = False) -> Any:
    """Return the position or label of the largest element.

    Args:
        t: The tensor.
        dim: The axis to search, by name or position. Without it the whole tensor is searched.
        keepdim: Keep the axis as a BROADCAST axis of the same name.
        labels: Return labels instead of positions: one label if one axis was all there is, a tuple of labels if the
            whole tensor was searched, otherwise an object array of labels, one for each remaining position.

    Returns:
        A Tensor of positions (in the flattened data if no axis is given), or labels.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[1.0, 5.0], [4.0, 2.0]], row=["a", "b"], column=["p", "q"])
        >>> t.argmax("column")
        Tensor(row: a=1, b=0)
        >>> t.argmax("column", labels=True).tolist(), t.argmax(labels=True)
        (['q', 'p'], ('a', 'q'))
    """
    return _arg(torch.argmax, t, dim, keepdim, labels)


@method
def argmin(t: Tensor, dim: DimLike | None = None, keepdim: bool = False, *, labels: bool = False) -> Any:
    """Return the position or label of the smallest element.

    Args:
        t: The tensor.
        dim: The axis to search, by name or position. Without it the whole tensor is searched.
        keepdim: Keep the axis as a BROADCAST axis of the same name.
        labels: Return labels instead of positions, as in `argmax`.

    Returns:
        A Tensor of positions (in the flattened data if no axis is given), or labels.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([3.0, 1.0], x=["a", "b"]).argmin("x", labels=True)
        'b'
    """
    return _arg(torch.argmin, t, dim, keepdim, labels)


def _arg(function: Any, t: Tensor, dim: DimLike | None, keepdim: bool, labels: bool) -> Any:
    if dim is None:
        flat = function(t._data)
        if labels:
            places = np.unravel_index(int(flat), tuple(t._data.shape))
            return tuple(space[int(place)] for space, place in zip(t.dims, places, strict=True))
        return finish(flat, SCALAR)
    at, axes = _reduce_one(t._axes, dim, keepdim)
    result = function(t._data, at, keepdim)
    if not labels:
        return finish(result, axes)
    space = t.dims[at]
    if not result.ndim:
        return space[int(result)]
    chosen = np.empty(tuple(result.shape), dtype=object)
    for at, place in enumerate(result.flatten().tolist()):  # one by one, because NumPy would unpack tuples
        chosen.flat[at] = space[place]
    return chosen


@method
def max(t: Tensor, dim: DimLike | None = None, keepdim: bool = False, *, skipna: bool = False) -> Any:
    """Return the largest element, or along an axis the largest elements and their positions.

    Args:
        t: The tensor.
        dim: The axis, by name or position; the whole tensor by default.
        keepdim: Keep the axis as a BROADCAST axis of the same name.
        skipna: Leave out NaN; NaN where nothing is left.

    Returns:
        A Tensor without axes, or a `Ranked` pair of values and indices as in torch.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([3.0, 1.0], "x").max().item()
        3.0
    """
    if isinstance(dim, (list, tuple)):
        raise TypeError(f"max gives positions too, along one axis; over several write t.amax({dim!r})")
    return amax(t, skipna=skipna) if dim is None else _extreme(torch.max, t, dim, keepdim, skipna)


@method
def min(t: Tensor, dim: DimLike | None = None, keepdim: bool = False, *, skipna: bool = False) -> Any:
    """Return the smallest element, or along an axis the smallest elements and their positions.

    Args:
        t: The tensor.
        dim: The axis, by name or position; the whole tensor by default.
        keepdim: Keep the axis as a BROADCAST axis of the same name.
        skipna: Leave out NaN; NaN where nothing is left.

    Returns:
        A Tensor without axes, or a `Ranked` pair of values and indices as in torch.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([[3.0, 1.0]], "y x").min("x").indices
        Tensor(y: [1])
    """
    if isinstance(dim, (list, tuple)):
        raise TypeError(f"min gives positions too, along one axis; over several write t.amin({dim!r})")
    return amin(t, skipna=skipna) if dim is None else _extreme(torch.min, t, dim, keepdim, skipna)


def _extreme(function: Any, t: Tensor, dim: DimLike, keepdim: bool, skipna: bool) -> Ranked:
    at, axes = _reduce_one(t._axes, dim, keepdim)
    data = t._data
    if not skipna or not has_nan(data):
        values, indices = function(data, at, keepdim)
        return Ranked(finish(values, axes), finish(indices, axes))
    valid = ~data.isnan()
    values, indices = function(torch.where(valid, data, math.inf if function is torch.min else -math.inf), at, keepdim)
    values = torch.where(valid.any(at, keepdim), values, math.nan)
    return Ranked(finish(values, axes), finish(indices, axes))


# -- order -------------------------------------------------------------------------------------------------------------


@method
def sort(t: Tensor, dim: DimLike = -1, descending: bool = False, *, stable: bool = False) -> Ranked:
    """Return the elements in order along an axis, and the positions they came from.

    Every line of a tensor has an order of its own, so the sorted axis keeps its name but has positions instead of labels.

    Args:
        t: The tensor.
        dim: The axis, by name or position.
        descending: Largest first.
        stable: Keep the order of equal elements.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([3.0, 1.0], x=["a", "b"]).sort("x").values
        Tensor(x: [1., 3.])
    """
    at, axes = _rank_axes(t._axes, dim)
    values, indices = torch.sort(t._data, dim=at, descending=descending, stable=stable)
    return Ranked(wrap(values, axes), wrap(indices, axes))


@method
def argsort(t: Tensor, dim: DimLike = -1, descending: bool = False, *, stable: bool = False) -> Tensor:
    """Return the positions that sort the elements along an axis.

    Args:
        t: The tensor.
        dim: The axis, by name or position.
        descending: Largest first.
        stable: Keep the order of equal elements.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([3.0, 1.0], x=["a", "b"])
        >>> t[t.argsort("x").data]
        Tensor(x: b=1., a=3.)
    """
    return sort(t, dim, descending, stable=stable).indices


@method
def topk(t: Tensor, k: int, dim: DimLike = -1, largest: bool = True, sorted: bool = True) -> Ranked:
    """Return the k largest (or smallest) elements along an axis, and their positions.

    Args:
        t: The tensor.
        k: How many.
        dim: The axis, by name or position.
        largest: The largest, or the smallest.
        sorted: In order.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([3.0, 1.0, 2.0], x=["a", "b", "c"]).topk(2, "x").indices
        Tensor(x: [0, 2])
    """
    at, axes = _rank_axes(t._axes, dim)
    if not 0 <= k <= t._data.shape[at]:
        raise ValueError(f"k={k} is not between 0 and the size {t._data.shape[at]} of {t._axes.describe(at)}")
    values, indices = torch.topk(t._data, k, at, largest, sorted)
    return Ranked(wrap(values, axes), wrap(indices, axes))


# -- scans and shares --------------------------------------------------------------------------------------------------


@method
def cumsum(t: Tensor, dim: DimLike, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the running sum along an axis.

    Args:
        t: The tensor.
        dim: The axis, by name or position.
        dtype: The dtype to add in.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0, 3.0], x=["a", "b", "c"]).cumsum("x")
        Tensor(x: a=1., b=3., c=6.)
    """
    return finish(torch.cumsum(t._data, t._axes.axis(dim), dtype=dtype), t._axes)


@method
def cumprod(t: Tensor, dim: DimLike, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the running product along an axis.

    Args:
        t: The tensor.
        dim: The axis, by name or position.
        dtype: The dtype to multiply in.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0, 3.0], x=["a", "b", "c"]).cumprod("x")
        Tensor(x: a=1., b=2., c=6.)
    """
    return finish(torch.cumprod(t._data, t._axes.axis(dim), dtype=dtype), t._axes)


@method
def softmax(t: Tensor, dim: DimLike, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return exp(x) divided by its sum along an axis.

    Args:
        t: The tensor.
        dim: The axis, by name or position.
        dtype: The dtype to compute in.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([0.0, 0.0], x=["a", "b"]).softmax("x")
        Tensor(x: a=0.5000, b=0.5000)
    """
    return finish(torch.softmax(t._data, t._axes.axis(dim), dtype=dtype), t._axes)


@method
def log_softmax(t: Tensor, dim: DimLike, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the logarithm of `softmax`, computed without overflow.

    Args:
        t: The tensor.
        dim: The axis, by name or position.
        dtype: The dtype to compute in.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([0.0, 0.0], x=["a", "b"]).log_softmax("x")
        Tensor(x: a=-0.6931, b=-0.6931)
    """
    return finish(torch.log_softmax(t._data, t._axes.axis(dim), dtype=dtype), t._axes)


# -- reversed and rotated ------------------------------------------------------------------------------------------------


@method
def flip(t: Tensor, dim: DimsLike) -> Tensor:
    """Reverse the order along axes; labels go with their entries.

    Args:
        t: The tensor.
        dim: The axes, by name or position.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0], x=["a", "b"]).flip("x")
        Tensor(x: b=2., a=1.)
    """
    which, axes = _flip_axes(t._axes, as_key(dim))
    return wrap(t._data.flip(which), axes)


@cache_by_axes
def _flip_axes(axes: Axes, dim: DimsLike) -> tuple[tuple[int, ...], Axes]:
    which = axes.axes(dim)
    spaces = [s if s is None or i not in which else s[::-1] for i, s in enumerate(axes.spaces)]
    return which, intern(axes.names, spaces)


@method
def roll(t: Tensor, shift: int, dim: DimLike) -> Tensor:
    """Rotate the entries along an axis; labels go with their entries.

    Args:
        t: The tensor.
        shift: By how many places.
        dim: The axis, by name or position.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0, 3.0], x=["a", "b", "c"]).roll(1, "x")
        Tensor(x: c=3., a=1., b=2.)
    """
    at, axes = _roll_axis(t._axes, shift, dim)
    return wrap(t._data.roll(shift, at), axes)


@cache_by_axes
def _roll_axis(axes: Axes, shift: int, dim: DimLike) -> tuple[int, Axes]:
    at = axes.axis(dim)
    space = axes.spaces[at]
    if space is None or not len(space):
        return at, axes
    cut = -shift % len(space)
    labels: list[Hashable] = [*space.labels[cut:], *space.labels[:cut]]
    return at, axes.put(at, (space.name, space if space.broadcast else Space(labels)))
