"""Exponential natural evolution strategies.

References:
    Glasmachers, Schaul, Sun, Wierstra, Schmidhuber, Exponential natural evolution strategies, GECCO 2010, algorithm 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._distribution import Distribution
from ._problem import Reason, check_sigma, nes_utilities


class XNES(Distribution):
    """Exponential natural evolution strategies: the natural gradient on a Gaussian with any covariance.

    It stores a P x P matrix and the P-dimensional samples of a generation, and is invariant under rotations.

    Args:
        x0: The first mean.
        population: How many members; by default 4 + 3 ln P.
        sigma: The first standard deviation.
        lr_mean: η_δ.
        lr_sigma: η_σ; by default (9 + 3 ln P) / (5 P √P).
        lr_shape: η_B; by default the same.
        **options: Those of `Search`.

    Example:
        >>> import torch
        >>> from moduli.evolve import XNES
        >>> search = XNES(torch.full((5,), 1.0, dtype=torch.float64))
        >>> for _ in range(300):
        ...     search.tell(search.ask().square().sum(1))
        >>> search.best_fitness < 1e-6
        True

    References:
        Glasmachers, Schaul, Sun, Wierstra, Schmidhuber (2010), algorithm 1.
    """

    def __init__(
        self,
        x0: Tensor,
        *,
        population: int | None = None,
        sigma: float = 1.0,
        lr_mean: float = 1.0,
        lr_sigma: float | None = None,
        lr_shape: float | None = None,
        **options: Any,
    ) -> None:
        check_sigma(sigma)
        rate = learning_rate(max(x0.numel(), 1))
        self._sigma0, self.lr_mean = sigma, lr_mean
        self.lr_sigma = rate if lr_sigma is None else lr_sigma
        self.lr_shape = rate if lr_shape is None else lr_shape
        super().__init__(x0, population=population, antithetic=False, **options)

    def _start(self, x0: Tensor) -> None:
        self.state["mean"], self.state["sigma"] = x0, float(self._sigma0)
        self.state["B"] = torch.eye(self.dim, dtype=self.dtype, device=self.device)

    def _scale(self) -> Tensor | float:
        return self._float("sigma")

    def _separable(self) -> bool:
        return False

    def _directions(self, start: int, stop: int) -> Tensor:
        return super()._directions(start, stop) @ self._tensor("B").mT

    def _learn(self, fitness: Tensor) -> None:
        # Lines 8 to 12, A = σ B: G_δ = Σ u_k z_k; G_M = Σ u_k (z_k z_kᵀ - I); G_σ = tr(G_M)/d; G_B = G_M - G_σ I.
        z = super()._directions(0, self.population)
        u = nes_utilities(fitness).to(z)
        mean, sigma, B = self._tensor("mean"), self._float("sigma"), self._tensor("B")
        moment = (z * u[:, None]).mT @ z
        moment.diagonal().sub_(float(u.sum()))
        scale = float(moment.diagonal().sum()) / self.dim
        moment.diagonal().sub_(scale)
        self.state["mean"] = mean + self.lr_mean * sigma * (B @ (u @ z))
        self.state["sigma"] = sigma * math.exp(min(max(self.lr_sigma / 2 * scale, -5.0), 5.0))
        # The exponent has trace zero, so det B stays 1.
        self.state["B"] = B @ torch.linalg.matrix_exp(self.lr_shape / 2 * moment)

    def _find_convergence(self) -> Reason | None:
        widest = self._float("sigma") * float(self._tensor("B").norm(dim=1).max())
        return self._check_step(widest, self._tensor("mean"))


def learning_rate(dim: int) -> float:
    """Return η_σ = η_B = (9 + 3 ln d) / (5 d √d)."""
    return (9 + 3 * math.log(dim)) / (5 * dim * math.sqrt(dim))
