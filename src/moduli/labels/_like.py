"""Factories of structured tensors: the identity by label, a range of numbers, tensors with the axes of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._axes import SCALAR, Axes, axes_of, cache_by_axes
from ._factories import Dim, Dtype, Like, Place, Randomness, _freeze, _layout, _place
from ._gather import Gather, gather
from ._space import Space
from ._tensor import RULES, Tensor, as_tensor, finish, wrap


def eye(
    space: Dim, other: Dim | None = None, *, dtype: Dtype = None, device: Place = None, requires_grad: bool = False
) -> Tensor:
    """Return the identity matrix: one where the label of the row equals that of the column, zero elsewhere.

    Positional axes go by position. Two labelled axes may have different labels: what has no partner is a row or column
    of zeros, so that ``eye(a, b)`` picks the labels of ``a`` out of ``b``.

    Args:
        space: The rows: a size, a Space, or a list of labels.
        other: The columns, by default the same as the rows; required if the rows have a name, as two axes can't
            share it.
        dtype: The dtype, torch's default one if None.
        device: Where it lives, torch's default device if None.
        requires_grad: Whether gradients are recorded.

    Returns:
        The matrix.

    Raises:
        TypeError: If an argument is no axis.
        ValueError: If the axes have the same name, or one is BROADCAST.

    Example:
        >>> import moduli as mo
        >>> mo.eye(["a", "b"], ["b", "a"]).data.tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    axes, rows, columns, plan = _identity(SCALAR, _freeze(space), _freeze(space if other is None else other))
    data = torch.eye(rows if plan is None else columns, columns, dtype=dtype, device=_place(device))
    if plan is not None:
        data = gather(data, 0, plan, 0.0)
    return wrap(data.requires_grad_() if requires_grad else data, axes)


