"""Axes reduced: sums, means, extrema, norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._axes import Axes, DimLike, DimsLike, cache_by_axes, intern
from ._space import BROADCAST, Space
from ._tensor import Tensor, finish, method


def _key(dim: DimsLike) -> DimsLike:
    return tuple(dim) if type(dim) is list else dim


def _reduce_axes(axes: Axes, dim: DimsLike, keepdim: bool) -> tuple[tuple[int, ...], Axes]:
    gone = axes.axes(dim)
    if keepdim:
        spaces = [_require_broadcast(axes, i) if i in gone else space for i, space in enumerate(axes.spaces)]
        return gone, intern(axes.names, spaces)
    kept = [i for i in range(axes.ndim) if i not in gone]
    return gone, intern([axes.names[i] for i in kept], [axes.spaces[i] for i in kept])


def _require_broadcast(axes: Axes, at: int) -> Space:
    name = axes.names[at]
    return BROADCAST if name is None else BROADCAST.rename(name)


@cache_by_axes
def _one(axes: Axes, dim: DimLike, keepdim: bool) -> tuple[int, Axes]:
    at = axes.axis(dim)
    return at, axes.run(_reduce_axes, at, keepdim)[1]


# -- sums and extrema --------------------------------------------------------------------------------------------------


@method
def sum(t: Tensor, dim: DimsLike = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over axes.

    Args:
        t: The tensor.
        dim: The axes to sum over, by name (``"y x"``) or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.
        dtype: The dtype to add in.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[1.0, 2.0], [3.0, 4.0]], row=["a", "b"], column=["p", "q"])
        >>> t.sum("row")
        Tensor(column: p=4., q=6.)
    """
    gone, axes = t._axes.run(_reduce_axes, dim if type(dim) is not list else tuple(dim), keepdim)
    if len(gone) == 1 and dtype is None and not keepdim:  # the common case, in the form that torch parses fastest
        return finish(t._data.sum(gone[0]), axes)
    return finish(torch.sum(t._data, gone, keepdim, dtype=dtype), axes) if gone else finish(_same(t._data, dtype), axes)


