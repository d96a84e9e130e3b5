"""The slowly moving eigenbasis of Shampoo's covariances. Shared by SOAP and SOAPBasis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._scalars import read
from ._axes import accumulate, covariance, eigh, fill_upper, merge_shape, work


def begin(state: Any, update: Tensor, beta: float, max_dim: int, merge_small: bool, precondition_1d: bool) -> Tensor:
    """Covariances and bases of a first update, which is returned in the shape that is rotated."""
    shape = merge_shape(update.shape, max_dim, merge_small)
    axes = [axis for axis, size in enumerate(shape) if size <= max_dim and update.numel()]
    if len(shape) == 1 and not precondition_1d:
        axes = []
    x = work(update).reshape(shape)
    state["shape"], state["axes"] = shape, axes
    state["covariances"] = [covariance(x, axis) * (1 - beta) for axis in axes]
    # Eigenvectors are rows, which is how QR leaves them and how they are cheap to put in order. That of the largest
    # eigenvalue comes first, the order that orthogonal iteration keeps.
    state["rows"] = [eigenvectors(found).flip(-1).mH.contiguous() for found in state["covariances"]]
    return x


def eigenvectors(matrix: Tensor) -> Tensor:
    """Eigenvectors that depend on the matrix alone, also where it is zero: there any basis would do, and rounding chose it."""
    values, vectors = eigh(matrix)
    if not len(values):
        return vectors
    below = values <= values[-1] * (len(values) * torch.finfo(values.dtype).eps)
    # Of the space that was never seen, the basis in which a fixed ramp is diagonal.
    ramp = torch.linspace(1, 2, len(values), dtype=values.dtype, device=values.device)
    unseen = read(below.sum())
    if isinstance(unseen, Tensor):
        # The others keep their order behind it: their part is diagonal, with larger numbers.
        behind = torch.where(below, 0.0, 3 + torch.arange(len(values), dtype=values.dtype, device=values.device))
        inside = torch.where(below[:, None] & below, vectors.mH @ (ramp[:, None] * vectors), 0.0)
        return vectors @ eigh(inside + torch.diag(behind))[1]
    if unseen > 1:
        space = vectors[:, :unseen]
        vectors[:, :unseen] = space @ eigh(space.mH @ (ramp[:, None] * space))[1]
    return vectors


def learn(state: Any, update: Tensor, beta: float) -> None:
    """One more update, in the shape that is rotated, for the covariances."""
    for axis, total in zip(state["axes"], state["covariances"], strict=True):
        accumulate(total, update, axis, beta, 1 - beta)


def follow(state: Any) -> list[Tensor]:
    """One step of orthogonal iteration; returns, for each axis, the order its eigenvectors have moved to."""
    orders, found_rows = [], []
    for total, rows in zip(state["covariances"], state["rows"], strict=True):
        image = rows @ fill_upper(total)
        found = (image * rows.conj()).sum(1).real
        order = found.argsort(descending=True)
        # A multiple of the identity leaves the eigenvectors alone. It is above rounding, so that directions in which nothing
        # was ever seen stay where they are: without it the factor would make them out of the rounding of zeros.
        above = found.sum() * torch.finfo(found.dtype).eps * 64
        packed, tau = torch.geqrf(torch.add(image, above * rows).index_select(0, order).mH)
        # Contiguous, as a checkpoint brings it back: products round differently for other strides.
        found_rows.append(torch.linalg.householder_product(packed, tau).mH.contiguous())
        orders.append(order)
    state["rows"] = found_rows
    return orders


def matrices(state: Any) -> list[Tensor | None]:
    """The basis of each axis of the shape that is rotated; None where an axis is left alone."""
    out: list[Tensor | None] = [None] * len(state["shape"])
    for axis, rows in zip(state["axes"], state["rows"], strict=True):
        out[axis] = rows.mH
    return out
