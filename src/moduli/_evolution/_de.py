"""Differential evolution, with the adaptations of JADE and SHADE.

References:
    Storn and Price, Differential evolution, J. Global Optimization 11 (1997) 341-359;
    Zhang and Sanderson, JADE: adaptive differential evolution with optional external archive, IEEE TEC 13 (2009) 945-958;
    Tanabe and Fukunaga, Success-history based parameter adaptation for differential evolution, CEC 2013.
"""

import math

import torch
from torch import Tensor

from ..kernels import fuse

__all__ = [
    "cauchy",
    "crossed",
    "crossed_inside",
    "crossover",
    "distinct",
    "jade_means",
    "lehmer",
    "mutant",
    "shade_means",
]


def distinct(n: int, k: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """K x n indices: for every member k different members, none of them itself, all choices equally likely."""
    taken = [torch.arange(n, device=device)]
    for j in range(k):
        pick = torch.randint(n - 1 - j, (n,), generator=generator, device=device)
        # Skipping the taken ones in ascending order maps 0..n-2-j onto what is left.
        for other in torch.stack(taken).sort(0).values:
            pick += pick >= other
        taken.append(pick)
    return torch.stack(taken[1:])


def mutant(base: Tensor, scale: Tensor | float, *differences: tuple[Tensor, Tensor]) -> Tensor:
    """The sum base + F Σ (a - b): Storn and Price, equation (1), and JADE, equation (6). F may be a column.

    Writes over `base` and over the first of each difference.
    """
    for a, b in differences:
        gap = a.sub_(b)
        if isinstance(scale, Tensor):
            base.addcmul_(gap, scale)
        else:
            base.add_(gap, alpha=scale)
    return base


def crossover(trial: Tensor, parent: Tensor, mask: Tensor) -> Tensor:
    """The mutant where `mask` (chance CR, and one coordinate for certain) says so, else the member: equation (5)."""
    return torch.where(mask, trial, parent, out=trial)


def _crossed(base: Tensor, a: Tensor, b: Tensor, x: Tensor, draw: Tensor, scale: float, limit: float) -> Tensor:
    return torch.where(draw < limit, base + scale * (a - b), x)


def _crossed_inside(
    base: Tensor,
    a: Tensor,
    b: Tensor,
    x: Tensor,
    draw: Tensor,
    lower: Tensor,
    upper: Tensor,
    scale: float,
    limit: float,
) -> Tensor:
    trial = torch.where(draw < limit, base + scale * (a - b), x)
    trial = torch.where(trial < lower, 0.5 * (x + lower), trial)
    return torch.where(trial > upper, 0.5 * (x + upper), trial)


crossed = fuse(_crossed)
"""`mutant` of one difference and `crossover` in one pass; coordinates whose draw is below the limit are the mutant's."""

crossed_inside = fuse(_crossed_inside)
"""The same, and `midpoint` of what lies outside of the bounds, which are matrices too."""


def cauchy(location: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Cauchy numbers around `location` that are positive (drawn again otherwise) and at most one: JADE, equation (11)."""
    out = torch.full_like(location, -1.0)
    for _ in range(64):
        bad = out <= 0
        if not bool(bad.any()):
            break
        u = torch.rand(location.shape, generator=generator, dtype=location.dtype, device=location.device)
        out = torch.where(bad, location + scale * torch.tan(math.pi * (u - 0.5)), out)
    return out.clamp(1e-3, 1.0)


def lehmer(values: Tensor, weights: Tensor | None = None) -> float:
    """Σ w s² / Σ w s: JADE, equation (14), and SHADE, equation (13)."""
    weights = torch.ones_like(values) if weights is None else weights
    return float((weights * values.square()).sum() / (weights * values).sum())


def jade_means(mean_cr: float, mean_f: float, cr: Tensor, f: Tensor, c: float) -> tuple[float, float]:
    """Move the means towards what succeeded in this generation: JADE, equations (10) and (13)."""
    if len(cr) == 0:
        return mean_cr, mean_f
    return (1 - c) * mean_cr + c * float(cr.mean()), (1 - c) * mean_f + c * lehmer(f)


def shade_means(cr: Tensor, f: Tensor, gain: Tensor) -> tuple[float, float]:
    """What succeeded, weighted by how much it improved: SHADE, equations (7) to (13)."""
    # A gain from infinity is no measure of anything; such members count as much as the largest finite gain.
    finite = gain[gain.isfinite()]
    gain = gain.clamp(max=float(finite.max()) if len(finite) else 1.0)
    weights = gain / gain.sum() if float(gain.sum()) > 0 else torch.ones_like(gain) / len(gain)
    return float((weights * cr).sum()), lehmer(f, weights)