def _same(data: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A sum over no axes: torch takes an empty tuple for all of them."""
    wider = torch.int64 if not (data.is_floating_point() or data.is_complex()) else data.dtype
    return data.to(dtype or wider, copy=True)


@method
def mean(t: Tensor, dim: DimsLike = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The mean over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.
        dtype: The dtype to compute in.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([[1.0, 2.0], [3.0, 4.0]], "row column").mean("column")
        Tensor(row: [1.5000, 3.5000])
    """
    gone, axes = t._axes.run(_reduce_axes, _key(dim), keepdim)
    if not gone:
        return finish(torch.mean(t._data.unsqueeze(0), 0, dtype=dtype), axes)
    return finish(torch.mean(t._data, gone, keepdim, dtype=dtype), axes)


@method
def prod(t: Tensor, dim: DimsLike = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The product over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.
        dtype: The dtype to multiply in.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([[1.0, 2.0], [3.0, 4.0]], "row column").prod().item()
        24.0
    """
    gone, axes = t._axes.run(_reduce_axes, _key(dim), keepdim)
    data = t._data if gone else _same(t._data, dtype)
    for at in sorted(gone, reverse=True):
        data = torch.prod(data, at, keepdim, dtype=dtype)
    return finish(data, axes)


def _reduce_data(
    function: Callable[..., torch.Tensor], t: Tensor, dim: DimsLike, keepdim: bool, **options: Any
) -> Tensor:
    gone, axes = t._axes.run(_reduce_axes, _key(dim), keepdim)
    if not gone:  # torch takes an empty tuple for all axes
        return finish(function(t._data.unsqueeze(0), dim=(0,), **options), axes)
    return finish(function(t._data, dim=gone, keepdim=keepdim, **options), axes)


@method
def std(t: Tensor, dim: DimsLike = None, keepdim: bool = False, *, correction: float = 1) -> Tensor:
    """The standard deviation over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.
        correction: What is subtracted from the number of elements in the denominator.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0, 3.0], "x").std().item()
        1.0
    """
    return _reduce_data(torch.std, t, dim, keepdim, correction=correction)


@method
def var(t: Tensor, dim: DimsLike = None, keepdim: bool = False, *, correction: float = 1) -> Tensor:
    """The variance over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.
        correction: What is subtracted from the number of elements in the denominator.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0, 3.0], "x").var(correction=0).item()
        0.6666666865348816
    """
    return _reduce_data(torch.var, t, dim, keepdim, correction=correction)


@method
def amin(t: Tensor, dim: DimsLike = None, keepdim: bool = False) -> Tensor:
    """The smallest element over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([[1.0, 2.0], [3.0, 0.0]], "row column").amin("column")
        Tensor(row: [1., 0.])
    """
    return _reduce_data(torch.amin, t, dim, keepdim)


@method
def amax(t: Tensor, dim: DimsLike = None, keepdim: bool = False) -> Tensor:
    """The largest element over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([[1.0, 2.0], [3.0, 0.0]], "row column").amax("column")
        Tensor(row: [2., 3.])
    """
    return _reduce_data(torch.amax, t, dim, keepdim)


@method
def any(t: Tensor, dim: DimsLike = None, keepdim: bool = False) -> Tensor:
    """Whether any element is true, over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.

    Example:
        >>> import moduli as mo
        >>> bool((mo.tensor([1.0, 2.0], "x") > 1.5).any())
        True
    """
    gone, axes = t._axes.run(_reduce_axes, _key(dim), keepdim)
    return finish(torch.any(t._data, dim=gone, keepdim=keepdim) if gone else t._data.to(torch.bool), axes)


@method
def all(t: Tensor, dim: DimsLike = None, keepdim: bool = False) -> Tensor:
    """Whether all elements are true, over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.

    Example:
        >>> import moduli as mo
        >>> bool((mo.tensor([1.0, 2.0], "x") > 1.5).all())
        False
    """
    gone, axes = t._axes.run(_reduce_axes, _key(dim), keepdim)
    return finish(torch.all(t._data, dim=gone, keepdim=keepdim) if gone else t._data.to(torch.bool), axes)


@method
def norm(t: Tensor, ord: float = 2.0, dim: DimsLike = None, keepdim: bool = False) -> Tensor:
    """The vector norm (sum of |x|^ord)^(1/ord) over axes.

    Args:
        t: The tensor.
        ord: The order; ``inf`` for the largest magnitude, 0 for the number of non-zero elements.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([3.0, 4.0], "x").norm().item()
        5.0
    """
    gone, axes = t._axes.run(_reduce_axes, _key(dim), keepdim)
    data = t._data if gone else t._data.unsqueeze(0)
    result: torch.Tensor = torch.linalg.vector_norm(data, ord, gone or (0,), keepdim and bool(gone))
    return finish(result, axes)


@method
def logsumexp(t: Tensor, dim: DimsLike = None, keepdim: bool = False) -> Tensor:
    """The logarithm of the sum of exponentials over axes, computed without overflow.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1000.0, 1000.0], "x").logsumexp("x").item()
        1000.6931762695312
    """
    return _reduce_data(torch.logsumexp, t, dim, keepdim)


@method
def nansum(t: Tensor, dim: DimsLike = None, keepdim: bool = False) -> Tensor:
    """The sum over axes of the elements that are not NaN.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, float("nan")], "x").nansum().item()
        1.0
    """
    return _reduce_data(torch.nansum, t, dim, keepdim)


@method
def nanmean(t: Tensor, dim: DimsLike = None, keepdim: bool = False) -> Tensor:
    """The mean over axes of the elements that are not NaN.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, float("nan")], "x").nanmean().item()
        1.0
    """
    return _reduce_data(torch.nanmean, t, dim, keepdim)


@method
def count_nonzero(t: Tensor, dim: DimsLike = None) -> Tensor:
    """The number of elements that are not zero, over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 0.0], "x").count_nonzero().item()
        1
    """
    gone, axes = t._axes.run(_reduce_axes, _key(dim), False)
    return finish(torch.count_nonzero(t._data, gone) if gone else (t._data != 0).to(torch.int64), axes)
