"""Matrices along the axes of a tensor: covariances, products, powers. Shared by Shampoo, SOAP and PSGD."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def work(tensor: Tensor) -> Tensor:
    """The tensor in a type that matrices can be factorised in."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def merge_shape(shape: Sequence[int], max_dim: int, merge: bool) -> tuple[int, ...]:
    """The shape without axes of size one; with `merge`, neighbours after the first axis become one while they are small.

    A matrix stays a matrix: merging its two axes would turn two factors into one full matrix.
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


def covariance(tensor: Tensor, axis: int) -> Tensor:
    """The slices across an axis times each other, summed over everything else: (n, n)."""
    if tensor.dim() == 1:
        return torch.outer(tensor, tensor.conj())
    slices = tensor.movedim(axis, 0).flatten(1) if tensor.dim() > 2 else tensor if axis == 0 else tensor.mT
    return multiply_symmetric(slices, slices.mH)


def accumulate(total: Tensor, tensor: Tensor, axis: int, keep: float, take: float) -> None:
    """Total <- keep total + take covariance.

    Of a real matrix only the blocks on and below the diagonal are computed, for long axes two thirds: see `fill_upper`.
    """
    if tensor.dim() == 2 and not tensor.is_complex():
        slices = tensor if axis == 0 else tensor.mT
        for low, high in _blocks(len(total)):
            total[low:high, :high].addmm_(slices[low:high], slices[:high].mT, beta=keep, alpha=take)
    else:
        total.mul_(keep).add_(covariance(tensor, axis), alpha=take)


def fill_upper(total: Tensor) -> Tensor:
    """A matrix that was accumulated, with what is above the diagonal copied from below."""
    if not total.is_complex():
        for low, high in _blocks(len(total)):
            total[:low, low:high] = total[low:high, :low].mT
    return total


def _blocks(size: int) -> list[tuple[int, int]]:
    step = max(128, -(-size // 4))
    return [(low, min(low + step, size)) for low in range(0, size, step)]


# Below this the blocks of a product are too small to be worth their calls.
_WORTH_BLOCKS = 384


def multiply_symmetric(
    left: Tensor, right: Tensor, onto: Tensor | None = None, *, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Beta onto + alpha left right, where that is Hermitian: of long real matrices on a processor two thirds are computed."""
    tracked = torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    if left.shape[0] < _WORTH_BLOCKS or left.dim() != 2 or left.is_complex() or left.device.type != "cpu" or tracked:
        if onto is None:
            return left @ right
        return (torch.addmm if left.dim() == 2 else torch.baddbmm)(onto, left, right, beta=beta, alpha=alpha)
    out = left.new_empty(len(left), len(left))
    for low, high in _blocks(len(left)):
        rows, columns = left[low:high], right[:, :high]
        # To compute and to copy, because vmap has no rule for addmm_, and out= none for the others.
        below = (
            rows @ columns
            if onto is None
            else torch.addmm(onto[low:high, :high], rows, columns, beta=beta, alpha=alpha)
        )
        out[low:high, :high] = below
    return fill_upper(out)


def multiply(tensor: Tensor, matrices: Sequence[Tensor | None], adjoint: bool = False) -> Tensor:
    """A matrix along each axis (None: the identity), or their adjoints."""
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
    """The eigendecomposition by the lower triangle, once more in double where it does not converge."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except RuntimeError:  # LinAlgError is one
        double = torch.complex128 if matrix.is_complex() else torch.float64
        values, vectors = torch.linalg.eigh(matrix.to(double))
        values, vectors = values.to(matrix.real.dtype), vectors.to(matrix.dtype)
    return values, vectors


def power(matrix: Tensor, exponent: float, reg: float, method: str = "eigh_abs", half: bool = False) -> Tensor:
    """(A + reg I)^exponent of a Hermitian matrix; eigenvalues below zero are rounding: their size counts, or zero.

    With `half` it is a matrix W that gives the power as W W^H, which spares a product.
    """
    if not matrix.numel():
        return matrix
    values, vectors = eigh(matrix)
    values = (values.abs() if method == "eigh_abs" else values.clamp(min=0)) + reg
    # What is below the rounding of the largest is a direction that was never seen: there is nothing to scale by, and its
    # negative power would only blow up rounding.
    floor = values.amax() * (len(values) * torch.finfo(values.dtype).eps)
    scaled = torch.where(values > floor, values.clamp(min=torch.finfo(values.dtype).tiny) ** exponent, 0.0)
    return vectors * scaled**0.5 if half else multiply_symmetric(vectors * scaled, vectors.mH)
