"""Measures used by links: scalars, inner products and norms of lists of tensors, and other sizes.

* Arithmetic of scalars that a link measures: Python numbers on the host, 0-d tensors for parameters on a device.

  A norm of tensors on an accelerator stays there, because reading it would make the host wait for the device. Decisions by
  `if` and `max` on a number are made by these functions for both kinds.
* Inner products and norms of lists of tensors: scalars, which stay 0-d tensors for tensors on a device.
* Sizes of tensors: norms and other measures, over axes, whole tensors, or all tensors together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from .._torch import in_transform, is_fake, is_wrapped
from ..optim import Module, Objective


def read(value: Tensor) -> Any:
    """Return a 0-d tensor as a number if it can be read without waiting; on a device, differentiated or vectorised, unmodified."""
    if (
        value.device.type != "cpu"
        or is_fake(value)
        or is_wrapped(value)
        or (value.requires_grad and torch.is_grad_enabled())
    ):
        return value
    return value.item()


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """Return `yes if condition else no`, also for tensors.

    Args:
        condition: A boolean, or a 0-d tensor.
        yes: The value if it holds.
        no: The value otherwise.
    """
    if not isinstance(condition, Tensor):
        return yes if condition else no
    if not isinstance(yes, Tensor) and not isinstance(no, Tensor):
        wide = torch.float32 if condition.device.type == "mps" else torch.float64
        yes = torch.full((), yes, dtype=wide, device=condition.device)
    return torch.where(condition, yes, no)


def larger(a: Any, b: Any) -> Any:
    """Return the larger of two numbers."""
    return choose(a > b, a, b)


def smaller(a: Any, b: Any) -> Any:
    """Return the smaller of two numbers."""
    return choose(a < b, a, b)


def divide(a: Any, b: Any, otherwise: Any) -> Any:
    """Return the quotient if the denominator is positive, otherwise another value.

    Args:
        a: The numerator.
        b: The denominator.
        otherwise: The other value.
    """
    if isinstance(b, Tensor):
        return choose(b > 0, a / b, otherwise)
    return a / b if b > 0 else otherwise


def root(a: Any) -> Any:
    """Return the square root of a non-negative number."""
    return a**0.5


def rise(t: Any, steps: int) -> Any:
    """Return min(t / steps, 1) in a form for which t may be a symbol."""
    rising = (t < steps) * 1.0
    return rising * t / steps + (1 - rising)


def _view_real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]


def dot(first: Sequence[Tensor], second: Sequence[Tensor], members: int | None = None) -> Any:
    """Return the real inner product, accumulated in double; a tensor if it is differentiated or vectorised.

    Args:
        first: Tensors.
        second: As many, of the same shapes.
        members: The number of members that the tensors are stacked over, for one product each; None for one model.
    """
    if members is not None:
        pairs = zip(_view_real(first), _view_real(second), strict=True)
        return torch.stack([(a.double() * b).reshape(members, -1).sum(1) for a, b in pairs]).sum(0)
    if torch.is_grad_enabled() or in_transform():
        products = [(a.double() * b.double()).sum() for a, b in zip(_view_real(first), _view_real(second), strict=True)]
        return torch.stack(products).sum()
    return read(kernels.dot(_view_real(first), _view_real(second)))


def norm(tensors: Sequence[Tensor], order: float = 2) -> Any:
    """Return the norm of all elements, accumulated in double; a tensor if it is differentiated or vectorised."""
    if torch.is_grad_enabled() or in_transform():
        parts = _view_real(tensors) if order == 2 else [t.abs() for t in tensors]
        sizes = [torch.linalg.vector_norm(t, order, dtype=torch.float64) for t in parts]
        return torch.linalg.vector_norm(torch.stack(sizes), order)
    return read(kernels.norm(tensors, order))


def measure_move(link: Module, params: Sequence[Tensor], order: float) -> float | None:
    """Return the norm of the parameters' move since the last call; None if one of them is new.

    Args:
        link: The link whose state stores the last point.
        params: The parameters.
        order: The order of the norm.
    """
    fresh = any("previous" not in link.state[param] for param in params)
    before = link.get_state(params, "previous", init="param")
    size = float(kernels.norm([param.detach() - value for param, value in zip(params, before, strict=True)], order))
    for param, value in zip(params, before, strict=True):
        value.copy_(param.detach())
    return None if fresh else size


def reset_others(link: Module, objective: Objective, modules: Sequence[Module]) -> None:
    """Reset the links of an optimizer that this one is not part of; with a first argument bound, a hook for the end of a step.

    Args:
        link: This link.
        objective: The objective, which is not used.
        modules: The links of the optimizer.
    """
    for module in modules:
        if all(part is not link for _, part in module.links()):
            module.reset()


Axes = int | tuple[int, ...] | list[int] | None

_NAMES = ("mad", "std", "var", "sum", "l0", "l1", "l2", "l3", "l4", "linf")


def check_metric(link: str, key: str, ord: Any) -> None:
    """Raise an error unless a metric is a p-norm or a known name.

    Args:
        link: The name of the link.
        key: The name of its argument.
        ord: The argument.
    """
    number = isinstance(ord, int | float) and not isinstance(ord, bool) and (ord > 0 or ord == 0)
    if not number and ord not in _NAMES:
        raise ValueError(f"{link}: {key} is {ord!r}; give p for a p-norm (2, 1, inf, 0), or one of {', '.join(_NAMES)}")


def check_axes(link: str, dim: Any, inverse_dims: bool) -> Any:
    """Return `dim` in a comparable form: an int, a tuple of ints, None or "global".

    Args:
        link: The name of the link.
        dim: Its argument.
        inverse_dims: Whether these axes are left out.
    """
    if dim == "global" and inverse_dims:
        raise ValueError(f"{link}: inverse_dims is for axes, but dim is 'global'")
    if dim is None or dim == "global" or (isinstance(dim, int) and not isinstance(dim, bool)):
        return dim
    if isinstance(dim, list | tuple) and all(isinstance(axis, int) for axis in dim):
        return tuple(dim)
    raise ValueError(f"{link}: dim is {dim!r}; give an axis, several axes, None (the whole tensor) or 'global'")


def axes_of(tensor: Tensor, dim: Axes, inverse_dims: bool, min_size: int) -> tuple[int, ...] | None:
    """Return the axes of this tensor to reduce; None if there are none, so that the tensor is not changed.

    Axes that a tensor does not have are skipped; an axis list of one tensor is never used for another.

    Args:
        tensor: The tensor.
        dim: Axes; None for all.
        inverse_dims: Reduce all axes but these.
        min_size: The least number of elements to reduce.
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
    """Return the measure over these axes (none of a 0-d tensor), kept with size 1; real, at least float32.

    Args:
        tensor: The tensor.
        ord: The order of a p-norm, or a name.
        axes: The axes.
    """
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
    """Return the Euclidean length over all tensors for each member of a population, in double."""
    squares = [torch.linalg.vector_norm(t.reshape(len(t), -1), dim=1, dtype=torch.float64).square() for t in tensors]
    total: Tensor = torch.stack(squares).sum(0)
    return total.sqrt()


