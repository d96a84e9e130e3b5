"""Bounds as they are written, and what the optimizer moves: the numbers of x0, as they are or changed to stay within them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..labels import Tensor as Labelled
from ._point import StartPoint

Bound = Tensor | None


class Variables:
    """The variables of a run, and the way from them to the point that the function sees.

    A number whose bounds are equal is put onto them, and stays: nothing that it could follow is left of its gradient.

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
        """For each leaf which numbers have equal bounds; None where none has."""
        pairs = zip(self.low, self.high, strict=True)
        return [None if a is None or b is None else a == b for a, b in pairs]

    def seen(self, leaves: list[Tensor] | None = None) -> list[Tensor]:
        """The leaves that the function sees, with their graph."""
        leaves = self.leaves if leaves is None else leaves
        if not self.bounded:
            return leaves
        at = _open if self.transform else _clamp
        return [at(z, a, b) for z, a, b in zip(leaves, self.low, self.high, strict=True)]

    def project(self) -> None:
        """Put the variables back into the box."""
        if self.bounded and not self.transform:
            with torch.no_grad():
                for z, inside in zip(self.leaves, self.seen(), strict=True):
                    z.copy_(inside)

    def find_free(self, leaves: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """For each number whether it can go downhill: not where it is at a bound that the gradient pushes against."""
        out = []
        for z, g, low, high in zip(leaves, grads, self.low, self.high, strict=True):
            held = torch.zeros_like(z, dtype=torch.bool)
            if low is not None:
                held |= (z <= low) & (g > 0)
            if high is not None:
                held |= (z >= high) & (g < 0)
            out.append(~held)
        return out

    def follow(self, values: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Gradients at the function's arguments, as far as bounds let them be followed."""
        ends = zip(values, grads, self.low, self.high, strict=True)
        return [g if low is None and high is None else x - _clamp(x - g, low, high) for x, g, low, high in ends]


def _clamp(z: Tensor, low: Bound, high: Bound) -> Tensor:
    return z if low is None and high is None else torch.clamp(z, low, high)


def _sides(x: Tensor, low: Bound, high: Bound) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Finite bounds, and which of them count; zeros elsewhere, so that nothing infinite enters a graph."""
    a = torch.full_like(x, -torch.inf) if low is None else low
    b = torch.full_like(x, torch.inf) if high is None else high
    below, above = a.isfinite(), b.isfinite()
    return torch.where(below, a, 0.0), torch.where(above, b, 0.0), below, above


def _open(z: Tensor, low: Bound, high: Bound) -> Tensor:
    """A smooth map of all numbers onto the box."""
    if low is None and high is None:
        return z
    a, b, below, above = _sides(z.detach(), low, high)
    root = torch.sqrt(z * z + 1)
    one = torch.where(below, a - 1 + root, b + 1 - root)
    out = torch.where(below & above, a + (b - a) * 0.5 * (1 + torch.sin(z)), one)
    return torch.where(below | above, out, z)


def _close(x: Tensor, low: Bound, high: Bound) -> Tensor:
    """Where the variables start. At a bound the map is flat, so that the gradient would be zero: a little inside."""
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
    """The lower and upper bound of every leaf, as tensors of its shape; None where a whole leaf is open.

    Args:
        point: The starting point.
        bounds: Intervals, as SciPy has them.
        lower: A number, or in the form of x0, with None where it is open.
        upper: The same.
        batched: Whether the leaves hold many starts along their first axis; intervals are those of one of them.
    """
    if bounds is not None and (lower is not None or upper is not None):
        raise TypeError("minimize: give either bounds=, or lower= and upper=")
    if bounds is None and lower is None and upper is None:
        return [None] * len(point.leaves), [None] * len(point.leaves)
    if hasattr(bounds, "lb") and hasattr(bounds, "ub"):  # scipy.optimize.Bounds
        lower, upper, bounds = bounds.lb, bounds.ub, None
    if isinstance(bounds, Iterator):
        bounds = list(bounds)
    sides: Sequence[tuple[Any, Any]]
    if bounds is None:
        both = (point.match(lower, "lower bounds", _is_end), point.match(upper, "upper bounds", _is_end))
        sides = list(zip(*both, strict=True))
    else:
        given = point.match(bounds, "bounds", _is_interval)
        sides = [_part_intervals(*one, batched) for one in zip(given, point.leaves, point.names, strict=True)]
    low: list[Bound] = []
    high: list[Bound] = []
    for (below, above), name, leaf in zip(sides, point.names, point.leaves, strict=True):
        a, b = _read_side(below, leaf, name, "lower", -torch.inf), _read_side(above, leaf, name, "upper", torch.inf)
        _check(name, leaf, a, b)
        low.append(None if bool((a == -torch.inf).all()) else a)
        high.append(None if bool((b == torch.inf).all()) else b)
    return low, high


def _check(name: str, leaf: Tensor, low: Tensor, high: Tensor) -> None:
    if leaf.is_complex():
        if bool((low.real > -torch.inf).any() | (high.real < torch.inf).any()):
            raise TypeError(f"minimize: {name} is complex, and complex numbers have no order; bound its parts instead")
        return
    if bool((low.isnan() | high.isnan()).any()):
        raise ValueError(f"minimize: a bound of {name} is not a number; None is open")
    if bool((low > high).any()):
        raise ValueError(f"minimize: a lower bound of {name} is not below its upper bound, nor equal to it (fixed)")
    # What is fixed is put where it belongs.
    outside = ((leaf < low) | (leaf > high)) & ((low != high) | low.isinf())
    if bool(outside.any()):
        raise ValueError(f"minimize: the start is outside of the bounds in {int(outside.sum())} numbers of {name}")


def _read_side(given: Any, leaf: Tensor, name: str, side: str, end: float) -> Tensor:
    """A bound of one leaf: numbers that fit its shape; None is open."""
    if isinstance(given, bool | str):
        raise TypeError(f"minimize: {side} bounds are numbers in the form of x0, not {given!r}")
    if isinstance(given, list | tuple):
        given = [end if item is None else item for item in given]
    data = given.data if isinstance(given, Labelled) else given
    if not isinstance(data, Tensor):  # torch would round Python's numbers to single precision
        data = torch.as_tensor(np.asarray(end if data is None else data))
    try:
        return data.detach().to(leaf).expand_as(leaf).clone()
    except RuntimeError as error:
        raise ValueError(f"minimize: {side} of {name} does not fit the shape of x0: {error}") from None


def _is_end(value: Any) -> bool:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return value is None or number or (isinstance(value, Tensor | np.ndarray) and value.ndim == 0)


def _is_interval(given: Any) -> bool:
    return isinstance(given, list | tuple) and len(given) == 2 and all(map(_is_end, given))


def _part_intervals(given: Any, leaf: Tensor, name: str, batched: bool) -> tuple[Any, Any]:
    """Both bounds of one leaf from an interval, a list of intervals, or an array with intervals along its last axis."""
    one = leaf[0] if batched and leaf.dim() else leaf
    if given is None or _is_interval(given):
        return given or (None, None)
    if isinstance(given, np.ndarray) and given.dtype == object:
        given = given.tolist()
    if isinstance(given, list | tuple) and all(pair is None or _is_interval(pair) for pair in given):
        ends = [(-torch.inf, torch.inf) if pair is None else pair for pair in given]
        open_ = [(-torch.inf if a is None else a, torch.inf if b is None else b) for a, b in ends]
        given = torch.tensor(open_[0] if one.dim() == 0 and len(open_) == 1 else open_, dtype=torch.float64)
    if not isinstance(given, Tensor | Labelled | np.ndarray) or getattr(given.dtype, "kind", "f") not in "iuf":
        forms = "give (low, high) for all variables, a list of those, or a dictionary by name, or lower= and upper="
        raise TypeError(f"minimize: bounds of {name} are not understood; {forms}")
    data = torch.as_tensor(given.data if isinstance(given, Labelled) else given)
    if data.shape not in ((2,), (*one.shape, 2), (*leaf.shape, 2)):
        fact = f"minimize: {name} has {one.numel()} variables, and its bounds are of shape {tuple(data.shape)}"
        raise ValueError(f"{fact}; give (low, high) for each of {tuple(one.shape)}, or one for all")
    low, high = data.unbind(-1)
    return low, high
