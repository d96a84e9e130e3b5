"""Separable natural evolution strategies.

References:
    Schaul, Glasmachers, Schmidhuber, High dimensions and heavy tails for natural evolution strategies, GECCO 2011,
    algorithm 2; learning rates of Wierstra et al., Natural evolution strategies, JMLR 15 (2014), table 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._distribution import Distribution
from ._problem import Reason, nes_utilities


class SNES(Distribution):
    """Separable natural evolution strategies: the natural gradient on a Gaussian with independent coordinates.

    Only the order of the fitness counts, and rescaling a coordinate (with its `sigma`) changes nothing.

    Args:
        x0: The first mean.
        population: How many members; by default 4 + 3 ln P.
        sigma: The first standard deviation, a number or one for each coordinate.
        lr_mean: η_μ.
        lr_sigma: η_σ; by default (3 + ln P) / (5 √P).
        antithetic: Whether members come in pairs, mirrored at the mean.
        **options: `rank`, `shapes`, and those of `Search`.

    Example:
        >>> import torch
        >>> from moduli.evolve import SNES
        >>> search = SNES(torch.full((10,), 1.0))
        >>> for _ in range(300):
        ...     search.tell(search.ask().square().sum(1))
        >>> search.best_fitness < 1e-6
        True

    References:
        Schaul, Glasmachers, Schmidhuber (2011), algorithm 2.
    """

    def __init__(
        self,
        x0: Tensor,
        *,
        population: int | None = None,
        sigma: float | Tensor = 1.0,
        lr_mean: float = 1.0,
        lr_sigma: float | None = None,
        antithetic: bool = False,
        **options: Any,
    ) -> None:
        self._sigma0 = torch.as_tensor(sigma)
        if not bool((self._sigma0 > 0).all()):
            raise ValueError("sigma has to be positive in every coordinate")
        self.lr_mean = lr_mean
        self.lr_sigma = learning_rate(max(x0.numel(), 1)) if lr_sigma is None else lr_sigma
        super().__init__(x0, population=population, antithetic=antithetic, **options)

    def _start(self, x0: Tensor) -> None:
        self.state["mean"], self.state["sigma"] = x0, self._sigma0.to(x0).expand(self.dim).clone()

    def _scale(self) -> Tensor | float:
        return self._tensor("sigma")

    def _learn(self, fitness: Tensor) -> None:
        mean, sigma, utilities = self._tensor("mean"), self._tensor("sigma"), nes_utilities(fitness)
        linear, square = self._moments(*self._pair_weights(utilities))
        # mean ← mean + η_μ σ∘Σ u_k s_k
        self.state["mean"] = torch.addcmul(mean, sigma, linear, value=self.lr_mean)
        # σ ← σ∘exp(η_σ/2 Σ u_k (s_k² - 1)), by e⁵ at most, because exp overflows for estimates of tiny populations.
        exponent = (square - float(utilities.sum())).mul_(self.lr_sigma / 2)
        self.state["sigma"] = sigma * exponent.clamp_(-5, 5).exp_()

    def _find_convergence(self) -> Reason | None:
        return self._check_step(float(self._tensor("sigma").max()), self._tensor("mean"))


def learning_rate(dim: int) -> float:
    """Return η_σ = (3 + ln d) / (5 √d)."""
    return (3 + math.log(dim)) / (5 * math.sqrt(dim))
