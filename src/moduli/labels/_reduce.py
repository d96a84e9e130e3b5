"""Axes reduced: sums, means, extrema, norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _fold as fold
from ._axes import Axes, DimsLike, as_key, intern
from ._space import BROADCAST
from ._tensor import Tensor, finish, method


def reduce_axes(axes: Axes, dim: DimsLike, keepdim: bool) -> tuple[tuple[int, ...], Axes]:
    """Return the positions of the reduced axes, and the axes of the result.

    Args:
        axes: The axes of the tensor.
        dim: The axes to reduce.
        keepdim: Whether to keep them as BROADCAST axes.
    """
    gone = axes.axes(dim)
    if not keepdim:
        return gone, axes.drop(*gone)
    result = intern(axes.names, [BROADCAST if i in gone else space for i, space in enumerate(axes.spaces)])
    return gone, result if axes.coordinates is None else result.mark(axes.coordinates.keep(axes.drop(*gone).names))


def fold_axes(
    function: Callable[..., torch.Tensor], t: Tensor, dim: DimsLike, keepdim: bool, *args: Any, **options: Any
) -> Tensor:
    """Reduce along axes by a function of `_fold.py`.

    Args:
        function: The function.
        t: The tensor.
        dim: The axes.
        keepdim: Whether to keep them as BROADCAST axes.
        args: Further arguments of the function.
        options: Its keyword arguments.
    """
    gone, axes = t._axes.run(reduce_axes, as_key(dim), keepdim)
    result = function(fold.AxesFold(gone), t._data, *args, **options)
    return finish(result if keepdim else result.squeeze(gone), axes)


def _reduce_data(
    function: Callable[..., torch.Tensor], t: Tensor, dim: DimsLike, keepdim: bool, **options: Any
) -> Tensor:
    gone, axes = t._axes.run(reduce_axes, as_key(dim), keepdim)
    if not gone:  # torch takes an empty tuple for all axes
        return finish(function(t._data.unsqueeze(0), dim=(0,), **options), axes)
    return finish(function(t._data, dim=gone, keepdim=keepdim, **options), axes)


# -- sums and extrema --------------------------------------------------------------------------------------------------


@method
def sum(
    t: Tensor, dim: DimsLike = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, skipna: bool = False
) -> Tensor:
    """Return the sum over axes.

    Args:
        t: The tensor.
        dim: The axes to sum over, by name (``"y x"``) or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.
        dtype: The dtype to add in.
        skipna: Leave out NaN; the sum of nothing is 0.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[1.0, 2.0], [3.0, 4.0]], row=["a", "b"], column=["p", "q"])
        >>> t.sum("row")
        Tensor(column: p=4., q=6.)
    """
    if skipna:
        return fold_axes(fold.add, t if dtype is None else t.to(dtype), dim, keepdim, True)
    gone, axes = t._axes.run(reduce_axes, as_key(dim), keepdim)
    if len(gone) == 1 and dtype is None and not keepdim:  # the common case, in the form that torch parses fastest
        return finish(t._data.sum(gone[0]), axes)
    return _reduce_data(torch.sum, t, gone, keepdim, dtype=dtype)


@method
def mean(
    t: Tensor, dim: DimsLike = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, skipna: bool = False
) -> Tensor:
    """Return the mean over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.
        dtype: The dtype to compute in.
        skipna: Leave out NaN; the mean of nothing is NaN.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([[1.0, 2.0], [3.0, 4.0]], "row column").mean("column")
        Tensor(row: [1.5000, 3.5000])
    """
    if skipna:
        return fold_axes(fold.mean, t if dtype is None else t.to(dtype), dim, keepdim, True)
    return _reduce_data(torch.mean, t, dim, keepdim, dtype=dtype)


@method
def prod(t: Tensor, dim: DimsLike = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the product over axes.

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
    gone, axes = t._axes.run(reduce_axes, as_key(dim), keepdim)
    data = t._data if gone else torch.prod(t._data.unsqueeze(0), 0, dtype=dtype)
    for at in sorted(gone, reverse=True):
        data = torch.prod(data, at, keepdim, dtype=dtype)
    return finish(data, axes)


@method
def std(
    t: Tensor, dim: DimsLike = None, keepdim: bool = False, *, correction: float = 1, skipna: bool = False
) -> Tensor:
    """Return the standard deviation over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.
        correction: What is subtracted from the number of elements in the denominator.
        skipna: Leave out NaN; NaN where no more than `correction` elements are left.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0, 3.0], "x").std().item()
        1.0
    """
    if skipna:
        return fold_axes(fold.std, t, dim, keepdim, True, correction)
    return _reduce_data(torch.std, t, dim, keepdim, correction=correction)


@method
def var(
    t: Tensor, dim: DimsLike = None, keepdim: bool = False, *, correction: float = 1, skipna: bool = False
) -> Tensor:
    """Return the variance over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.
        correction: What is subtracted from the number of elements in the denominator.
        skipna: Leave out NaN; NaN where no more than `correction` elements are left.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0, 3.0], "x").var(correction=0).item()
        0.6666666865348816
    """
    if skipna:
        return fold_axes(fold.var, t, dim, keepdim, True, correction)
    return _reduce_data(torch.var, t, dim, keepdim, correction=correction)


@method
def amin(t: Tensor, dim: DimsLike = None, keepdim: bool = False, *, skipna: bool = False) -> Tensor:
    """Return the smallest element over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.
        skipna: Leave out NaN; NaN where nothing is left.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([[1.0, 2.0], [3.0, 0.0]], "row column").amin("column")
        Tensor(row: [1., 0.])
    """
    if skipna:
        return fold_axes(fold.extreme, t, dim, keepdim, "amin", True)
    return _reduce_data(torch.amin, t, dim, keepdim)


@method
def amax(t: Tensor, dim: DimsLike = None, keepdim: bool = False, *, skipna: bool = False) -> Tensor:
    """Return the largest element over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.
        keepdim: Keep them as BROADCAST axes of the same names.
        skipna: Leave out NaN; NaN where nothing is left.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([[1.0, 2.0], [3.0, 0.0]], "row column").amax("column")
        Tensor(row: [2., 3.])
    """
    if skipna:
        return fold_axes(fold.extreme, t, dim, keepdim, "amax", True)
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
    return _reduce_data(torch.any, t, dim, keepdim)


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
    return _reduce_data(torch.all, t, dim, keepdim)


@method
def norm(t: Tensor, ord: float = 2.0, dim: DimsLike = None, keepdim: bool = False) -> Tensor:
    """Return the vector norm (sum of |x|^ord)^(1/ord) over axes.

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
    order: Any = ord
    if isinstance(order, str):
        raise TypeError(
            f"norm: the first argument is the order; write dim={order!r} for the axis, or a number for the order"
        )
    return _reduce_data(torch.linalg.vector_norm, t, dim, keepdim, ord=ord)


@method
def logsumexp(t: Tensor, dim: DimsLike = None, keepdim: bool = False) -> Tensor:
    """Return the logarithm of the sum of exponentials over axes, computed without overflow.

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
    """Return the sum over axes of the elements that are not NaN.

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
    """Return the mean over axes of the elements that are not NaN.

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
    """Return the number of elements that are not zero, over axes.

    Args:
        t: The tensor.
        dim: The axes, by name or position; all by default.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 0.0], "x").count_nonzero().item()
        1
    """
    gone, axes = t._axes.run(reduce_axes, as_key(dim), False)
    return finish(torch.count_nonzero(t._data, gone) if gone else (t._data != 0).to(torch.int64), axes)
