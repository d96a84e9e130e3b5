"""What the optimizer moves: the free numbers of x0, as they are or changed so that no value leaves the bounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._point import StartPoint

Bound = Tensor | None


class Variables:
    """The variables of a run, and the way from them to the point that the function sees.

    A number whose bounds are equal is no variable: a tensor that has such numbers is represented by the vector of its others.

    Args:
        point: The starting point.
        low: The lower bound of every leaf.
        high: The upper bound of every leaf.
        transform: Whether bounds hold by a change of variables; otherwise points are projected.
        batched: Whether leaves hold many starts, and so keep their shape; what is fixed then has no gradient.
    """

    def __init__(
        self, point: StartPoint, low: list[Bound], high: list[Bound], transform: bool, batched: bool = False
    ) -> None:
        self.point, self.transform = point, transform
        self.full_low, self.full_high = low, high
        self.bounded = any(b is not None for b in (*low, *high))
        self.free_masks: list[Tensor | None] = []
        self.leaves: list[Tensor] = []
        self.low: list[Bound] = []
        self.high: list[Bound] = []
        for leaf, a, b in zip(point.leaves, low, high, strict=True):
            if a is None or b is None or batched or not bool((a == b).any()):
                self.free_masks.append(None)
                self.leaves.append(leaf)
                self.low.append(a)
                self.high.append(b)
                continue
            free = a != b
            self.free_masks.append(free)
            with torch.no_grad():
                leaf.copy_(torch.where(free, leaf, a))
            if bool(free.any()):
                self.leaves.append(leaf.detach()[free].clone().requires_grad_())
                self.low.append(a[free])
                self.high.append(b[free])
        self.plain = all(mask is None for mask in self.free_masks)
        if transform and self.bounded:
            with torch.no_grad():
                for leaf, a, b in zip(self.leaves, self.low, self.high, strict=True):
                    leaf.copy_(_close(leaf, a, b))

    def seen(self, leaves: list[Tensor] | None = None, rows: Tensor | None = None) -> list[Tensor]:
        """The leaves that the function sees, with their graph; of batched starts, those in these rows."""
        leaves = self.leaves if leaves is None else leaves
        if not self.bounded:
            return leaves
        at = _open if self.transform else _clamp
        ends = zip(leaves, _take_rows(self.low, rows), _take_rows(self.high, rows), strict=True)
        moved = iter([at(z, a, b) for z, a, b in ends])
        if self.plain:
            return list(moved)
        out = []
        for leaf, mask in zip(self.point.leaves, self.free_masks, strict=True):
            if mask is None:
                out.append(next(moved))
            elif bool(mask.any()):
                out.append(leaf.detach().clone().masked_scatter(mask, next(moved)))
            else:
                out.append(leaf.detach())
        return out

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

    def follow(self, values: list[Tensor], grads: list[Tensor], rows: Tensor | None = None) -> list[Tensor]:
        """Gradients at the function's arguments, as far as bounds let them be followed; of batched starts, of these rows."""
        ends = zip(values, grads, _take_rows(self.full_low, rows), _take_rows(self.full_high, rows), strict=True)
        return [g if low is None and high is None else x - _clamp(x - g, low, high) for x, g, low, high in ends]

    def gradient_norm(self, values: list[Tensor], grads: list[Tensor]) -> float:
        """The largest component of what can be followed."""
        return largest(self.follow(values, grads))


def largest(tensors: Sequence[Tensor]) -> float:
    """The largest absolute value of all numbers; NaN where one is."""
    found = [float(torch.linalg.vector_norm(t.detach(), torch.inf)) for t in tensors if t.numel()]
    return next((size for size in found if size != size), max(found, default=0.0))


def _take_rows(bounds: list[Bound], rows: Tensor | None) -> list[Bound]:
    return bounds if rows is None else [None if bound is None else bound[rows] for bound in bounds]


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
