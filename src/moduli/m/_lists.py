"""Inner products and norms of lists of tensors: numbers, which stay 0-d tensors where the tensors are on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ._scalars import read

__all__ = ["dot", "norm"]


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]


def dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> Any:
    """The real inner product, accumulated in double; a tensor where it is differentiated."""
    if torch.is_grad_enabled():
        products = [(a.double() * b.double()).sum() for a, b in zip(_real(first), _real(second), strict=True)]
        return torch.stack(products).sum()
    return read(kernels.dot(_real(first), _real(second)))


def norm(tensors: Sequence[Tensor]) -> Any:
    """The Euclidean norm, accumulated in double; a tensor where it is differentiated."""
    if torch.is_grad_enabled():
        return torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) for t in _real(tensors)]).norm()
    return read(kernels.norm(tensors))