def metric_of_all(tensors: Sequence[Tensor], ord: Any = 2) -> Any:
    """Return the measure over all tensors as one vector: a number, or a 0-d tensor on a device or if differentiated."""
    if ord in (2, "l2"):
        return norm(tensors)
    whole = torch.cat(
        [tensor.reshape(-1).double() if not tensor.is_complex() else tensor.reshape(-1) for tensor in tensors]
    )
    if not whole.numel():
        return 0.0
    value = metric(whole, ord, (0,)).squeeze(0)
    return value if torch.is_grad_enabled() else read(value)


def _size(tensor: Tensor, ord: Any, members: int | None) -> Tensor:
    rows = tensor.reshape(-1) if members is None else tensor.reshape(members, -1)
    if rows.numel() == 0:
        return torch.zeros(rows.shape[:-1], dtype=tensor.abs().dtype, device=tensor.device)
    return metric(rows, ord, (rows.dim() - 1,)).squeeze(-1)


def sizes(tensors: Sequence[Tensor], tensorwise: bool, ord: Any = 2, members: int | None = None) -> list[Tensor]:
    """Return for each tensor its measure, or that of all together; 0-d, or one number per member of a population.

    Args:
        tensors: The tensors.
        tensorwise: Whether each is measured by itself.
        ord: The order of a p-norm, or a name.
        members: The number of members that the tensors are stacked over; None for one model.
    """
    if tensorwise or not tensors:
        return [_size(tensor, ord, members) for tensor in tensors]
    if ord in (2, "l2"):
        whole = norm if torch.is_grad_enabled() else kernels.norm
        size = whole(list(tensors)) if members is None else lengths(tensors)
    else:
        wide = torch.complex128 if any(tensor.is_complex() for tensor in tensors) else torch.float64
        rows = [tensor.to(wide).reshape(1 if members is None else members, -1) for tensor in tensors]
        size = _size(torch.cat(rows, 1), ord, 1 if members is None else members)
        size = size.reshape(()) if members is None else size
    return [size] * len(tensors)


def group_tensors(count: int, tensorwise: bool) -> list[list[int]]:
    """Return the positions of tensors that are measured together: each by itself, or all."""
    return [[i] for i in range(count)] if tensorwise else [list(range(count))]


def shape_like(value: Tensor, like: Tensor) -> Tensor:
    """Return a number, or one per member, in the precision of this tensor and shaped to multiply it."""
    value = value.to(like.dtype.to_real() if like.is_complex() else like.dtype)
    return value if value.dim() == 0 else value.reshape(-1, *([1] * (like.dim() - 1)))
