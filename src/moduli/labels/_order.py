"""The order of entries within an axis: reversed or rotated, labels and all."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ._axes import Axes, DimLike, DimsLike, cache_by_axes, intern, intern_pairs
from ._space import Space
from ._tensor import RULES, Tensor, method, wrap


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
    which, axes = _flip_axes(t._axes, tuple(dim) if isinstance(dim, list) else dim)
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
    pairs = axes.pairs()
    pairs[at] = (axes.names[at], space if space.broadcast else Space(labels, space.name))
    return at, intern_pairs(pairs)


RULES[torch.flip] = flip
RULES[torch.roll] = roll
