"""Norms of updates: of each tensor, or of all together, for one model or for each member of a population."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import kernels

__all__ = ["metrics", "shaped"]


def _one(tensor: Tensor, ord: float, members: int | None) -> Tensor:
    flat = tensor.abs().flatten(0 if members is None else 1)
    if flat.dim() == 1 and members is not None:
        flat = flat.unsqueeze(1)
    if flat.numel() == 0:
        return torch.zeros(() if members is None else members, dtype=flat.dtype, device=flat.device)
    if ord == 2:
        return torch.linalg.vector_norm(flat, dim=-1)
    if math.isinf(ord):
        return flat.amax(-1)
    return flat.pow(ord).sum(-1).pow(1 / ord)


def metrics(tensors: Sequence[Tensor], tensorwise: bool, ord: float, members: int | None) -> list[Tensor]:
    """For each tensor its norm, or the norm of all; 0-d, or one per member."""
    if tensorwise:
        return [_one(tensor, ord, members) for tensor in tensors]
    if members is None and ord in (1, 2, math.inf) and tensors:
        whole = kernels.norm(list(tensors), ord)
        return [whole.to(tensor.abs().dtype) for tensor in tensors[:1]] * len(tensors)
    parts = torch.stack([_one(tensor, ord, members) for tensor in tensors])
    found = parts.amax(0) if math.isinf(ord) else parts.pow(ord).sum(0).pow(1 / ord)
    return [found] * len(tensors)


def shaped(value: Tensor, like: Tensor) -> Tensor:
    """A number, or one per member, shaped to multiply this tensor."""
    return value if value.dim() == 0 else value.reshape(-1, *([1] * (like.dim() - 1)))
