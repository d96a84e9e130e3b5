"""Matrices along the axes of a tensor: covariances, products, powers. Shared by Shampoo, SOAP and PSGD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..._torch import call_batched, in_transform

F = TypeVar("F", bound=Callable[..., Any])


def batch_by_itself(function: F) -> F:
    """Return a function that is run once for leading axes as a batch under `torch.vmap`, in place of each of its operations.

    Vectorised one by one, a fused product (`addmm`) becomes three operations, and a decision of the function for its batch can't be
    read. Arguments are positional; the result is a tensor, or None for a function that writes in place. If it is differentiated,
    torch vectorises its operations.
    """

    @wraps(function)
    def call(*args: Any) -> Any:
        if in_transform() and not torch.is_grad_enabled():
            return call_batched(function, *args)
        return function(*args)

    return cast(F, call)


def work(tensor: Tensor) -> Tensor:
    """Return the tensor in a dtype that can be factorised."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def merge_shape(shape: Sequence[int], max_dim: int, merge: bool) -> tuple[int, ...]:
    """Return the shape without axes of size one; with `merge`, small neighbours after the first axis become one.

    A matrix stays a matrix: merging its two axes would turn two factors into one full matrix.

    Args:
        shape: The shape.
        max_dim: The largest size of a merged axis.
        merge: Whether axes are merged.
    """
    sizes = [size for size in shape if size != 1]
    if not merge or len(sizes) < 3:
        return tuple(sizes)
    out = [sizes[0], sizes[1]]
    for size in sizes[2:]:
        if out[-1] * size <= max_dim:
            out[-1] *= size
        else:
            out.append(size)
    return tuple(out)


def _unfold(tensor: Tensor, axis: int) -> Tensor:
    return tensor.movedim(axis, 0).flatten(1) if tensor.dim() > 1 else tensor.unsqueeze(1)


def covariance(tensor: Tensor, axis: int) -> Tensor:
    """Return the covariance of the slices across an axis, summed over all other axes: (n, n)."""
    slices = _unfold(tensor, axis)
    return slices @ slices.mH


def decay(mean: Tensor, value: Tensor, beta: float | Tensor) -> None:
    """Set mean to beta * mean + (1 - beta) * value, in two operations, also for a stack of matrices.

    Args:
        mean: The mean.
        value: The value.
        beta: The memory.
    """
    # Not lerp_, which becomes several operations for a stack.
    if isinstance(beta, Tensor):  # in the dtype of the mean: an operation in place with another one copies
        mean.mul_(beta.to(mean.dtype)).add_(value * (1 - beta).to(mean.dtype))
    else:
        mean.mul_(beta).add_(value, alpha=1 - beta)


def add_or_average(total: Tensor, value: Tensor, beta: float | None) -> None:
    """Add a value to a sum if beta is None, otherwise to a running mean.

    Args:
        total: The sum, or the mean.
        value: The value.
        beta: The memory of the mean.
    """
    if beta is None:
        total.add_(value)
    else:
        total.lerp_(value, 1 - beta)


def decay_covariance(total: Tensor, tensor: Tensor, axis: int, beta: float | Tensor) -> None:
    """Set total to beta * total + (1 - beta) * covariance.

    Args:
        total: The mean.
        tensor: The tensor.
        axis: The axis of the covariance.
        beta: The memory.
    """
    if isinstance(beta, Tensor):
        decay(total, covariance(tensor, axis), beta)
    else:
        accumulate(total, tensor, axis, beta, 1 - beta)


@batch_by_itself
def accumulate(total: Tensor, tensor: Tensor, axis: int, keep: float, take: float) -> None:
    """Set total to keep * total + take * covariance; leading axes of both are a batch.

    Args:
        total: The sum.
        tensor: The tensor.
        axis: The axis of the covariance.
        keep: The factor of the sum.
        take: The factor of the covariance.
    """
    lead = total.dim() - 2
    if not lead:
        slices = _unfold(tensor, axis)
        total.addmm_(slices, slices.mH, beta=keep, alpha=take)
        return
    core = tensor.reshape(-1, *tensor.shape[lead:])
    slices = core.movedim(axis + 1, 1).flatten(2) if core.dim() > 2 else core.unsqueeze(2)
    total.view(-1, *total.shape[-2:]).baddbmm_(slices, slices.mH, beta=keep, alpha=take)


def multiply(tensor: Tensor, matrices: Sequence[Tensor | None], adjoint: bool = False) -> Tensor:
    """Return a tensor multiplied by a matrix along each axis.

    Args:
        tensor: The tensor.
        matrices: A matrix for each axis; None for the identity.
        adjoint: Multiply by their adjoints.
    """
    if tensor.dim() == 2 and len(matrices) == 2:
        left, right = matrices
        if left is not None:
            tensor = (left.mH if adjoint else left) @ tensor
        if right is not None:
            tensor = tensor @ (right.conj() if adjoint else right.mT)
        return tensor
    for axis, matrix in enumerate(matrices):
        if matrix is not None:
            # conj of a real tensor is the tensor itself
            across = matrix.conj() if adjoint else matrix.mT
            tensor = torch.tensordot(tensor.movedim(axis, -1), across, dims=1).movedim(-1, axis)
    return tensor


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigendecomposition by the lower triangle, computed again in double if it does not converge."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except RuntimeError:  # LinAlgError is a RuntimeError
        double = torch.complex128 if matrix.is_complex() else torch.float64
        values, vectors = torch.linalg.eigh(matrix.to(double))
        values, vectors = values.to(matrix.real.dtype), vectors.to(matrix.dtype)
    return values, vectors


def power(matrix: Tensor, exponent: float, reg: float, method: str = "eigh_abs", half: bool = False) -> Tensor:
    """Return (A + reg I)^exponent of a Hermitian matrix.

    Args:
        matrix: The matrix A.
        exponent: The exponent.
        reg: Added to the eigenvalues.
        method: Eigenvalues below zero are rounding: "eigh_abs" takes their absolute value, others zero.
        half: Return W with W W^H equal to the power, which saves a product.
    """
    if not matrix.numel():
        return matrix
    values, vectors = eigh(matrix)
    values = (values.abs() if method == "eigh_abs" else values.clamp(min=0)) + reg
    # Eigenvalues below the rounding of the largest are directions without any data: there is nothing to scale by, and their
    # negative power would only blow up rounding.
    floor = values.amax() * (len(values) * torch.finfo(values.dtype).eps)
    scaled = torch.where(values > floor, values.clamp(min=torch.finfo(values.dtype).tiny) ** exponent, 0.0)
    return vectors * scaled**0.5 if half else (vectors * scaled) @ vectors.mH


def without_last(axes: int) -> Sequence[int]:
    """Return the axes of a parameter that a mean over its last axis has."""
    return range(axes - 1)


def without_second_last(axes: int) -> Sequence[int]:
    """Return the axes of a parameter that a mean over its second last axis has."""
    return [*range(axes - 2), axes - 1]
