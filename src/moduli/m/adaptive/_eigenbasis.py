"""The slowly moving eigenbasis of a tensor's covariances along its axes. Shared by SOAP and SOAPBasis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._measures import read
from ._axes import batch_by_itself, covariance, decay_covariance, eigh, merge_shape, work


def begin(
    state: Any, update: Tensor, beta: float | Tensor, max_dim: int, merge_small: bool, precondition_1d: bool
) -> Tensor:
    """Return a first update in the shape that is rotated, and store its covariances and bases.

    Args:
        state: Where they are stored.
        update: The update.
        beta: The memory of the covariances.
        max_dim: Longer axes are not rotated.
        merge_small: Whether neighbouring small axes become one.
        precondition_1d: Whether vectors are rotated.
    """
    shape = merge_shape(update.shape, max_dim, merge_small)
    axes = [axis for axis, size in enumerate(shape) if size <= max_dim and update.numel()]
    if len(shape) == 1 and not precondition_1d:
        axes = []
    x = work(update).reshape(shape)
    state["shape"], state["axes"] = shape, axes
    state["covariances"] = [covariance(x, axis) * (1 - beta) for axis in axes]
    # Eigenvectors are rows, which is how QR leaves them and how they are cheap to put in order. That of the largest
    # eigenvalue comes first, the order that orthogonal iteration keeps.
    state["rows"] = [eigenvectors(matrix).flip(-1).mH.contiguous() for matrix in state["covariances"]]
    return x


@batch_by_itself
def eigenvectors(matrix: Tensor) -> Tensor:
    """Return eigenvectors that depend on the matrix alone, also in its null space, where rounding would choose them."""
    values, vectors = eigh(matrix)
    size = values.shape[-1]
    if not values.numel():
        return vectors
    below = values <= values[..., -1:] * (size * torch.finfo(values.dtype).eps)
    # In the null space, use the basis in which a fixed ramp is diagonal.
    ramp = torch.linspace(1, 2, size, dtype=values.dtype, device=values.device)
    unseen = read(below.sum(-1).amax())
    if not isinstance(unseen, Tensor):
        if unseen <= 1:
            return vectors
        if matrix.dim() == 2:
            space = vectors[:, :unseen]
            vectors[:, :unseen] = space @ eigh(space.mH @ (ramp[:, None] * space))[1]
            return vectors
    # The other eigenvectors keep their order: their part is diagonal, with larger numbers.
    behind = torch.where(below, 0.0, 3 + torch.arange(size, dtype=values.dtype, device=values.device))
    both = below.unsqueeze(-1) & below.unsqueeze(-2)
    inside = torch.where(both, vectors.mH @ (ramp[:, None] * vectors), 0.0)
    return vectors @ eigh(inside + torch.diag_embed(behind))[1]


def learn(state: Any, update: Tensor, beta: float | Tensor) -> None:
    """Add one more update to the covariances.

    Args:
        state: Where they are stored.
        update: The update, in the shape that is rotated.
        beta: The memory of the covariances.
    """
    for axis, total in zip(state["axes"], state["covariances"], strict=True):
        decay_covariance(total, update, axis, beta)


def follow(state: Any) -> list[Tensor]:
    """Make one step of orthogonal iteration; return, for each axis, the new order of its eigenvectors."""
    orders, found_rows = [], []
    for total, rows in zip(state["covariances"], state["rows"], strict=True):
        image = rows @ total
        rayleigh = (image * rows.conj()).sum(1).real
        order = rayleigh.argsort(descending=True)
        # A multiple of the identity leaves the eigenvectors alone. It is above rounding, so that directions in which nothing
        # was ever seen stay where they are: without it the factor would make them out of the rounding of zeros.
        above = rayleigh.sum() * torch.finfo(rayleigh.dtype).eps * 64
        packed, tau = torch.geqrf(torch.add(image, above * rows).index_select(0, order).mH)
        # Contiguous, as a checkpoint brings it back: products round differently for other strides.
        found_rows.append(torch.linalg.householder_product(packed, tau).mH.contiguous())
        orders.append(order)
    state["rows"] = found_rows
    return orders


def matrices(state: Any) -> list[Tensor | None]:
    """Return the basis of each axis of the shape that is rotated; None for an axis that is not rotated."""
    out: list[Tensor | None] = [None] * len(state["shape"])
    for axis, rows in zip(state["axes"], state["rows"], strict=True):
        out[axis] = rows.mH
    return out
