"""`CEM`: the cross-entropy method, asked and told."""

from typing import Any

import torch
from torch import Tensor

from .._evolution import _cem as core
from ._base import Members
from ._reason import Reason

__all__ = ["CEM"]


class CEM(Members):
    """The cross-entropy method: sample from independent distributions, and fit them to the best samples.

    Real and integer coordinates are normal (integers are rounded, and keep a deviation of at least ½); categorical ones
    have a table of probabilities.

    Args:
        x0: The first mean.
        population: How many members.
        sigma: The first standard deviation.
        elites: The share of members that the distribution is fitted to.
        smoothing: How far the distribution moves to the fitted one.
        noise: The least standard deviation.
        **options: Those of `Search`.

    Example:
        >>> import torch
        >>> from moduli.evolve import CEM
        >>> search = CEM(torch.zeros(3), bounds=(-4.0, 4.0), categorical={2: 5})
        >>> for _ in range(60):
        ...     x = search.ask()
        ...     search.tell((x[:, :2] - 1).square().sum(1) + (x[:, 2] != 3))
        >>> search.best_fitness < 1e-6, int(search.mean[2])
        (True, 3)

    References:
        Rubinstein (1999); de Boer et al. (2005); Szita and Lörincz (2006).
    """

    allows_integer = True
    allows_categorical = True

    def __init__(
        self,
        x0: Tensor,
        *,
        population: int = 64,
        sigma: float = 1.0,
        elites: float = 0.25,
        smoothing: float = 0.8,
        noise: float = 0.0,
        **options: Any,
    ) -> None:
        if not 0 < elites <= 1:
            raise ValueError(f"elites={elites}: the share of elites lies between 0 and 1")
        if not 0 < smoothing <= 1:
            raise ValueError(f"smoothing={smoothing} lies between 0 and 1")
        self.sigma, self.elites, self.smoothing, self.noise = sigma, elites, smoothing, noise
        super().__init__(x0, population=population, **options)

    def _start(self, x0: Tensor) -> None:
        self.state["mean"], self.state["std"] = x0, torch.full_like(x0, self.sigma)
        counts = list(self.coordinates.categorical.values())
        if counts:
            table = torch.zeros(len(counts), max(counts), dtype=self.dtype, device=self.device)
            for row, count in enumerate(counts):
                table[row, :count] = 1 / count
            self.state["table"] = table

    def _move(self) -> dict[str, Tensor]:
        c, g = self.coordinates, self._seeded()
        z = torch.randn(self.population, self.dim, generator=g, dtype=self.dtype, device=self.device)
        x = z.mul_(self._tensor("std")).add_(self._tensor("mean"))
        if c.bounded:
            x = x.clamp(c.lower, c.upper)
        if c.categorical:
            u = torch.rand(self.population, len(c.categorical), generator=g, dtype=self.dtype, device=self.device)
            x[:, list(c.categorical)] = core.choose(self._tensor("table"), u).to(self.dtype)
        return {"x": c.rounded(x)}

    def _select(self, proposal: dict[str, Tensor], fitness: Tensor) -> None:
        count = max(1, round(self.elites * self.population))
        best = fitness.argsort(stable=True)[:count]
        best = best[fitness[best].isfinite()]
        if len(best) == 0 or bool((fitness == fitness[0]).all()):
            return  # there is nothing to tell the members apart by
        elites = proposal["x"].index_select(0, best)
        floor = torch.full_like(self._tensor("std"), self.noise)
        floor[self.coordinates.integer] = max(self.noise, 0.5)
        mean, std = core.refit(elites, self._tensor("mean"), self._tensor("std"), self.smoothing, floor)
        self.state["mean"], self.state["std"] = mean, std
        labels = list(self.coordinates.categorical)
        if labels:
            self.state["table"] = core.frequencies(
                elites[:, labels], self._tensor("table"), self.smoothing, 0.2 / count
            )

    @property
    def mean(self) -> Tensor:
        """The centre of the distribution: the mean, whole numbers rounded, and the likeliest categories."""
        mean = self.coordinates.rounded(self._tensor("mean").clamp(self.coordinates.lower, self.coordinates.upper))
        labels = list(self.coordinates.categorical)
        if labels:
            mean[labels] = self._tensor("table").argmax(1).to(mean)
        return mean

    def _converged(self) -> Reason | None:
        real = torch.ones(self.dim, dtype=torch.bool, device=self.device)
        real[self.coordinates.whole] = False
        if not bool(real.any()) or self.generation == 0:
            return None
        size = max(1.0, float(self._tensor("mean").abs().max()))
        return Reason.SMALL_STEP if float(self._tensor("std")[real].max()) <= self.tol * size else None
