"""Functions that rows give to links: importable, so that optimizers that hold them can be pickled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["halved", "is_matrix", "quiet", "quintic", "scaled_loss", "shrunk", "whole"]


def is_matrix(param: Tensor) -> bool:
    return param.dim() > 1


def halved(tensors: list[Tensor]) -> list[Tensor]:
    return [0.5 * tensor for tensor in tensors]


def shrunk(tensor: Tensor) -> Tensor:
    return 0.5 * tensor


def scaled_loss(loss: Tensor) -> Tensor:
    return 2 * loss + loss**2


def quiet(text: str) -> None:
    """Prints nothing."""


def whole(tensors: Any) -> Tensor:
    """All numbers of several tensors as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def quintic(g: Tensor) -> Tensor:
    """Newton-Schulz as in Muon's first description."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x
