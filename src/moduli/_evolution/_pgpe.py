"""Parameter-exploring policy gradients, with symmetric sampling.

References:
    Sehnke, Osendorfer, Rückstiess, Graves, Peters, Schmidhuber, Parameter-exploring policy gradients, Neural Networks 23
    (2010) 551-559, section 3.2 and algorithm 1.
"""

import torch
from torch import Tensor

from ._noise import Noise

__all__ = ["gradients"]


def gradients(
    noise: Noise, seed: int, counter: int, fitness: Tensor, sigma: Tensor, antithetic: bool
) -> tuple[Tensor, Tensor]:
    """Estimates of ∂E[f]/∂mean and ∂E[f]/∂σ from members mean ± σ∘ε, for the (shaped) fitness of each.

    With symmetric sampling, ∂mean = Σ ½ (f₊ - f₋) ε / (σ M) and ∂σ = Σ (½ (f₊ + f₋) - b) (ε² - 1) / (σ M) over M pairs,
    with the mean fitness as the baseline b: T r_T and S r_S of the paper, in units of σ.
    """
    centred = fitness - fitness.mean()
    if antithetic:
        paired = len(fitness) // 2 * 2
        plus, minus = centred[0:paired:2], centred[1:paired:2]
        first, second = (plus - minus) / 2, (plus + minus) / 2
        if paired < len(fitness):
            first, second = torch.cat([first, centred[paired:]]), torch.cat([second, centred[paired:]])
    else:
        first = second = centred
    linear, square = noise.weighted(seed, counter, first, second)
    count = len(first)
    return linear / (sigma * count), (square - float(second.sum())) / (sigma * count)
