"""Separable natural evolution strategies.

References:
    Schaul, Glasmachers, Schmidhuber, High dimensions and heavy tails for natural evolution strategies, GECCO 2011,
    algorithm 2; learning rates of Wierstra et al., Natural evolution strategies, JMLR 15 (2014), table 1.
"""

import math

import torch
from torch import Tensor

__all__ = ["learning_rate", "update"]


def learning_rate(dim: int) -> float:
    """η_σ = (3 + ln d) / (5 √d)."""
    return (3 + math.log(dim)) / (5 * math.sqrt(dim))


def update(
    mean: Tensor, sigma: Tensor, linear: Tensor, square: Tensor, total: float, lr_mean: float, lr_sigma: float
) -> tuple[Tensor, Tensor]:
    """New mean and σ from Σ u_k s_k (`linear`), Σ u_k s_k² (`square`) and Σ u_k (`total`).

    mean ← mean + η_μ σ∘Σ u_k s_k, σ ← σ∘exp(η_σ/2 Σ u_k (s_k² - 1)).
    """
    exponent = (square - total).mul_(lr_sigma / 2)
    # One generation changes a scale by e⁵ at most: exp of what a tiny population may give would overflow.
    return torch.addcmul(mean, sigma, linear, value=lr_mean), sigma * exponent.clamp_(-5, 5).exp_()
