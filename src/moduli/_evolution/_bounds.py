"""Keeping members inside bounds."""

import torch
from torch import Tensor

__all__ = ["clamped", "midpoint", "reflected"]


def reflected(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Fold the line into [lower, upper] by reflection at the ends.

    The fitness of the folded point is a continuous function of the unfolded one, so a distribution that lives outside
    of the bounds is judged as fairly as one inside. An end may be infinite; equal ends give that one value.
    """
    width = upper - lower
    both, finite_lower, finite_upper = width.isfinite(), lower.isfinite(), upper.isfinite()
    period = torch.where(both & (width > 0), 2 * width, torch.ones_like(width))
    low, high = lower.nan_to_num(neginf=0.0), upper.nan_to_num(posinf=0.0)
    offset = torch.remainder(x - low, period)
    folded = low + torch.minimum(offset, period - offset).clamp(max=width.nan_to_num(posinf=0.0))
    from_below, from_above = low + (x - low).abs(), high - (high - x).abs()
    out = torch.where(both, folded, torch.where(finite_lower, from_below, torch.where(finite_upper, from_above, x)))
    # Inside the bounds a point stays what it is, to the last bit.
    return torch.where((x >= lower) & (x <= upper), x, out).clamp(lower, upper)


def clamped(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """The nearest point inside."""
    return x.clamp(lower, upper)


def midpoint(x: Tensor, parent: Tensor, lower: Tensor, upper: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Halfway between the bound that was crossed and the parent (Zhang and Sanderson 2009, section III), in place."""
    half = torch.empty_like(x) if scratch is None else scratch
    torch.add(parent, lower, out=half).mul_(0.5)
    torch.where(x < lower, half, x, out=x)
    torch.add(parent, upper, out=half).mul_(0.5)
    return torch.where(x > upper, half, x, out=x)
