"""Covariance matrix adaptation.

Equation numbers are those of the tutorial. A factor A with A Aᵀ = C turns standard normal rows into samples. With the
symmetric root (from an eigendecomposition) the path of the step size is that of the tutorial; with the Cholesky factor
C^(-1/2) is replaced by A⁻¹, which costs n³/3 operations instead of about 9 n³.

References:
    Hansen, The CMA evolution strategy: a tutorial (2016, arXiv:1604.00772);
    Krause, Arbonès, Igel, CMA-ES with optimal covariance update and storage complexity, NeurIPS 2016, for A⁻¹ in the path.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ._host import Numbers, host

__all__ = [
    "BLOCK",
    "Constants",
    "cholesky_root",
    "constants",
    "expected_norm",
    "member_weights",
    "shaped",
    "symmetric_root",
    "update_covariance",
    "update_paths",
]

BLOCK = 256  # what is triangular is multiplied in blocks of so many rows, up to the diagonal


@dataclass(frozen=True)
class Constants:
    """The strategy parameters of one (dimension, population)."""

    dim: int
    weights: Numbers
    mu: int
    mueff: float
    c_sigma: float
    d_sigma: float
    c_c: float
    c_1: float
    c_mu: float
    c_m: float
    total: float


def constants(dim: int, population: int, *, separable: bool = False) -> Constants:
    """Table 1 of the tutorial, equations (49) to (58), with active (negative) weights.

    With a diagonal covariance there are no negative weights, and c₁ and c_μ grow by (n + 2)/3 (Ros and Hansen 2008,
    section 3).
    """
    n, lam = dim, population
    raw = math.log((lam + 1) / 2) - torch.arange(1, lam + 1, dtype=torch.float64).log()  # (49)
    mu = lam // 2
    positive, negative = raw[:mu], raw[mu:]
    mueff = float(positive.sum() ** 2 / positive.square().sum())
    mueff_neg = float(negative.sum() ** 2 / negative.square().sum()) if float(negative.square().sum()) else 0.0
    c_c = (4 + mueff / n) / (n + 4 + 2 * mueff / n)  # (56)
    c_1 = 2 / ((n + 1.3) ** 2 + mueff)  # (57)
    c_mu = min(1 - c_1 - 1e-8, 2 * (mueff - 2 + 1 / mueff) / ((n + 2) ** 2 + mueff))  # (58)
    if separable:
        c_1 = min(1.0, c_1 * (n + 2) / 3)
        c_mu = min(1 - c_1, c_mu * (n + 2) / 3)
    bounds = [1 + c_1 / c_mu if c_mu > 0 else math.inf]  # (50)
    bounds.append(1 + 2 * mueff_neg / (mueff + 2))  # (51)
    bounds.append((1 - c_1 - c_mu) / (n * c_mu) if c_mu > 0 else math.inf)  # (52)
    lost = float(negative.clamp(max=0).abs().sum())
    scale = 0.0 if separable or not lost else min(bounds) / lost
    weights = torch.where(raw >= 0, raw / positive.sum(), raw * scale)  # (53)
    c_sigma = (mueff + 2) / (n + mueff + 5)  # (55)
    d_sigma = 1 + 2 * max(0.0, math.sqrt((mueff - 1) / (n + 1)) - 1) + c_sigma  # (55)
    return Constants(n, weights.numpy(), mu, mueff, c_sigma, d_sigma, c_c, c_1, c_mu, 1.0, float(weights.sum()))


def expected_norm(dim: int) -> float:
    """E‖N(0, I)‖, to the third order that the tutorial uses below (27)."""
    return math.sqrt(dim) * (1 - 1 / (4 * dim) + 1 / (21 * dim**2))


def symmetric_root(C: Tensor) -> tuple[Tensor, float, float]:
    """C^(1/2), and the smallest and largest standard deviation; eigenvalues below rounding count as rounding."""
    values, B = torch.linalg.eigh(C)
    largest = float(values[-1])
    d = values.clamp(min=largest * torch.finfo(C.dtype).eps).sqrt()
    return (B * d) @ B.mT, float(d[0]), float(d[-1])


def cholesky_root(C: Tensor) -> tuple[Tensor, float, float]:
    """The lower triangular root, and bounds of the standard deviations from its diagonal.

    Rounding can make C lose its definiteness; then the smallest shift (in powers of ten of eps) that restores it is added.
    """
    shift = 0.0
    while True:
        # LAPACK works by columns, so that the transpose is where a matrix by rows has its lower triangle.
        A, info = torch.linalg.cholesky_ex(C.mT, upper=True)
        if not int(info):
            d = host(A.diagonal())
            return A.mT, float(d.min()), float(d.max())
        mean = float(C.diagonal().abs().mean())
        if not math.isfinite(mean) or shift > 1:
            raise ArithmeticError("the covariance matrix is not finite; the fitness or the step size overflowed")
        shift = 10 * shift if shift else torch.finfo(C.dtype).eps
        C = C.clone()
        C.diagonal().add_(shift * max(mean, torch.finfo(C.dtype).tiny))


def update_paths(
    p_sigma: Numbers, p_c: Numbers, z_w: Numbers, y_w: Numbers, sigma: float, generation: int, k: Constants
) -> tuple[Numbers, Numbers, float, float]:
    """Both evolution paths and the step size: (43), (45), (44). `generation` counts from one.

    `y_w` = Σ wᵢ yᵢ is the step of the mean in units of σ, and `z_w` = C^(-1/2) y_w. Returns h_σ last.
    """
    n = len(p_sigma)
    p_sigma = (1 - k.c_sigma) * p_sigma + math.sqrt(k.c_sigma * (2 - k.c_sigma) * k.mueff) * z_w  # (43)
    length, chi = math.sqrt(p_sigma.dot(p_sigma)), expected_norm(n)
    stale = math.sqrt(1 - (1 - k.c_sigma) ** (2 * (generation + 1)))
    h_sigma = 1.0 if length / stale < (1.4 + 2 / (n + 1)) * chi else 0.0  # below (45)
    p_c = (1 - k.c_c) * p_c + (h_sigma * math.sqrt(k.c_c * (2 - k.c_c) * k.mueff)) * y_w  # (45)
    # One generation changes the step size by e at most.
    sigma *= math.exp(min(1.0, k.c_sigma / k.d_sigma * (length / chi - 1)))  # (44)
    return p_sigma, p_c, sigma, h_sigma


def member_weights(order: Numbers, z: Numbers, k: Constants) -> tuple[Numbers, Numbers]:
    """The weights of the members, for the mean and for the covariance, from the order of their fitness, best first.

    The weight of a bad step is divided by its squared length ‖C^(-1/2) y‖² = ‖z‖² (46), so that C stays positive definite.
    """
    of_mean, of_covariance = np.zeros(len(order), z.dtype), np.empty(len(order), z.dtype)
    of_mean[order[: k.mu]] = k.weights[: k.mu]
    of_covariance[order] = k.weights
    bad = order[k.mu :]
    of_covariance[bad] *= k.dim / (np.einsum("ij,ij->i", z, z)[bad] + 1e-8)
    return of_mean, of_covariance


def update_covariance(C: Tensor, p_c: Tensor, y: Tensor, weights: Tensor, h_sigma: float, k: Constants) -> Tensor:
    """(47), in place: y are the steps in units of σ, and `weights` those that `member_weights` gives last.

    Only the lower triangle of C is meant: above `BLOCK` dimensions the blocks above the diagonal are left as they are,
    which saves nearly half of the work.
    """
    n = C.shape[0]
    delta = (1 - h_sigma) * k.c_c * (2 - k.c_c)
    decay = 1 + k.c_1 * delta - k.c_1 - k.c_mu * k.total
    scaled = y * weights[:, None]
    if n <= BLOCK:
        return C.addmm_(scaled.mT, y, beta=decay, alpha=k.c_mu).addr_(p_c, p_c, alpha=k.c_1)
    for low in range(0, n, BLOCK):
        high = min(low + BLOCK, n)
        C[low:high, :high].addmm_(scaled[:, low:high].mT, y[:, :high], beta=decay, alpha=k.c_mu)
        C[low:high, :high].addr_(p_c[low:high], p_c[:high], alpha=k.c_1)
    return C


def shaped(z: Tensor, root: Tensor, triangular: bool, out: Tensor) -> Tensor:
    """Rows z as rows root @ z: samples of the covariance that the root is of."""
    n = root.shape[0]
    if not triangular or n <= BLOCK:
        return torch.mm(z, root.mT, out=out)
    for low in range(0, n, BLOCK):
        high = min(low + BLOCK, n)
        torch.mm(z[:, :high], root[low:high, :high].mT, out=out[:, low:high])
    return out
