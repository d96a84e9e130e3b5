"""Augmented random search.

References:
    Mania, Guy, Recht, Simple random search of static linear policies is competitive for reinforcement learning,
    NeurIPS 2018, algorithm 2 (V1-t; the normalisation of observations of V2 belongs to the policy).
"""

import torch
from torch import Tensor

from ._noise import Noise

__all__ = ["direction_weights", "gradient"]


def direction_weights(plus: Tensor, minus: Tensor, top: int) -> Tensor:
    """Line 6 and 7: keep the `top` directions by their better end, and divide by the deviation of their rewards.

    A direction with an end that is not finite is left out.
    """
    weights = torch.zeros_like(plus)
    usable = plus.isfinite() & minus.isfinite()
    score = torch.where(usable, torch.minimum(plus, minus), torch.full_like(plus, torch.inf))
    chosen = score.argsort(stable=True)[:top]
    chosen = chosen[usable[chosen]]
    if len(chosen) == 0:
        return weights
    deviation = torch.cat([plus[chosen], minus[chosen]]).std(correction=0)
    if deviation > 0:
        weights[chosen] = (plus[chosen] - minus[chosen]) / (len(chosen) * deviation)
    return weights


def gradient(noise: Noise, seed: int, counter: int, fitness: Tensor, top: int) -> Tensor:
    """The update of line 7 as something to descend along: Σ (f₊ - f₋) δ / (b σ_f) over the b best directions."""
    return noise.weighted(seed, counter, direction_weights(fitness[0::2], fitness[1::2], top))[0]
