"""Evolution strategies as a gradient estimator.

References:
    Salimans, Ho, Chen, Sidor, Sutskever, Evolution strategies as a scalable alternative to reinforcement learning (2017),
    equation (1) and algorithm 1; mirrored sampling as in Brockhoff et al., PPSN XI (2010).
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ._host import host, tensor
from ._noise import Noise

__all__ = ["direction_weights", "gradient", "gradients"]


def direction_weights(fitness: Tensor, antithetic: bool) -> Tensor:
    """One weight per direction: f(mean + σε) - f(mean - σε) of a mirrored pair, or f less the mean fitness."""
    f = host(fitness)
    if not antithetic:
        return tensor(f - f.mean(), fitness)
    paired = len(f) // 2 * 2
    weights = np.empty(-(-len(f) // 2))
    weights[: paired // 2] = f[0:paired:2] - f[1:paired:2]
    if paired < len(f):
        weights[-1] = f[-1] - f.mean()
    return tensor(weights, fitness)


def gradient(noise: Noise, seed: int, counter: int, fitness: Tensor, sigma: float, antithetic: bool) -> Tensor:
    """An estimate of ∇ E[f(mean + σε)] = E[f ε] / σ from the (shaped) fitness of each member: equation (1)."""
    parts = [part.clone() for _, part in gradients(noise, seed, counter, fitness, sigma, antithetic)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def gradients(
    noise: Noise, seed: int, counter: int, fitness: Tensor, sigma: float, antithetic: bool
) -> Iterator[tuple[slice, Tensor]]:
    """The same in parts, each to be used before the next."""
    weights = direction_weights(fitness, antithetic).to(noise.dtype, copy=True)
    # A mean that was estimated from the same members takes one of them, as in a variance.
    count = len(fitness) if antithetic else max(len(fitness) - 1, 1)
    # Divided before the sum: there are fewer members than coordinates.
    for columns, total, _ in noise.sums(seed, counter, weights.div_(count * sigma)):
        yield columns, total
