"""Exponential natural evolution strategies.

References:
    Glasmachers, Schaul, Sun, Wierstra, Schmidhuber, Exponential natural evolution strategies, GECCO 2010, algorithm 1.
"""

import math

import torch
from torch import Tensor

__all__ = ["learning_rate", "update"]


def learning_rate(dim: int) -> float:
    """η_σ = η_B = (9 + 3 ln d) / (5 d √d)."""
    return (9 + 3 * math.log(dim)) / (5 * dim * math.sqrt(dim))


def update(
    mean: Tensor, sigma: float, B: Tensor, z: Tensor, u: Tensor, lr_mean: float, lr_sigma: float, lr_shape: float
) -> tuple[Tensor, float, Tensor]:
    """New (mean, σ, B) from samples mean + σ B z_k with utilities u_k; A = σ B, and det B stays 1.

    G_δ = Σ u_k z_k; G_M = Σ u_k (z_k z_kᵀ - I); G_σ = tr(G_M)/d; G_B = G_M - G_σ I (lines 8 to 12).
    """
    d = mean.shape[0]
    step = u @ z
    moment = (z * u[:, None]).mT @ z
    moment.diagonal().sub_(float(u.sum()))
    scale = float(moment.diagonal().sum()) / d
    moment.diagonal().sub_(scale)
    new_mean = mean + lr_mean * sigma * (B @ step)
    grown = sigma * math.exp(min(max(lr_sigma / 2 * scale, -5.0), 5.0))
    return new_mean, grown, B @ torch.linalg.matrix_exp(lr_shape / 2 * moment)
