"""Functions that rows pass to links; they are importable, so that optimizers with them can be pickled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["flatten_all", "halve", "halve_all", "ignore", "is_matrix", "orthogonalize_quintic", "scale_loss"]


def is_matrix(param: Tensor) -> bool:
    return param.dim() > 1


def halve_all(tensors: list[Tensor]) -> list[Tensor]:
    return [0.5 * tensor for tensor in tensors]


def halve(tensor: Tensor) -> Tensor:
    return 0.5 * tensor


def scale_loss(loss: Tensor) -> Tensor:
    return 2 * loss + loss**2


def ignore(text: str) -> None:
    """Ignore a text."""


def flatten_all(tensors: Any) -> Tensor:
    """Return several tensors as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def orthogonalize_quintic(g: Tensor) -> Tensor:
    """Return the orthogonalised matrix by the quintic Newton-Schulz iteration of Muon's first description."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x
