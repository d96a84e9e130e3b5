"""Evolution strategies as a gradient estimator.

References:
    Salimans, Ho, Chen, Sidor, Sutskever, Evolution strategies as a scalable alternative to reinforcement learning (2017),
    equation (1) and algorithm 1; mirrored sampling as in Brockhoff et al., PPSN XI (2010).
"""

import torch
from torch import Tensor

from ._noise import Noise

__all__ = ["direction_weights", "gradient"]


def direction_weights(fitness: Tensor, antithetic: bool) -> Tensor:
    """One weight per direction: f(mean + σε) - f(mean - σε) of a mirrored pair, or f less the mean fitness."""
    if not antithetic:
        return fitness - fitness.mean()
    paired = len(fitness) // 2 * 2
    difference = fitness[0:paired:2] - fitness[1:paired:2]
    return difference if paired == len(fitness) else torch.cat([difference, fitness[paired:] - fitness.mean()])


def gradient(noise: Noise, seed: int, counter: int, fitness: Tensor, sigma: float, antithetic: bool) -> Tensor:
    """An estimate of ∇ E[f(mean + σε)] = E[f ε] / σ from the (shaped) fitness of each member: equation (1)."""
    weights = direction_weights(fitness, antithetic)
    # A mean that was estimated from the same members takes one of them, as in a variance.
    count = len(fitness) if antithetic else max(len(fitness) - 1, 1)
    return noise.weighted(seed, counter, weights)[0].div_(count * sigma)
