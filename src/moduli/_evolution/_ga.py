"""A genetic algorithm on real, integer and categorical coordinates.

References:
    Deb and Agrawal, Simulated binary crossover for continuous search space, Complex Systems 9 (1995) 115-148, equation (5)
    and (9); Goldberg and Deb, A comparative analysis of selection schemes (1991), for tournaments.
"""

import torch
from torch import Tensor

__all__ = ["sbx", "tournament"]


def tournament(fitness: Tensor, entrants: Tensor) -> Tensor:
    """The winner of each row of `entrants` (indices of members): the lowest fitness, the first of equal ones."""
    return entrants.gather(1, fitness[entrants].argmin(1, keepdim=True))[:, 0]


def sbx(a: Tensor, b: Tensor, u: Tensor, swap: Tensor, eta: float) -> Tensor:
    """A child of every pair of rows: ½ ((1 ± β) a + (1 ∓ β) b), the sign by `swap`, with the density of β of order η.

    β = (2u)^(1/(η+1)) for u ≤ ½ and (1/(2(1-u)))^(1/(η+1)) beyond. Equal parents have equal children.
    """
    power = 1 / (eta + 1)
    beta = torch.where(u <= 0.5, (2 * u).pow(power), (2 * (1 - u)).clamp(min=1e-12).pow(-power))
    return (a + b) / 2 + torch.where(swap, beta, -beta) * (a - b) / 2
