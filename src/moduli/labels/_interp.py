"""Linear interpolation between the labels of an axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ._axes import Axes, cache_by_axes, intern_pairs
from ._gather import Gather, index_of
from ._neighbours import sort_labels
from ._space import Space, show_labels
from ._tensor import Tensor, finish, method


@method
def interp(t: Tensor, points: Mapping[Any, Any] | None = None, /, fill: complex | None = None, **named: Any) -> Tensor:
    """Values between the labels of axes, by linear interpolation; differentiable in the data.

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
        several, frozen = _freeze_points(wanted)
        below, above, weights, outside, left = _plan(axes, axis, several, frozen, fill is not None)
        shape = [1] * data.ndim
        shape[axis] = -1
        low, high = (data.index_select(axis, index_of(each, data)) for each in (below, above))
        weight = torch.tensor(weights, dtype=data.real.dtype, device=data.device).reshape(shape)
        data = low + (high - low) * weight
        if any(outside):
            mask = torch.tensor(outside, device=data.device).reshape(shape)
            data = torch.where(mask, torch.as_tensor(fill, dtype=data.dtype, device=data.device), data)
        data, axes = (data if several else data.squeeze(axis)), left
    return finish(data, axes)


def _freeze_points(wanted: Any) -> tuple[bool, tuple[Any, ...]]:
    if isinstance(wanted, Space):
        return True, tuple(wanted.labels)
    if isinstance(wanted, Tensor):
        wanted = wanted._data
    if isinstance(wanted, (torch.Tensor, np.ndarray, np.generic)):
        wanted = wanted.tolist()
    several = isinstance(wanted, (list, tuple, range))
    return several, tuple(wanted) if several else (wanted,)


@cache_by_axes
def _plan(
    axes: Axes, axis: int, several: bool, wanted: tuple[Any, ...], fills: bool
) -> tuple[Gather, Gather, tuple[float, ...], tuple[bool, ...], Axes]:
    """The positions below and above each point, the weight of the one above, whether it is outside, and the axes left."""
    known = sort_labels(axes, axis, "interp")
    try:
        labels, points = np.array(known.labels, np.float64), np.array(wanted, np.float64)
    except (TypeError, ValueError):
        raise TypeError(
            f"interp needs numbers, but the labels of {axes.describe(axis)} are {show_labels(known.labels)} and the points "
            f"{list(wanted)}"
        ) from None
    if not len(labels):
        raise ValueError(f"{axes.describe(axis)} has no labels to interpolate between")
    outside = ~((points >= labels[0]) & (points <= labels[-1]))
    if outside.any() and not fills:
        raise ValueError(
            f"{wanted[int(outside.argmax())]!r} is outside of the labels of {axes.describe(axis)}, from {known.labels[0]!r} to "
            f"{known.labels[-1]!r}; give fill= for such points"
        )
    below = np.clip(np.searchsorted(labels, points, side="right") - 1, 0, len(labels) - 1)
    # On a label itself, its neighbour has no part in the value, not even as a NaN.
    above = np.where((labels[below] == points) | outside, below, np.minimum(below + 1, len(labels) - 1))
    width = labels[above] - labels[below]
    weights = np.where(width > 0, (points - labels[below]) / np.where(width > 0, width, 1.0), 0.0)
    positions = np.array(known.positions)
    pairs = axes.pairs()
    pairs[axis : axis + 1] = [(axes.names[axis], Space(wanted))] if several else []
    return (
        Gather(positions[below]),
        Gather(positions[above]),
        tuple(weights.tolist()),
        tuple(outside.tolist()),
        intern_pairs(pairs),
    )
