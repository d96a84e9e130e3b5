"""Systems with a Hessian, which may be singular or indefinite."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...linalg import Eigendecomposition

EigvalFn = Callable[[Tensor], Tensor]


def decompose(
    H: Tensor, eigval_fn: EigvalFn | None, eigv_tol: float | None, truncate: int | None
) -> Eigendecomposition:
    """The eigenvalues that are kept, after the function, and their vectors."""
    values, vectors = torch.linalg.eigh(H)
    if eigval_fn is not None:
        values = eigval_fn(values)
    size = values.abs()
    keep = torch.isfinite(values) & (size > 0)
    if eigv_tol is not None and bool(keep.any()):
        keep &= size > eigv_tol * size[keep].max()
    if truncate is not None and int(keep.sum()) > truncate:
        order = torch.where(keep, size, torch.zeros_like(size)).argsort(descending=True)
        chosen = torch.zeros_like(keep)
        chosen[order[:truncate]] = True
        keep &= chosen
    return Eigendecomposition(values[keep], vectors[:, keep])


def solve(H: Tensor, b: Tensor) -> Tensor:
    """H d = b: by Cholesky where H is positive definite, else LU; the shortest least-squares solution where it is singular."""
    factor, failed = torch.linalg.cholesky_ex(H)
    if not int(failed):
        return torch.cholesky_solve(b.unsqueeze(-1), factor).squeeze(-1)
    found, failed = torch.linalg.solve_ex(H, b)
    if not int(failed) and bool(torch.isfinite(found).all()):
        residual = torch.linalg.vector_norm(H @ found - b)
        if float(residual) <= 1e-3 * float(torch.linalg.vector_norm(b)):
            solved: Tensor = found
            return solved
    return shortest(H, b)


def shortest(H: Tensor, b: Tensor) -> Tensor:
    """The shortest least-squares solution of a symmetric system."""
    values, vectors = torch.linalg.eigh(H)
    tiny = torch.finfo(H.dtype).eps * H.shape[0] * values.abs().max().clamp(min=torch.finfo(H.dtype).tiny)
    inverse = torch.where(values.abs() > tiny, 1 / values, torch.zeros_like(values))
    out: Tensor = vectors @ (inverse * (vectors.mT @ b))
    return out


def solve_live(H: Tensor, b: Tensor, how: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The system of the parameters that have curvature; the others (linear or unused ones) keep b as it is."""
    live = (H != 0).any(0)
    if bool(live.all()):
        return how(H, b)
    out = b.clone()
    index = live.nonzero().squeeze(-1)
    if index.numel():
        out[index] = how(H[index][:, index], b[index])
    return out
