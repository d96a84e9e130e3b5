"""The cross-entropy method.

References:
    Rubinstein, The cross-entropy method for combinatorial and continuous optimization, Methodology and Computing in Applied
    Probability 1 (1999) 127-190; smoothing of de Boer, Kroese, Mannor, Rubinstein, A tutorial on the cross-entropy method,
    Annals of OR 134 (2005), equation (20); added noise of Szita and Lörincz, Neural Computation 18 (2006).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._matrix_search import MatrixSearch
from ._problem import Reason, keep_finite


class CEM(MatrixSearch):
    """The cross-entropy method: sample from independent distributions, and fit them to the best samples.

    Real and integer coordinates are normal (integers are rounded, and keep a deviation of at least ½); categorical ones
    have a table of probabilities.

    Args:
        x0: The first mean.
        population: How many members.
        sigma: The first standard deviation; by default that of `initial`, or 1.
        elites: The share of members that the distribution is fitted to.
        smoothing: How far the distribution moves to the fitted one.
        noise: The least standard deviation.
        **options: `initial` (members whose Gaussian is the first), and those of `Search`.

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
        sigma: float | None = None,
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
        sigma = 1.0 if self.sigma is None else self.sigma
        if self._initial is not None:
            first = keep_finite(self._initial.detach().to(x0))
            x0 = first.mean(0)
            if self.sigma is None and len(first) > 1:
                sigma = max(float(first.std(0).mean()), 1e-3)
        self.state["mean"], self.state["std"] = x0, torch.full_like(x0, sigma)
        counts = list(self.coordinates.categorical.values())
        if counts:
            table = torch.zeros(len(counts), max(counts), dtype=self.dtype, device=self.device)
            for row, count in enumerate(counts):
                table[row, :count] = 1 / count
            self.state["table"] = table

    def _move(self) -> dict[str, Tensor]:
        c, g = self.coordinates, self._make_generator()
        z = self._gauss(g, self.population, self.dim)
        x = z.mul_(self._tensor("std")).add_(self._tensor("mean"))
        if c.bounded:
            x = x.clamp(c.lower, c.upper)
        if c.categorical:
            u = self._uniform(g, self.population, len(c.categorical))
            x[:, list(c.categorical)] = choose(self._tensor("table"), u).to(self.dtype)
        return {"x": c.rounded(x)}

    def _select(self, proposal: dict[str, Tensor], fitness: Tensor) -> None:
        count = max(1, round(self.elites * self.population))
        best = fitness.argsort(stable=True)[:count]
        best = best[fitness[best].isfinite()]
        if len(best) == 0 or bool((fitness == fitness[0]).all()):
            return  # all members are equally good, so there are no elites
        elites = proposal["x"].index_select(0, best)
        floor = torch.full_like(self._tensor("std"), self.noise)
        floor[self.coordinates.integer] = max(self.noise, 0.5)
        # Smoothing: α times the Gaussian of the elites plus (1 - α) times the old one.
        self.state["mean"] = self._tensor("mean").lerp(elites.mean(0), self.smoothing)
        std = self._tensor("std").lerp(elites.std(0, correction=0), self.smoothing)
        self.state["std"] = torch.maximum(std, floor)
        labels = list(self.coordinates.categorical)
        if labels:
            self.state["table"] = frequencies(elites[:, labels], self._tensor("table"), self.smoothing, 0.2 / count)

    @property
    def mean(self) -> Tensor:
        """The centre of the distribution: the mean with integers rounded, and the likeliest categories."""
        mean = self.coordinates.rounded(self._tensor("mean").clamp(self.coordinates.lower, self.coordinates.upper))
        labels = list(self.coordinates.categorical)
        if labels:
            mean[labels] = self._tensor("table").argmax(1).to(mean)
        return mean

    def _find_convergence(self) -> Reason | None:
        real = torch.ones(self.dim, dtype=torch.bool, device=self.device)
        real[self.coordinates.whole] = False
        if not bool(real.any()) or self.generation == 0:
            return None
        return self._check_step(float(self._tensor("std")[real].max()), self._tensor("mean"))


def frequencies(elites: Tensor, table: Tensor, smoothing: float, floor: float) -> Tensor:
    """Return the smoothed probabilities of categories after a generation.

    Args:
        elites: The categories of the elites, n x C.
        table: The old probabilities, C x K: one column for each category, padded with zeros.
        smoothing: The factor on the frequencies among the elites.
        floor: The least probability of a category.
    """
    count = torch.zeros_like(table).scatter_add_(1, elites.long().mT, torch.ones_like(elites.mT))
    allowed = table > 0
    mixed = table.lerp(count / len(elites), smoothing)
    mixed = torch.where(allowed, mixed.clamp(min=floor), torch.zeros_like(mixed))
    return mixed / mixed.sum(1, keepdim=True)


def choose(table: Tensor, uniform: Tensor) -> Tensor:
    """Sample categories by inversion: for each uniform number (N x C), the first whose cumulative probability exceeds it."""
    cumulated = table.cumsum(1)
    cumulated[:, -1] = 1.0
    choice = torch.searchsorted(cumulated, uniform.mT.contiguous(), right=True).mT
    last = (table > 0).long().mul(torch.arange(table.shape[1], device=table.device)).amax(1)
    return torch.minimum(choice, last)
