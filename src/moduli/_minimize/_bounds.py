"""Bounds: by projection onto the box, or by a change of variables that can't leave it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..optim import Module, Objective
from ._point import Point

__all__ = ["Box", "Free"]


class Box:
    """Lower and upper bounds for every leaf.

    Args:
        point: The starting point.
        bounds: (low, high); each None, a number, or in the form of x0.
        transform: Whether variables are changed; otherwise points are projected.
    """

    def __init__(self, point: Point, bounds: Any, transform: bool) -> None:
        if not isinstance(bounds, list | tuple) or len(bounds) != 2:
            raise TypeError("minimize: bounds are (low, high), each None, a number, or in the form of x0")
        self.low, self.high = point.spread(bounds[0], "the lower bound"), point.spread(bounds[1], "the upper bound")
        self.transform = transform
        for name, leaf, low, high in zip(point.names, point.leaves, self.low, self.high, strict=True):
            if low is not None and high is not None and bool((low >= high).any()):
                raise ValueError(f"minimize: a lower bound of {name} is not below its upper bound")
            outside = torch.zeros_like(leaf, dtype=torch.bool)
            if low is not None:
                outside |= leaf < low
            if high is not None:
                outside |= leaf > high
            if bool(outside.any()):
                raise ValueError(
                    f"minimize: the start is outside of the bounds ({int(outside.sum())} numbers of {name}); start inside, "
                    "for instance at x0.clamp(low, high)"
                )

    def inside(self, leaves: list[Tensor], rows: Tensor | None = None) -> list[Tensor]:
        """The point that the function sees; of batched starts, those in these rows."""
        lows, highs = self.low, self.high
        if rows is not None:
            lows, highs = (
                [None if b is None else b[rows] for b in lows],
                [None if b is None else b[rows] for b in highs],
            )
        at = _open if self.transform else _clamp
        return [at(z, low, high) for z, low, high in zip(leaves, lows, highs, strict=True)]

    def start(self, leaves: list[Tensor]) -> list[Tensor]:
        """Where the variables start, so that the function sees these leaves."""
        if not self.transform:
            return leaves
        return [_closed(x, low, high) for x, low, high in zip(leaves, self.low, self.high, strict=True)]

    def project(self, leaves: list[Tensor]) -> None:
        """Put the variables back into the box."""
        if not self.transform:
            with torch.no_grad():
                for z, low, high in zip(leaves, self.low, self.high, strict=True):
                    z.copy_(_clamp(z, low, high))

    def free(self, leaves: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
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


def _clamp(z: Tensor, low: Tensor | None, high: Tensor | None) -> Tensor:
    return z if low is None and high is None else torch.clamp(z, low, high)


def _open(z: Tensor, low: Tensor | None, high: Tensor | None) -> Tensor:
    """A smooth map of all numbers onto the box."""
    if low is not None and high is not None:
        return low + (high - low) * 0.5 * (1 + torch.sin(z))
    if low is not None:
        return low - 1 + torch.sqrt(z * z + 1)
    if high is not None:
        return high + 1 - torch.sqrt(z * z + 1)
    return z


def _closed(x: Tensor, low: Tensor | None, high: Tensor | None) -> Tensor:
    # At a bound the map is flat, so that the gradient there would be zero: start a little inside.
    x = x.detach()
    if low is not None and high is not None:
        t = ((x - low) / (high - low)).clamp(1e-3, 1 - 1e-3)
        return torch.asin(2 * t - 1)
    if low is not None:
        return torch.sqrt((x - low + 1).clamp(min=1 + 1e-6) ** 2 - 1)
    if high is not None:
        return torch.sqrt((high - x + 1).clamp(min=1 + 1e-6) ** 2 - 1)
    return x


class Free(Module):
    """Takes out of the update what pushes against a bound."""

    def __init__(self, box: Box) -> None:
        super().__init__()
        self.box = box

    def apply(self, objective: Objective) -> Objective:
        """Zero where a variable is held by its bound."""
        free = self.box.free(objective.params, objective.get_grads())
        objective.updates = [u * f for u, f in zip(objective.peek_updates(), free, strict=True)]
        return objective
