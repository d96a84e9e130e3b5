"""The orthogonal factor of the polar decomposition, by iterations or exactly."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..._torch import is_wrapped
from ._axes import batch_by_itself, work

Method = Literal["newtonschulz", "polar_express", "polarexpress", "svd", "qr", "eigh"]

# One quintic for every iteration: steep at zero, and singular values end between 0.7 and 1.2 (Jordan et al.).
_QUINTIC = (3.4445, -4.7750, 2.0315)

# The best quintic for each iteration, given the interval left by the ones before (Amsel et al., Algorithm 1 for l = 1e-3).
_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
# A little less than the best, so that rounding cannot push a singular value out of the interval.
_SAFETY = 1.01


def _coefficients(method: str, steps: int) -> list[tuple[float, float, float]]:
    if method == "newtonschulz":
        return [_QUINTIC] * steps
    coefficients = []
    for k in range(steps):
        a, b, c = _EXPRESS[min(k, len(_EXPRESS) - 1)]
        safe = _SAFETY if k < len(_EXPRESS) - 1 else 1.0
        coefficients.append((a / safe, b / safe**3, c / safe**5))
    return coefficients


@batch_by_itself
def _iterate(matrix: Tensor, method: str, steps: int, dtype: torch.dtype) -> Tensor:
    """Return odd polynomials of a matrix, no higher than wide, that map its singular values to one; leading axes are a batch."""
    slack = 1.0 if method == "newtonschulz" else _SAFETY
    norm = torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True)
    x = (matrix / (norm * slack + torch.finfo(matrix.dtype).tiny ** 0.5)).to(dtype).contiguous()
    shape = x.shape
    if x.dim() > 3:
        x = x.reshape(-1, *shape[-2:])
    if method == "newtonschulz" and steps <= 5 and shape[-1] >= 2 * shape[-2] and dtype != torch.bfloat16:
        return _iterate_gram(x, steps).reshape(shape)
    fused = torch.baddbmm if x.dim() > 2 else torch.addmm
    gram = polynomial = spare = None
    reuses = not torch.is_grad_enabled() and not is_wrapped(x)
    for a, b, c in _coefficients(method, steps):
        gram = torch.matmul(x, x.mH, out=gram)
        polynomial = fused(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        moved = fused(x, polynomial, x, beta=a, out=spare)
        x, spare = moved, x
        if not reuses:  # autograd may have saved it
            gram = polynomial = spare = None
    return x.reshape(shape)


def _iterate_gram(x: Tensor, steps: int) -> Tensor:
    """Return the result of `_iterate` for wide matrices by polynomials of X X^H, whose product multiplies X once.

    Rounding errors of the smallest eigenvalues of X X^H grow by 12 in an iteration, as these do; after a few they are still
    far below the width of the band in which singular values end. In bfloat16 they are not.
    """
    fused = torch.baddbmm if x.dim() > 2 else torch.addmm
    gram = x @ x.mH
    product: Tensor | None = None
    for k, (a, b, c) in enumerate(_coefficients("newtonschulz", steps)):
        rest = fused(gram, gram, gram, beta=b, alpha=c)
        if product is None:
            product = rest.clone()
            product.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            product = fused(product, rest, product, beta=a)
        if k + 1 < steps:
            half = fused(gram, rest, gram, beta=a)
            gram = fused(half, half, rest, beta=a)
    return x if product is None else product @ x


def orthogonalize(
    matrix: Tensor, method: str = "newtonschulz", steps: int = 5, dtype: torch.dtype | None = None
) -> Tensor:
    r"""Return the nearest matrix with orthonormal rows or columns, $U V^H$ of $M = U \Sigma V^H$; leading axes are a batch.

    Args:
        matrix: The matrix.
        method: See `Orthogonalize`.
        steps: Iterations of the iterative methods.
        dtype: In which these multiply; None for that of the matrix, or float32 where it is a half.

    Returns:
        A matrix of the same dtype.
    """
    method = method.replace("_", "")
    x = work(matrix)
    if dtype is not None and (x.is_complex() or method not in ("newtonschulz", "polarexpress")):
        what = "complex matrices" if x.is_complex() else f"method={method!r}"
        raise ValueError(f"Orthogonalize: {what} can't be computed in {dtype}; leave out dtype=")
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mH
    if method in ("newtonschulz", "polarexpress"):
        x = _iterate(x, method, steps, dtype or x.dtype)
    elif method == "svd":
        u, _, v = torch.linalg.svd(x, full_matrices=False)
        x = u @ v
    elif method == "qr":
        q, r = torch.linalg.qr(x.mH)
        signs = torch.sgn(torch.diagonal(r, dim1=-2, dim2=-1))
        # With a positive diagonal in R the factor is unique, and orthonormal input stays as it is.
        x = (q * torch.where(signs == 0, torch.ones_like(signs), signs).unsqueeze(-2)).mH
    else:
        values, vectors = torch.linalg.eigh(x @ x.mH)
        floor = values[..., -1:] * torch.finfo(values.dtype).eps * x.shape[-1]
        roots = torch.where(values > floor, values.clamp(min=torch.finfo(values.dtype).tiny).rsqrt(), 0.0)
        x = (vectors * roots.unsqueeze(-2)) @ (vectors.mH @ x)
    # Contiguous, because pointwise links behind it have no pass over others.
    x = x.mH.contiguous() if tall else x
    return x.to(matrix.dtype)
