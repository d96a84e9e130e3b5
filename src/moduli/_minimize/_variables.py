"""Reading bounds, and `Variables`: the tensors that the method moves, projected onto bounds or transformed to stay within them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..labels import Tensor as Labelled
from ._point import StartPoint, align_numbers

Bound = Tensor | None


class Variables:
    """The variables of a run, and their map to the function's argument.

    A number whose bounds are equal is set to them and stays fixed: its gradient is zero.

    Args:
        point: The starting point.
        low: The lower bound of every leaf.
        high: The upper bound of every leaf.
        transform: Whether bounds hold by a change of variables; otherwise points are projected.
    """

    def __init__(self, point: StartPoint, low: list[Bound], high: list[Bound], transform: bool) -> None:
        self.point, self.leaves, self.low, self.high, self.transform = point, point.leaves, low, high, transform
        self.bounded = any(b is not None for b in (*low, *high))
        start = _close if transform else _clamp
        with torch.no_grad():
            for leaf, a, b in zip(self.leaves, low, high, strict=True):
                leaf.copy_(start(leaf, a, b))

    def find_fixed(self) -> list[Tensor | None]:
        """Return, for each leaf, the mask of numbers with equal bounds; None if it has no bounds."""
        pairs = zip(self.low, self.high, strict=True)
        return [None if a is None or b is None else a == b for a, b in pairs]

    def seen(self, leaves: list[Tensor] | None = None) -> list[Tensor]:
        """Return the leaves that are passed to the function, with their graph."""
        leaves = self.leaves if leaves is None else leaves
        if not self.bounded:
            return leaves
        at = _open if self.transform else _clamp
        return [at(z, a, b) for z, a, b in zip(leaves, self.low, self.high, strict=True)]

    def project(self) -> None:
        """Project the variables onto the box."""
        if self.bounded and not self.transform:
            with torch.no_grad():
                for z, inside in zip(self.leaves, self.seen(), strict=True):
                    z.copy_(inside)

    def find_free(self, leaves: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Return the masks of the numbers that can go downhill: not those at a bound that the gradient pushes against."""
        out = []
        for z, g, low, high in zip(leaves, grads, self.low, self.high, strict=True):
            at_bound = torch.zeros_like(z, dtype=torch.bool)
            if low is not None:
                at_bound |= (z <= low) & (g > 0)
            if high is not None:
                at_bound |= (z >= high) & (g < 0)
            out.append(~at_bound)
        return out

    def follow(self, values: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Return projected gradients at the function's arguments."""
        ends = zip(values, grads, self.low, self.high, strict=True)
        return [g if low is None and high is None else x - _clamp(x - g, low, high) for x, g, low, high in ends]


def _clamp(z: Tensor, low: Bound, high: Bound) -> Tensor:
    return z if low is None and high is None else torch.clamp(z, low, high)


def _sides(x: Tensor, low: Bound, high: Bound) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return bounds with 0 instead of infinity, so that no infinity enters a graph, and the masks of finite ones."""
    a = torch.full_like(x, -torch.inf) if low is None else low
    b = torch.full_like(x, torch.inf) if high is None else high
    below, above = a.isfinite(), b.isfinite()
    return torch.where(below, a, 0.0), torch.where(above, b, 0.0), below, above


def _open(z: Tensor, low: Bound, high: Bound) -> Tensor:
    """Map all numbers smoothly onto the box."""
    if low is None and high is None:
        return z
    a, b, below, above = _sides(z.detach(), low, high)
    root = torch.sqrt(z * z + 1)
    one = torch.where(below, a - 1 + root, b + 1 - root)
    out = torch.where(below & above, a + (b - a) * 0.5 * (1 + torch.sin(z)), one)
    return torch.where(below | above, out, z)


def _close(x: Tensor, low: Bound, high: Bound) -> Tensor:
    """Return the numbers that `_open` maps to x; a point at a bound, where the map is flat, is moved slightly inside."""
    x = x.detach()
    if low is None and high is None:
        return x
    a, b, below, above = _sides(x, low, high)
    width = torch.where(below & above & (b > a), b - a, 1.0)
    both = torch.asin(2 * ((x - a) / width).clamp(1e-3, 1 - 1e-3) - 1)
    inward = torch.where(below, x - a, b - x) + 1
    one = torch.sqrt(inward.clamp(min=1 + 1e-6) ** 2 - 1)
    return torch.where(below & above, both, torch.where(below | above, one, x))


def read_bounds(
    point: StartPoint, bounds: Any, lower: Any, upper: Any, batched: bool = False
) -> tuple[list[Bound], list[Bound]]:
    """Return the lower and upper bound of every leaf, as tensors of its shape; None where a whole leaf is open.

    Args:
        point: The starting point.
        bounds: Intervals, in SciPy's form.
        lower: A number, or in the form of x0, with None where it is open.
        upper: The same.
        batched: Whether the leaves have many starts along their first axis; intervals are those of one start.
    """
    if bounds is not None and (lower is not None or upper is not None):
        raise TypeError("minimize: give either bounds=, or lower= and upper=")
    if bounds is None and lower is None and upper is None:
        return [None] * len(point.leaves), [None] * len(point.leaves)
    if hasattr(bounds, "lb") and hasattr(bounds, "ub"):  # scipy.optimize.Bounds
        lower, upper, bounds = bounds.lb, bounds.ub, None
    if bounds is None:
        ends = (point.match(lower, "lower bounds", _is_end), point.match(upper, "upper bounds", _is_end))
        sides: Sequence[tuple[Any, Any]] = list(zip(*ends, strict=True))
    else:
        sides = _match_intervals(point, bounds, batched)
    labels = point.list_labels()
    low: list[Bound] = []
    high: list[Bound] = []
    for (below, above), name, leaf, dims in zip(sides, point.names, point.leaves, labels, strict=True):
        below, above = (align_numbers(side, leaf, dims, f"minimize: bounds of {name}") for side in (below, above))
        a, b = _read_side(below, leaf, name, "lower", -torch.inf), _read_side(above, leaf, name, "upper", torch.inf)
        _check(name, leaf, a, b)
        low.append(None if bool((a == -torch.inf).all()) else a)
        high.append(None if bool((b == torch.inf).all()) else b)
    return low, high


def _match_intervals(point: StartPoint, bounds: Any, batched: bool) -> list[tuple[Any, Any]]:
    """Return both bounds of every leaf from intervals, one for all or in the form of x0."""
    bounds = list(bounds) if isinstance(bounds, Iterator) else bounds
    intervals = point.match(bounds, "bounds", _is_interval)
    return [_part_intervals(*one, batched) for one in zip(intervals, point.leaves, point.names, strict=True)]


def _check(name: str, leaf: Tensor, low: Tensor, high: Tensor) -> None:
    if leaf.is_complex():
        if bool((low.real > -torch.inf).any() | (high.real < torch.inf).any()):
            raise TypeError(f"minimize: {name} is complex, and complex numbers have no order; bound its parts instead")
        return
    if bool((low.isnan() | high.isnan()).any()):
        raise ValueError(f"minimize: a bound of {name} is not a number; None is open")
    if bool((low > high).any()):
        raise ValueError(f"minimize: a lower bound of {name} is not below its upper bound, nor equal to it (fixed)")
    # Numbers with equal bounds are set to them, wherever they start.
    outside = ((leaf < low) | (leaf > high)) & ((low != high) | low.isinf())
    if bool(outside.any()):
        raise ValueError(f"minimize: the start is outside of the bounds in {int(outside.sum())} numbers of {name}")


def _read_side(bound: Any, leaf: Tensor, name: str, side: str, end: float) -> Tensor:
    """Return a bound of one leaf as a tensor of its shape; None is open."""
    if isinstance(bound, bool | str):
        raise TypeError(f"minimize: {side} bounds are numbers in the form of x0, not {bound!r}")
    if isinstance(bound, list | tuple):
        bound = [end if item is None else item for item in bound]
    if not isinstance(bound, Tensor):  # torch would round Python's numbers to single precision
        bound = torch.as_tensor(np.asarray(end if bound is None else bound))
    try:
        read: Tensor = bound.detach().to(leaf).expand_as(leaf).clone()
    except RuntimeError as error:
        raise ValueError(f"minimize: {side} of {name} does not fit the shape of x0: {error}") from None
    return read


def _is_end(value: Any) -> bool:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return value is None or number or (isinstance(value, Tensor | np.ndarray) and value.ndim == 0)


def _is_interval(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_end, value))


def _stack_intervals(intervals: Any, scalar: bool) -> Any:
    """Return a list, or an array of objects, of intervals as a tensor with infinite open ends; others unmodified.

    Args:
        intervals: The intervals.
        scalar: Whether they are those of one number, so that a list of one is that interval.
    """
    if isinstance(intervals, np.ndarray) and intervals.dtype == object:
        intervals = intervals.tolist()
    if not isinstance(intervals, list | tuple) or not all(pair is None or _is_interval(pair) for pair in intervals):
        return intervals
    pairs = [(None, None) if pair is None else pair for pair in intervals]
    ends = [(-torch.inf if a is None else a, torch.inf if b is None else b) for a, b in pairs]
    return torch.tensor(ends[0] if scalar and len(ends) == 1 else ends, dtype=torch.float64)


def _part_intervals(intervals: Any, leaf: Tensor, name: str, batched: bool) -> tuple[Any, Any]:
    """Return both bounds of one leaf from an interval, a list of intervals, or an array with intervals along its last axis."""
    one = leaf[0] if batched and leaf.dim() else leaf
    if intervals is None or _is_interval(intervals):
        return intervals or (None, None)
    intervals = _stack_intervals(intervals, one.dim() == 0)
    if not isinstance(intervals, Tensor | Labelled | np.ndarray) or getattr(intervals.dtype, "kind", "f") not in "iuf":
        forms = "give (low, high) for all variables, a list of those, or a dictionary by name, or lower= and upper="
        raise TypeError(f"minimize: bounds of {name} are not understood; {forms}")
    if isinstance(intervals, Labelled) and intervals.data.dim() > 1 and intervals.data.shape[-1] == 2:
        return intervals[..., 0], intervals[..., 1]
    data = torch.as_tensor(intervals.data if isinstance(intervals, Labelled) else intervals)
    if data.shape not in ((2,), (*one.shape, 2), (*leaf.shape, 2)):
        fact = f"minimize: {name} has {one.numel()} variables, and its bounds are of shape {tuple(data.shape)}"
        raise ValueError(f"{fact}; give (low, high) for each of {tuple(one.shape)}, or one for all")
    low, high = data.unbind(-1)
    return low, high
