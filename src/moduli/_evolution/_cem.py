"""The cross-entropy method.

References:
    Rubinstein, The cross-entropy method for combinatorial and continuous optimization, Methodology and Computing in Applied
    Probability 1 (1999) 127-190; smoothing of de Boer, Kroese, Mannor, Rubinstein, A tutorial on the cross-entropy method,
    Annals of OR 134 (2005), equation (20); added noise of Szita and Lörincz, Neural Computation 18 (2006).
"""

import torch
from torch import Tensor

__all__ = ["choose", "frequencies", "refit"]


def refit(elites: Tensor, mean: Tensor, std: Tensor, smoothing: float, floor: Tensor | float) -> tuple[Tensor, Tensor]:
    """The Gaussian of the elites, mixed with the old one: α new + (1 - α) old; σ stays at `floor` or above."""
    new_mean = elites.mean(0)
    new_std = elites.std(0, correction=0)
    floor = torch.as_tensor(floor, dtype=std.dtype, device=std.device)
    return mean.lerp(new_mean, smoothing), torch.maximum(std.lerp(new_std, smoothing), floor)


def frequencies(elites: Tensor, table: Tensor, smoothing: float, floor: float) -> Tensor:
    """How often each category (a column of the C x K table, padded with zeros) was chosen by the elites (n x C)."""
    count = torch.zeros_like(table).scatter_add_(1, elites.long().mT, torch.ones_like(elites.mT))
    allowed = table > 0
    mixed = table.lerp(count / len(elites), smoothing)
    mixed = torch.where(allowed, mixed.clamp(min=floor), torch.zeros_like(mixed))
    return mixed / mixed.sum(1, keepdim=True)


def choose(table: Tensor, uniform: Tensor) -> Tensor:
    """Categories by inversion: for uniform (N x C), the first whose cumulated probability exceeds it."""
    cumulated = table.cumsum(1)
    cumulated[:, -1] = 1.0
    choice = torch.searchsorted(cumulated, uniform.mT.contiguous(), right=True).mT
    last = (table > 0).long().mul(torch.arange(table.shape[1], device=table.device)).amax(1)
    return torch.minimum(choice, last)
