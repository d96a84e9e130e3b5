"""`XNES`: exponential natural evolution strategies, asked and told."""

import math
from typing import Any

import torch
from torch import Tensor

from .._evolution import _xnes as core
from .._evolution._ranks import nes_utilities
from ._distribution import Distribution
from ._reason import Reason

__all__ = ["XNES"]


class XNES(Distribution):
    """Exponential natural evolution strategies: the natural gradient on a Gaussian with any covariance.

    It keeps a P x P matrix and the P-dimensional samples of a generation. Rotating the problem changes nothing.

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
        if not sigma > 0:
            raise ValueError(f"sigma={sigma}: members need a positive standard deviation")
        rate = core.learning_rate(max(x0.numel(), 1))
        self._sigma0, self.lr_mean = sigma, lr_mean
        self.lr_sigma = rate if lr_sigma is None else lr_sigma
        self.lr_shape = rate if lr_shape is None else lr_shape
        size = 4 + int(3 * math.log(max(x0.numel(), 1))) if population is None else population
        super().__init__(x0, population=size, antithetic=False, **options)

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
        z = self._noise.rows(self._int("seed"), self._int("counter"), 0, self.population)
        u = nes_utilities(fitness).to(z)
        self.state["mean"], self.state["sigma"], self.state["B"] = core.update(
            self._tensor("mean"),
            self._float("sigma"),
            self._tensor("B"),
            z,
            u,
            self.lr_mean,
            self.lr_sigma,
            self.lr_shape,
        )

    def _converged(self) -> Reason | None:
        size = max(1.0, float(self._tensor("mean").abs().max()))
        widest = self._float("sigma") * float(self._tensor("B").norm(dim=1).max())
        if widest <= self.tol * size:
            return Reason.SMALL_STEP
        return Reason.DIVERGED if not math.isfinite(size) or not widest < 1e20 else None
