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

import torch
from torch import Tensor

__all__ = [
    "Constants",
    "cholesky_root",
    "constants",
    "expected_norm",
    "symmetric_root",
    "update_covariance",
    "update_paths",
]


@dataclass(frozen=True)
class Constants:
    """The strategy parameters of one (dimension, population)."""

    weights: Tensor
    mu: int
    mueff: float
    c_sigma: float
    d_sigma: float
    c_c: float
    c_1: float
    c_mu: float
    c_m: float


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
    return Constants(weights, mu, mueff, c_sigma, d_sigma, c_c, c_1, c_mu, 1.0)


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
        A, info = torch.linalg.cholesky_ex(C)
        if not int(info):
            d = A.diagonal()
            return A, float(d.min()), float(d.max())
        mean = float(C.diagonal().abs().mean())
        if not math.isfinite(mean) or shift > 1:
            raise ArithmeticError("the covariance matrix is not finite; the fitness or the step size overflowed")
        shift = 10 * shift if shift else torch.finfo(C.dtype).eps
        C = C.clone()
        C.diagonal().add_(shift * max(mean, torch.finfo(C.dtype).tiny))


def update_paths(
    p_sigma: Tensor, p_c: Tensor, z_w: Tensor, y_w: Tensor, sigma: float, generation: int, k: Constants
) -> tuple[Tensor, Tensor, float, float]:
    """Both evolution paths and the step size: (43), (45), (44). `generation` counts from one.

    `y_w` = Σ wᵢ yᵢ is the step of the mean in units of σ, and `z_w` = C^(-1/2) y_w. Returns h_σ last.
    """
    n = p_sigma.shape[0]
    p_sigma = (1 - k.c_sigma) * p_sigma + math.sqrt(k.c_sigma * (2 - k.c_sigma) * k.mueff) * z_w  # (43)
    length, chi = float(p_sigma.norm()), expected_norm(n)
    stale = math.sqrt(1 - (1 - k.c_sigma) ** (2 * (generation + 1)))
    h_sigma = 1.0 if length / stale < (1.4 + 2 / (n + 1)) * chi else 0.0  # below (45)
    p_c = (1 - k.c_c) * p_c + h_sigma * math.sqrt(k.c_c * (2 - k.c_c) * k.mueff) * y_w  # (45)
    # One generation changes the step size by e at most.
    sigma *= math.exp(min(1.0, k.c_sigma / k.d_sigma * (length / chi - 1)))  # (44)
    return p_sigma, p_c, sigma, h_sigma


def update_covariance(C: Tensor, p_c: Tensor, y: Tensor, length2: Tensor, h_sigma: float, k: Constants) -> Tensor:
    """(47), in place: y are the steps in units of σ, best first, and length2 their ‖C^(-1/2) y‖².

    The weight of a bad step is divided by its length (46), so that C stays positive definite.
    """
    n = C.shape[0]
    weights = k.weights.to(y)
    w = torch.where(weights >= 0, weights, weights * n / (length2 + 1e-8))  # (46)
    delta = (1 - h_sigma) * k.c_c * (2 - k.c_c)
    decay = 1 + k.c_1 * delta - k.c_1 - k.c_mu * float(k.weights.sum())
    rows = torch.cat([p_c[None], y])
    scaled = rows * torch.cat([w.new_tensor([k.c_1]), w * k.c_mu])[:, None]
    return torch.addmm(C, scaled.mT, rows, beta=decay, out=C)
