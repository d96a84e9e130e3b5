"""From fitness to weights: only the order counts, ties share, and what is not a number comes last."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def clean(fitness: Tensor) -> Tensor:
    """Fitness in double, with NaN as the worst there is: +inf. Always a copy."""
    f = fitness.detach().to(torch.float64, copy=True)
    return f.masked_fill_(f.isnan(), math.inf)


def _count_better(fitness: Tensor) -> tuple[Tensor, Tensor]:
    """For each member, how many are better, and how many are better or equal."""
    ordered = fitness.sort().values
    return torch.searchsorted(ordered, fitness), torch.searchsorted(ordered, fitness, right=True)


def centre_ranks(fitness: Tensor) -> Tensor:
    """Ranks scaled to [-½, ½], the best member at -½ (Salimans et al. 2017, section 2.1).

    Equal members get the mean of their ranks, so a flat fitness gives zeros and moves nothing.
    """
    n = len(fitness)
    below, upto = _count_better(fitness)
    rank = 0.5 * (below + upto - 1).to(fitness)
    return rank / max(n - 1, 1) - (0.5 if n > 1 else 0.0)


def nes_utilities(fitness: Tensor) -> Tensor:
    """Utilities that sum to zero, the best member highest (Wierstra et al. 2014, section 3.1).

    u_k = max(0, ln(N/2 + 1) - ln k) / Σ_j max(0, ln(N/2 + 1) - ln j) - 1/N for the k-th best; equal members share.
    """
    n = len(fitness)
    k = torch.arange(1, n + 1, dtype=torch.float64, device=fitness.device)
    raw = (math.log(n / 2 + 1) - k.log()).clamp(min=0)
    total = torch.cat([raw.new_zeros(1), raw.cumsum(0)])
    below, upto = _count_better(fitness)
    return (total[upto] - total[below]) / (upto - below) / total[-1].clamp(min=1e-300) - 1 / n


def standardise(fitness: Tensor) -> Tensor:
    """(f - mean) / standard deviation; what is infinite counts as the worst finite value, and equal values as zero."""
    f = _finite(fitness)
    f = f - f.mean()
    deviation = f.square().mean().sqrt()
    return f / deviation if deviation > 0 else torch.zeros_like(f)


def _finite(fitness: Tensor) -> Tensor:
    """Infinite values replaced by the worst (or best) finite one; zeros when there is none."""
    finite = fitness[fitness.isfinite()]
    if len(finite) == 0:
        return torch.zeros_like(fitness)
    return fitness.clamp(float(finite.min()), float(finite.max()))


SHAPES = {"ranks": centre_ranks, "standardize": standardise, "raw": _finite}
"""How fitness enters a gradient estimate, by name. Larger is worse in all of them."""


def keep_finite(members: Tensor) -> Tensor:
    """The rows without infinity or NaN, of which a spread can be measured; all rows where none is finite."""
    finite = members.isfinite().all(1)
    return members[finite] if bool(finite.any()) else members
