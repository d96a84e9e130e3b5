"""Inner products and norms of lists of tensors, as numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import kernels

__all__ = ["dot", "norm"]


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]


@torch.no_grad()
def dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """The real inner product, accumulated in double."""
    return float(kernels.dot(_real(first), _real(second)))


@torch.no_grad()
def norm(tensors: Sequence[Tensor]) -> float:
    """The Euclidean norm, accumulated in double."""
    return float(kernels.norm(_real(tensors)))
