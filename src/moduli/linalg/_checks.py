"""The questions every public method asks of its arguments before it computes anything."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ._operator import LinearOperator


def broadcast(*shapes: tuple[int, ...]) -> torch.Size:
    """The shape that several broadcast to."""
    return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def is_real(value: Tensor) -> bool:
    """Whether no number has an imaginary part."""
    return not value.dtype.is_complex or not bool((value.imag != 0).any())


def number(operator: "LinearOperator", value: object, name: str) -> Tensor:
    """A number as a 0-d tensor like the operator."""
    if isinstance(value, bool) or not isinstance(value, int | float | complex):
        raise TypeError(f"{name} of {operator} is a number or a torch.Tensor, not {type(value).__name__}")
    if isinstance(value, complex) and not operator.dtype.is_complex:
        raise TypeError(f"{name} is {value!r}, but {operator} is real")
    return torch.tensor(value, dtype=operator.dtype, device=operator.device)


def check_floating(value: Tensor, what: str, dims: int) -> Tensor:
    """The tensor itself, if it is floating or complex and has at least `dims` axes."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} is a torch.Tensor, not {type(value).__name__}; write torch.as_tensor(...)")
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        raise TypeError(
            f"{what} has dtype {value.dtype}, and linear algebra needs real or complex; write {what}.double()"
        )
    if value.ndim < dims:
        raise ValueError(f"{what} has shape {tuple(value.shape)}; it needs at least {dims} axes")
    return value


def check_tensor(operator: "LinearOperator", value: object, name: str) -> Tensor:
    """The value, if it is a tensor of the operator's dtype and device."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} of {operator} is a torch.Tensor, not {type(value).__name__}; write torch.as_tensor(...)"
        )
    if value.dtype != operator.dtype:
        raise TypeError(
            f"{operator} has dtype {operator.dtype}, but {name} has {value.dtype}; write {name}.to({operator.dtype})"
        )
    if value.device != operator.device:
        raise ValueError(
            f"{operator} lives on {operator.device}, but {name} on {value.device}; write {name}.to({str(operator.device)!r})"
        )
    return value


def batch(operator: "LinearOperator", lead: torch.Size, name: str) -> None:
    """Refuse leading axes that do not broadcast with those of the operator."""
    own = operator.batch_shape
    if not own or lead == own or not lead:
        return
    try:
        broadcast(own, lead)
    except RuntimeError as error:
        raise ValueError(
            f"{operator} has the batch shape {tuple(own)}, with which the leading axes {tuple(lead)} of {name} do not "
            "broadcast"
        ) from error


def vector(operator: "LinearOperator", value: object, length: int, name: str) -> Tensor:
    """The value, if it is a vector (or a batch of them) of that length."""
    tensor = check_tensor(operator, value, name)
    if tensor.ndim == 0 or tensor.shape[-1] != length:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, but {operator} needs vectors of {length} along the last axis"
            + (" (matmat takes matrices)" if tensor.ndim == 2 and tensor.shape[0] == length else "")
        )
    batch(operator, tensor.shape[:-1], name)
    return tensor


def matrix(operator: "LinearOperator", value: object, length: int, name: str) -> Tensor:
    """The value, if it is a matrix (or a batch of them) with that many rows."""
    tensor = check_tensor(operator, value, name)
    if tensor.ndim < 2 or tensor.shape[-2] != length:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, but {operator} needs matrices of {length} rows"
            + (" (matvec takes vectors)" if tensor.ndim == 1 else "")
        )
    batch(operator, tensor.shape[:-2], name)
    return tensor


def diagonal_argument(operator: "LinearOperator", diag: object) -> Tensor:
    """The shift of solve_plus_diag as a tensor whose last axis has length 1 (a multiple of I) or n."""
    n = operator.shape[-1]
    if not isinstance(diag, Tensor):
        return number(operator, diag, "diag").reshape(1)
    if operator.dtype.is_complex and not diag.dtype.is_complex:
        diag = diag.to(operator.dtype)
    tensor = check_tensor(operator, diag, "diag")
    if tensor.ndim == 0:
        return tensor.reshape(1)
    if tensor.shape[-1] not in (1, n):
        raise ValueError(
            f"diag has shape {tuple(tensor.shape)}; for {operator} it is a number, one number per member (..., 1) or a "
            f"vector of {n} along the last axis"
        )
    batch(operator, tensor.shape[:-1], "diag")
    return tensor


def factor(operator: "LinearOperator", factor: object) -> Tensor:
    """A factor as a tensor of the operator's dtype that broadcasts with its batch shape."""
    if not isinstance(factor, Tensor):
        return number(operator, factor, "the factor")
    batch(operator, factor.shape, "the factor")
    if factor.ndim > len(operator.batch_shape):
        raise ValueError(
            f"the factor has shape {tuple(factor.shape)}, but {operator} has {len(operator.batch_shape)} batch axes; "
            "a factor is one number, or one per member"
        )
    if factor.dtype.is_complex and not operator.dtype.is_complex:
        raise TypeError(f"the factor is complex, but {operator} is real")
    return factor.to(dtype=operator.dtype, device=operator.device)
