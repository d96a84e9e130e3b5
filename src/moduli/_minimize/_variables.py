"""What the optimizer moves: the numbers of x0, as they are or changed so that no value leaves the bounds."""

from __future__ import annotations

import torch
from torch import Tensor

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
                for z, a, b in zip(self.leaves, self.low, self.high, strict=True):
                    z.copy_(_clamp(z, a, b))

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
