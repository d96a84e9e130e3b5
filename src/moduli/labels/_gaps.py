"""Gaps: entries that are NaN, counted, dropped, filled or interpolated."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from . import _fold as fold
from ._axes import Axes, DimLike, DimsLike, as_key, cache_by_axes
from ._elementwise import elementwise
from ._gather import Gather, index_of
from ._groups import add_quantiles
from ._index import get
from ._instants import get_dates
from ._join import join
from ._reduce import fold_axes, reduce_axes
from ._space import Space
from ._tensor import RULES, Tensor, as_tensor, finish, method


@method
def isnull(t: Tensor) -> Tensor:
    """Return a mask of missing elements: NaN in floating and complex tensors, none in others.

    Args:
        t: The tensor.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, float("nan")], x=["a", "b"]).isnull()
        Tensor(x: a=False, b=True)
    """
    t = as_tensor(t)
    return finish(torch.isnan(t._data), t._axes)


@method
def notnull(t: Tensor) -> Tensor:
    """Return a mask of elements that are not missing, the opposite of `isnull`.

    Args:
        t: The tensor.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, float("nan")], x=["a", "b"]).notnull()
        Tensor(x: a=True, b=False)
    """
    t = as_tensor(t)
    return finish(~torch.isnan(t._data), t._axes)


@method
def count(t: Tensor, dim: DimsLike = None, keepdim: bool = False) -> Tensor:
    """Return the number of elements that are not NaN, over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([[1.0, float("nan")], [2.0, 3.0]], "row column").count("row")
        Tensor(column: [2, 1])
    """
    return fold_axes(fold.count, t, dim, keepdim, True)


@method
def quantile(
    t: Tensor,
    q: float | Sequence[float],
    dim: DimsLike = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
    skipna: bool = False,
) -> Tensor:
    """Return quantiles over axes.

    Args:
        t: The tensor. Integers become the default dtype.
        q: A number between 0 and 1, or several, which become the labels of a new first axis, ``"quantile"``.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.
        interpolation: Between two elements: "linear", "lower", "higher", "midpoint" or "nearest".
        skipna: Leave out NaN; NaN where nothing is left.

    Raises:
        ValueError: If a quantile is not between 0 and 1, or the interpolation is unknown.
        TypeError: If the tensor is complex.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[1.0, 2.0, 4.0], [0.0, 0.0, 1.0]], row=["a", "b"], column=None)
        >>> t.quantile(0.5, "column")
        Tensor(row: a=2., b=0.)
        >>> t.quantile([0.0, 1.0], "column").sel(quantile=1.0)
        Tensor(row: a=4., b=1.)
    """
    levels = [q] if isinstance(q, (int, float)) else list(q)
    fold.check_quantiles(levels, interpolation)
    gone, axes = t._axes.run(reduce_axes, as_key(dim), keepdim)
    data = fold.widen_real(t._data)
    last = data.movedim(gone, tuple(range(-len(gone), 0))).flatten(-len(gone)) if gone else data.unsqueeze(-1)
    along = fold.AxesFold((-1,))
    valid = fold.count(along, last, True)
    number = valid if skipna else torch.where(valid == last.shape[-1], valid, 0)
    ranked = last.sort(dim=-1).values
    result = fold.quantile(ranked, torch.zeros_like(number), number, levels, interpolation).squeeze(-1)
    for at in sorted(gone) if keepdim else ():
        result = result.unsqueeze(at + 1)
    result = fold.narrow(result, t._data)
    if isinstance(q, (int, float)):
        return finish(result[0], axes)
    return finish(result, add_quantiles(axes, tuple(levels)))


# -- dropped and filled ------------------------------------------------------------------------------------------------


@method
def dropna(t: Tensor, dim: DimLike, how: str = "any", thresh: int | None = None) -> Tensor:
    """Drop the labels of an axis at which elements are NaN.

    Which labels are left depends on values: it can't be compiled, nor mapped by `vmap`. Gradients pass.

    Args:
        t: The tensor.
        dim: The axis, by name or position.
        how: ``"any"`` drops a label if any of its elements is NaN, ``"all"`` if all are.
        thresh: Keep a label if at least so many of its elements are not NaN, in place of ``how``.

    Raises:
        ValueError: If how is neither "any" nor "all".

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[1.0, float("nan")], [2.0, 3.0]], row=["a", "b"], column=["p", "q"])
        >>> t.dropna("row")
        Tensor(row: ['b'], column: ['p', 'q'])
            p   q
        b  2.  3.
    """
    if how not in ("any", "all"):
        raise ValueError(f"dropna drops a label where 'any' or 'all' elements are NaN, not {how!r}")
    axis = t._axes.axis(dim)
    others = tuple(at for at in range(t._data.ndim) if at != axis)
    valid = fold.count(fold.AxesFold(others), t._data, True).flatten()
    size = math.prod(t._data.shape[at] for at in others)
    least = thresh if thresh is not None else size if how == "any" else min(1, size)
    return get(t, (*[slice(None)] * axis, valid >= least))


@method
def fillna(t: Tensor, value: Any) -> Tensor:
    """Replace elements that are NaN by other values.

    Args:
        t: The tensor.
        value: A number, or a tensor paired with ``t`` by axis and label. Elements for which it has no label stay NaN.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, float("nan"), float("nan")], x=["a", "b", "c"])
        >>> t.fillna(0.0), t.fillna(mo.tensor([5.0, 7.0], x=["c", "a"]))
        (Tensor(x: a=1., b=0., c=0.), Tensor(x: a=1., b=nan, c=5.))
    """
    with join("left"):
        return elementwise(_fill, t, value)


def _fill(data: torch.Tensor, value: Any) -> torch.Tensor:
    return torch.where(torch.isnan(data), value, data)


def keep_where(t: Tensor, cond: Any, other: Any = None, *, drop: bool = False) -> Tensor:
    """Keep elements where a condition holds, and take others elsewhere.

    Args:
        t: The tensor.
        cond: A tensor of booleans, paired with ``t`` by axis and label.
        other: A number or tensor for the other elements; NaN by default, which integers do not have.
        drop: Drop the labels at which the condition holds nowhere. They depend on values: it can't be compiled.

    Raises:
        TypeError: If the condition does not hold booleans, or integers are to become NaN.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, -2.0, 3.0], x=["a", "b", "c"])
        >>> t.where(t > 0), t.where(t > 0, 0.0), t.where(t > 0, drop=True)
        (Tensor(x: a=1., b=nan, c=3.), Tensor(x: a=1., b=0., c=3.), Tensor(x: a=1., c=3.))
    """
    t, cond = as_tensor(t), as_tensor(cond)
    if cond._data.dtype is not torch.bool:
        raise TypeError(
            f"the condition of where holds booleans, not {cond._data.dtype}; t.where(cond, other) keeps t where cond holds, "
            "and mo.where(cond, a, b) chooses between two"
        )
    if other is None and not fold.has_nan(t._data):
        raise TypeError(
            f"a tensor of {t._data.dtype} has no NaN; say what else to take: t.where(cond, 0), or t.float().where(cond)"
        )
    result = elementwise(_choose, t, cond, math.nan if other is None else other)
    return _drop_false(t, cond, result) if drop else result


Tensor.where = keep_where  # type: ignore[method-assign,assignment]
RULES[torch.Tensor.where] = keep_where


def _choose(data: torch.Tensor, cond: torch.Tensor, other: Any) -> torch.Tensor:
    return torch.where(cond, data, other)


def _drop_false(t: Tensor, cond: Tensor, result: Tensor) -> Tensor:
    """Return the entries of a result along the axes of a condition at which that holds somewhere."""
    holds = elementwise(lambda data, mask: mask & torch.ones_like(data, dtype=torch.bool), t, cond)._data
    along = _find_axes(result._axes, cond._axes)
    for axis in along:
        others = tuple(at for at in range(holds.ndim) if at != axis)
        result = get(result, (*[slice(None)] * axis, holds.any(others) if others else holds))
    return result


@cache_by_axes
def _find_axes(axes: Axes, part: Axes) -> tuple[int, ...]:
    """Return the axes that an operand has: by name where all have one, else by position from the right."""
    if axes.named and part.named:
        return tuple(axes.axis(name) for name in part.names if name is not None)
    return tuple(range(axes.ndim - part.ndim, axes.ndim))


# -- between the entries that are there --------------------------------------------------------------------------------


@method
def ffill(t: Tensor, dim: DimLike, limit: int | None = None) -> Tensor:
    """Fill gaps with the last element before each.

    Args:
        t: The tensor.
        dim: The axis, by name or position; its entries count in the order in which they are.
        limit: How many elements of a gap are filled at most; all by default.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, float("nan"), 3.0], x=["a", "b", "c"]).ffill("x")
        Tensor(x: a=1., b=1., c=3.)
    """
    return _bridge(t, dim, "pad", False, limit)


@method
def bfill(t: Tensor, dim: DimLike, limit: int | None = None) -> Tensor:
    """Fill gaps with the first element after each.

    Args:
        t: The tensor.
        dim: The axis, by name or position; its entries count in the order in which they are.
        limit: How many elements of a gap are filled at most; all by default.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, float("nan"), 3.0], x=["a", "b", "c"]).bfill("x")
        Tensor(x: a=1., b=3., c=3.)
    """
    return _bridge(t, dim, "backfill", False, limit)


@method
def interpolate_na(
    t: Tensor, dim: DimLike, method: str = "linear", *, use_coordinate: bool = True, limit: int | None = None
) -> Tensor:
    """Interpolate in gaps between their neighbours along an axis; gaps at the ends stay.

    Gradients go to the neighbours.

    Args:
        t: The tensor.
        dim: The axis, by name or position.
        method: ``"linear"``, or ``"nearest"`` (the one before of two as near).
        use_coordinate: Measure distances by the labels, which are numbers or dates; otherwise by position.
        limit: How many elements of a gap are filled at most, from its start; all by default.

    Raises:
        TypeError: If labels are neither numbers nor dates, and use_coordinate is True.
        ValueError: If the method is neither of the two.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([0.0, float("nan"), 8.0], time=[0, 1, 4])
        >>> t.interpolate_na("time"), t.interpolate_na("time", use_coordinate=False)
        (Tensor(time: 0=0., 1=2., 4=8.), Tensor(time: 0=0., 1=4., 4=8.))
    """
    if method not in ("linear", "nearest"):
        raise ValueError(f"the method of interpolate_na is 'linear' or 'nearest', not {method!r}")
    return _bridge(t, dim, method, use_coordinate, limit)


def _bridge(t: Tensor, dim: DimLike, how: str, by_label: bool, limit: int | None) -> Tensor:
    """Fill gaps along an axis from the elements on both sides of each."""
    if not fold.has_nan(t._data) or not t._data.numel():
        return t
    axis = t._axes.axis(dim)
    data, size = t._data.movedim(axis, -1), t._data.shape[axis]
    places = _plan_places(t._axes, axis) if by_label else None
    if places is not None:
        data = data.index_select(-1, index_of(places.order, data))
    at = torch.arange(size, device=data.device)
    x = at.to(torch.float64) if places is None else torch.tensor(places.x, dtype=torch.float64, device=data.device)
    valid = ~torch.isnan(data)
    before = torch.where(valid, at, -1).cummax(-1).values
    after = torch.where(valid, at, size).flip(-1).cummin(-1).values.flip(-1)
    low, high = (data.gather(-1, side.clamp(0, size - 1)) for side in (before, after))
    away, width = x - x[before.clamp(min=0)], x[after.clamp(max=size - 1)] - x[before.clamp(min=0)]
    if how == "linear":
        weight = torch.where(width > 0, away / torch.where(width > 0, width, 1), 0).to(data.real.dtype)
        between = low + (high - low) * weight
    elif how == "nearest":
        between = torch.where(2 * away <= width, low, high)
    else:
        between = low if how == "pad" else high
    inside = (before >= 0) | (how == "backfill")
    inside = inside & ((after < size) | (how == "pad"))
    if limit is not None:
        inside = inside & ((after - at if how == "backfill" else at - before) <= limit)
    filled = torch.where(valid, data, torch.where(inside, between, math.nan))
    if places is not None:
        filled = filled.index_select(-1, index_of(places.back, data))
    return finish(filled.movedim(-1, axis), t._axes)


class _LabelPlaces(NamedTuple):
    """Labels as numbers in ascending order, how entries get into it, and back."""

    x: tuple[float, ...]
    order: Gather
    back: Gather


@cache_by_axes
def _plan_places(axes: Axes, axis: int) -> _LabelPlaces | None:
    """Return where the entries of an axis are by their labels, None if it is positional."""
    space = axes.spaces[axis]
    if space is None or not space.labelled:
        return None
    x = as_numbers(space)
    if x is None:
        raise TypeError(
            f"the labels of {axes.describe(axis)} are neither numbers nor dates, so that nothing is between them; "
            "use_coordinate=False goes by position"
        )
    order = np.argsort(x, kind="stable")
    # Dates in nanoseconds have more digits than a float, so distances from the first date are used.
    return _LabelPlaces(tuple((x[order] - x[order[0]]).tolist()), Gather(order), Gather(np.argsort(order)))


def as_numbers(space: Space) -> np.ndarray[Any, Any] | None:
    """Return the labels of a Space as numbers (those of dates and durations as integers), None if they are something else."""
    dates = get_dates(space)
    if dates is not None:
        return dates.astype(np.int64)
    labels: list[Any] = list(space)
    if not all(isinstance(label, numbers.Real) and not isinstance(label, bool) for label in labels):
        return None
    return np.array([float(label) for label in labels], np.float64)