@cache_by_axes
def _identity(anchor: Axes, space: Any, other: Any) -> tuple[Axes, int, int, Gather | None]:
    """Return the axes, the sizes, and the positions of the rows' labels among the columns; None if they are in order."""
    row, column = Space(space), Space(other)
    axes = axes_of([row, column])
    axes.refuse_broadcast((0, 1), "", ", which stands for any size, so it can't be a row or column of an identity")
    by_label = row.labelled and column.labelled and row._labels != column._labels
    return axes, len(row), len(column), Gather(column.locate(row)) if by_label else None


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1,
    name: str | None = None,
    *,
    dtype: Dtype = None,
    device: Place = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return the numbers from ``start`` up to, not including, ``stop``, on one positional axis.

    Args:
        start: The first number; with a single argument, where to stop, starting from 0.
        stop: Where to stop.
        step: The difference of neighbours.
        name: The name of the axis.
        dtype: The dtype, by default int64 for integers and torch's default one otherwise.
        device: Where it lives, torch's default device if None.
        requires_grad: Whether gradients are recorded.

    Returns:
        The tensor.

    Raises:
        RuntimeError: If the step leads away from ``stop``, or is 0.
        ValueError: If the name is not usable.

    Example:
        >>> import moduli as mo
        >>> mo.arange(3, name="time")
        Tensor(time: [0, 1, 2])
    """
    if stop is None:
        start, stop = 0, start
    data = torch.arange(start, stop, step, dtype=dtype, device=_place(device), requires_grad=requires_grad)
    return wrap(data, _layout(SCALAR, (name,), None)[0])


# -- like another ------------------------------------------------------------------------------------------------------


def zeros_like(t: Like, *, dtype: Dtype = None, device: Place = None, requires_grad: bool = False) -> Tensor:
    """Return zeros with the axes of another tensor.

    Args:
        t: The tensor to be like.
        dtype: The dtype, that of ``t`` if None.
        device: Where it lives, where ``t`` does if None.
        requires_grad: Whether gradients are recorded.

    Returns:
        The tensor.

    Example:
        >>> import moduli as mo
        >>> mo.zeros_like(mo.tensor([1.0, 2.0], x=["a", "b"]))
        Tensor(x: a=0., b=0.)
    """
    t = as_tensor(t)
    return finish(torch.zeros_like(t._data, dtype=dtype, device=_place(device), requires_grad=requires_grad), t._axes)


def ones_like(t: Like, *, dtype: Dtype = None, device: Place = None, requires_grad: bool = False) -> Tensor:
    """Return ones with the axes of another tensor.

    Args:
        t: The tensor to be like.
        dtype: The dtype, that of ``t`` if None.
        device: Where it lives, where ``t`` does if None.
        requires_grad: Whether gradients are recorded.

    Returns:
        The tensor.

    Example:
        >>> import moduli as mo
        >>> mo.ones_like(mo.tensor([1.0, 2.0], x=["a", "b"]))
        Tensor(x: a=1., b=1.)
    """
    t = as_tensor(t)
    return finish(torch.ones_like(t._data, dtype=dtype, device=_place(device), requires_grad=requires_grad), t._axes)


def full_like(
    t: Like, fill_value: complex, *, dtype: Dtype = None, device: Place = None, requires_grad: bool = False
) -> Tensor:
    """Return a tensor of one number with the axes of another tensor.

    Args:
        t: The tensor to be like.
        fill_value: The number.
        dtype: The dtype, that of ``t`` if None.
        device: Where it lives, where ``t`` does if None.
        requires_grad: Whether gradients are recorded.

    Returns:
        The tensor.

    Example:
        >>> import moduli as mo
        >>> mo.full_like(mo.tensor([1.0, 2.0], x=["a", "b"]), 7)
        Tensor(x: a=7., b=7.)
    """
    t = as_tensor(t)
    data = torch.full_like(t._data, fill_value, dtype=dtype, device=_place(device), requires_grad=requires_grad)
    return finish(data, t._axes)


def empty_like(t: Like, *, dtype: Dtype = None, device: Place = None, requires_grad: bool = False) -> Tensor:
    """Return a tensor with the axes of another and uninitialised values.

    Args:
        t: The tensor to be like.
        dtype: The dtype, that of ``t`` if None.
        device: Where it lives, where ``t`` does if None.
        requires_grad: Whether gradients are recorded.

    Returns:
        The tensor.

    Example:
        >>> import moduli as mo
        >>> mo.empty_like(mo.tensor([1.0, 2.0], x=["a", "b"])).dims
        (Space(['a', 'b'], name='x'),)
    """
    t = as_tensor(t)
    return finish(torch.empty_like(t._data, dtype=dtype, device=_place(device), requires_grad=requires_grad), t._axes)


def rand_like(
    t: Like, *, generator: Randomness = None, dtype: Dtype = None, device: Place = None, requires_grad: bool = False
) -> Tensor:
    """Return numbers drawn uniformly from [0, 1), with the axes of another tensor.

    Args:
        t: The tensor to be like.
        generator: Where the randomness comes from, torch's global one if None.
        dtype: The dtype, that of ``t`` if None.
        device: Where it lives, where ``t`` does if None.
        requires_grad: Whether gradients are recorded.

    Returns:
        The tensor.

    Example:
        >>> import moduli as mo
        >>> mo.rand_like(mo.zeros(channel=["r", "g"])).names
        ('channel',)
    """
    return _draw_like(torch.rand, t, generator, dtype, device, requires_grad)


def randn_like(
    t: Like, *, generator: Randomness = None, dtype: Dtype = None, device: Place = None, requires_grad: bool = False
) -> Tensor:
    """Return numbers drawn from the normal distribution of mean 0 and variance 1, with the axes of another tensor.

    Args:
        t: The tensor to be like.
        generator: Where the randomness comes from, torch's global one if None.
        dtype: The dtype, that of ``t`` if None.
        device: Where it lives, where ``t`` does if None.
        requires_grad: Whether gradients are recorded.

    Returns:
        The tensor.

    Example:
        >>> import moduli as mo
        >>> mo.randn_like(mo.zeros(channel=["r", "g"])).shape
        torch.Size([2])
    """
    return _draw_like(torch.randn, t, generator, dtype, device, requires_grad)


def _draw_like(
    draw: Callable[..., torch.Tensor], t: Like, generator: Randomness, dtype: Dtype, device: Place, requires_grad: bool
) -> Tensor:
    t = as_tensor(t)
    dtype, place = dtype or t._data.dtype, _place(device) or t._data.device
    data = draw(t._data.shape, generator=generator, dtype=dtype, device=place, requires_grad=requires_grad)
    return finish(data, t._axes)


def _like_rule(function: Callable[..., torch.Tensor]) -> Callable[..., Tensor]:
    """Return the rule of a function whose result has the axes of its argument."""

    def rule(input: Tensor, *args: Any, **options: Any) -> Tensor:
        if "device" in options:
            options["device"] = _place(options["device"])
        return finish(function(input._data, *args, **options), input._axes)

    return rule


for _name in ("zeros", "ones", "full", "empty", "rand", "randn", "randint"):
    RULES[getattr(torch, f"{_name}_like")] = _like_rule(getattr(torch, f"{_name}_like"))
