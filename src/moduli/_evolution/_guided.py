"""Guided evolution strategies: search more along directions that are believed in.

References:
    Maheswaranathan, Metz, Tucker, Choi, Sohl-Dickstein, Guided evolutionary strategies: augmenting random search with
    surrogate gradients, ICML 2019, equations (2) and (3).
"""

import math

import torch
from torch import Tensor

__all__ = ["basis", "directions", "gradient"]


def basis(surrogates: Tensor) -> Tensor:
    """Orthonormal columns U (P x k) that span the surrogate gradients, the rows of `surrogates` (k x P).

    Rows that are zero, or depend on the others, give zero columns: nothing is searched along them.
    """
    scale = surrogates.norm(dim=1, keepdim=True)
    q, r = torch.linalg.qr((surrogates / scale.clamp(min=torch.finfo(surrogates.dtype).tiny)).mT)
    good = r.diagonal().abs() > 1e-6
    return torch.mul(q, good)


def directions(whole: Tensor, inner: Tensor, subspace: Tensor, alpha: float) -> Tensor:
    """Rows of N(0, Σ) with Σ = α/n I + (1 - α)/k U Uᵀ, times n: equation (2), scaled to unit steps for α = 1.

    `whole` is N x P and `inner` is N x k, both standard normal.
    """
    n, k = subspace.shape
    return math.sqrt(alpha) * whole + math.sqrt((1 - alpha) * n / k) * (inner @ subspace.mT)


def gradient(total: Tensor, pairs: int, sigma: float, beta: float) -> Tensor:
    """β / (2 σ² P) Σ ε (f(x + ε) - f(x - ε)) over P pairs: equation (3), from Σ (ε/σ) (f(x + ε) - f(x - ε))."""
    return total * (beta / (2 * sigma * pairs))
