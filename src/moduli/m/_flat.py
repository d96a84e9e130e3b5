"""All parameters as one real vector, for links that work on the whole of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import kernels
from ..optim import as_real

SMALL = 10_000
"""Up to this many numbers on the CPU are worked on by NumPy, whose dispatch costs less; above it would use all threads."""
_LOW = (torch.float16, torch.bfloat16)
_PLAIN = (torch.float32, torch.float64)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """One real vector, complex numbers as pairs, half precision as float32. May share memory with a single tensor."""
    if len(tensors) == 1:
        tensor = tensors[0].detach()
        if tensor.dim() == 1 and tensor.dtype in _PLAIN and tensor.is_contiguous():
            return tensor
        vector = as_real(tensor).reshape(-1)
    else:
        vector = torch.cat([as_real(tensor.detach()).reshape(-1) for tensor in tensors])
    return vector.float() if vector.dtype in _LOW else vector


def array(tensors: Sequence[Tensor]) -> Any:
    """`flat` of plain tensors on the CPU as an array: for small vectors NumPy's dispatch costs less than torch's."""
    if len(tensors) == 1:
        tensor = tensors[0]
        out = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        return out if out.ndim == 1 else out.reshape(-1)
    return np.concatenate([tensor.detach().numpy().reshape(-1) for tensor in tensors])


def is_small(n: int, device: torch.device) -> bool:
    """Whether a vector is worked on by NumPy."""
    return n <= SMALL and device.type == "cpu"


def is_plain(params: Sequence[Tensor]) -> bool:
    """Whether `array` can be used: real, of one precision, on the CPU, strided, and not too many numbers."""
    dtype = params[0].dtype
    if dtype not in _PLAIN:
        return False
    count = 0
    for param in params:
        if param.dtype is not dtype or not param.is_cpu or param.layout is not torch.strided:
            return False
        count += param.numel()
    return count <= SMALL


def size(params: Sequence[Tensor]) -> int:
    """How long the vector of these tensors is."""
    return sum(param.numel() * (2 if param.is_complex() else 1) for param in params)


def unflat(vector: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """The vector in pieces shaped and typed like the parameters."""
    if len(params) == 1 and params[0].dtype is vector.dtype:
        return [vector if params[0].dim() == 1 else vector.view(params[0].shape)]
    out = []
    position = 0
    for param in params:
        count = param.numel() * (2 if param.is_complex() else 1)
        piece = vector[position : position + count]
        position += count
        if param.is_complex():
            real = torch.float32 if param.dtype is torch.complex64 else torch.float64
            out.append(torch.view_as_complex(piece.to(real).reshape(*param.shape, 2).contiguous()))
        else:
            out.append(piece.to(param.dtype).view(param.shape))
    return out


def tensors_of(vector: Any, params: Sequence[Tensor]) -> list[Tensor]:
    """`unflat` of an array for `is_plain` parameters; the tensors share its memory."""
    if len(params) == 1:
        out = torch.from_numpy(vector)
        return [out if params[0].dim() == 1 else out.view(params[0].shape)]
    return unflat(torch.from_numpy(vector), params)


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The inner product of two lists of tensors, as real vectors; over all processes where they hold pieces."""
    if kernels.over_processes() is not None:
        return float(kernels.dot([as_real(tensor) for tensor in a], [as_real(tensor) for tensor in b]))
    if len(a) == 1 and a[0].dtype is b[0].dtype and not a[0].is_complex() and a[0].dtype not in _LOW:
        return torch.dot(a[0].reshape(-1), b[0].reshape(-1)).item()
    return torch.dot(flat(a), flat(b)).item()


def mask_absent(tensors: Sequence[Tensor], present: Sequence[bool] | None) -> list[Tensor]:
    """The tensors, with zeros for parameters that have no gradient and so do not move."""
    if present is None:
        return list(tensors)
    return [tensor if here else torch.zeros_like(tensor) for tensor, here in zip(tensors, present, strict=True)]


def flat_members(tensors: Sequence[Tensor]) -> Tensor:
    """One real vector for each member of a population, in rows: `flat` of each."""
    rows = torch.cat([as_real(tensor.detach()).reshape(len(tensor), -1) for tensor in tensors], 1)
    return rows.float() if rows.dtype in _LOW else rows


def unflat_members(rows: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Rows, one for each member, in pieces shaped and typed like stacked parameters."""
    out = []
    position = 0
    for param in params:
        shape = as_real(param.detach()).shape
        count = shape[1:].numel()
        piece = rows[:, position : position + count]
        position += count
        if param.is_complex():
            real = torch.float32 if param.dtype is torch.complex64 else torch.float64
            out.append(torch.view_as_complex(piece.to(real).reshape(shape).contiguous()))
        else:
            out.append(piece.to(param.dtype).reshape(shape))
    return out
