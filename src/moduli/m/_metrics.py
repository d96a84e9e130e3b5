"""Sizes of tensors: norms and other measures, over axes, whole tensors, or all tensors together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ._lists import norm
from ._scalars import read

Axes = int | tuple[int, ...] | list[int] | None

_NAMES = ("mad", "std", "var", "sum", "l0", "l1", "l2", "l3", "l4", "linf")


def check_metric(link: str, ord: Any, key: str = "ord") -> None:
    """Refuse what is neither a p-norm nor a name."""
    number = isinstance(ord, int | float) and not isinstance(ord, bool) and (ord > 0 or ord == 0)
    if not number and ord not in _NAMES:
        raise ValueError(f"{link}: {key} is {ord!r}; give p for a p-norm (2, 1, inf, 0), or one of {', '.join(_NAMES)}")


def check_axes(link: str, dim: Any) -> Any:
    """`dim` in a form that can be compared: an int, a tuple of ints, None or "global"."""
    if dim is None or dim == "global" or (isinstance(dim, int) and not isinstance(dim, bool)):
        return dim
    if isinstance(dim, list | tuple) and all(isinstance(axis, int) for axis in dim):
        return tuple(dim)
    raise ValueError(f"{link}: dim is {dim!r}; give an axis, several axes, None (the whole tensor) or 'global'")


def axes_of(tensor: Tensor, dim: Axes, inverse_dims: bool, min_size: int) -> tuple[int, ...] | None:
    """The axes of this tensor to reduce; None where there is nothing to reduce, so that the tensor stays as it is.

    Axes that a tensor does not have are left out; an axis list of one tensor is never taken for that of another.
    """
    if dim is None:
        axes = () if inverse_dims else tuple(range(tensor.dim()))
        whole = not inverse_dims
    else:
        asked = (dim,) if isinstance(dim, int) else tuple(dim)
        named = (
            {axis % tensor.dim() for axis in asked if -tensor.dim() <= axis < tensor.dim()} if tensor.dim() else set()
        )
        axes = tuple(axis for axis in range(tensor.dim()) if (axis in named) != inverse_dims)
        whole = False
    if not axes and not whole:
        return None
    size = 1
    for axis in axes:
        size *= tensor.shape[axis]
    return axes if size >= max(min_size, 1) and tensor.numel() else None


def _power(ord: Any) -> float:
    if isinstance(ord, str):
        return float("inf") if ord == "linf" else float(ord[1:])
    return float(ord)


def metric(tensor: Tensor, ord: Any, axes: tuple[int, ...]) -> Tensor:
    """The measure over these axes (all of a 0-d tensor's none), which are kept with size 1; real, at least float32."""
    work = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    if work in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    if ord in ("mad", "std", "var", "sum"):
        if not axes:
            tensor, axes = tensor.reshape(1), (0,)
            return metric(tensor, ord, axes).reshape(())
        if ord == "mad":
            return tensor.abs().mean(axes, keepdim=True)
        if ord == "sum":
            return (tensor.real if tensor.is_complex() else tensor).sum(axes, keepdim=True)
        variance = torch.var(tensor, axes, correction=0, keepdim=True)
        return variance.sqrt() if ord == "std" else variance
    norm: Tensor = torch.linalg.vector_norm(tensor, _power(ord), axes if axes else None, keepdim=bool(axes))
    return norm


def lengths(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean length over all tensors for each member of a population, in double."""
    squares = [torch.linalg.vector_norm(t.reshape(len(t), -1), dim=1, dtype=torch.float64).square() for t in tensors]
    total: Tensor = torch.stack(squares).sum(0)
    return total.sqrt()


def metric_of_all(tensors: Sequence[Tensor], ord: Any = 2) -> Any:
    """The measure over all tensors as one vector: a number, or a 0-d tensor on a device and where it is differentiated."""
    if ord in (2, "l2"):
        return norm(tensors)
    whole = torch.cat(
        [tensor.reshape(-1).double() if not tensor.is_complex() else tensor.reshape(-1) for tensor in tensors]
    )
    if not whole.numel():
        return 0.0
    found = metric(whole, ord, (0,)).squeeze(0)
    return found if torch.is_grad_enabled() else read(found)


def _size(tensor: Tensor, ord: Any, members: int | None) -> Tensor:
    rows = tensor.reshape(-1) if members is None else tensor.reshape(members, -1)
    if rows.numel() == 0:
        return torch.zeros(rows.shape[:-1], dtype=tensor.abs().dtype, device=tensor.device)
    return metric(rows, ord, (rows.dim() - 1,)).squeeze(-1)


def sizes(tensors: Sequence[Tensor], tensorwise: bool, ord: Any = 2, members: int | None = None) -> list[Tensor]:
    """For each tensor its measure, or that of all together; 0-d, or one number per member of a population."""
    if tensorwise or not tensors:
        return [_size(tensor, ord, members) for tensor in tensors]
    if ord in (2, "l2"):
        whole = norm if torch.is_grad_enabled() else kernels.norm
        found = whole(list(tensors)) if members is None else lengths(tensors)
    else:
        wide = torch.complex128 if any(tensor.is_complex() for tensor in tensors) else torch.float64
        rows = [tensor.to(wide).reshape(1 if members is None else members, -1) for tensor in tensors]
        found = _size(torch.cat(rows, 1), ord, 1 if members is None else members)
        found = found.reshape(()) if members is None else found
    return [found] * len(tensors)


def group_tensors(count: int, tensorwise: bool) -> list[list[int]]:
    """The positions of tensors that are measured together: each by itself, or all."""
    return [[i] for i in range(count)] if tensorwise else [list(range(count))]


def shape_like(value: Tensor, like: Tensor) -> Tensor:
    """A number, or one per member, in the precision of this tensor and shaped to multiply it."""
    value = value.to(like.dtype.to_real() if like.is_complex() else like.dtype)
    return value if value.dim() == 0 else value.reshape(-1, *([1] * (like.dim() - 1)))
