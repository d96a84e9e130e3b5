"""A genetic algorithm on real, integer and categorical coordinates.

References:
    Deb and Agrawal, Simulated binary crossover for continuous search space, Complex Systems 9 (1995) 115-148, equation (5)
    and (9); Goldberg and Deb, A comparative analysis of selection schemes (1991), for tournaments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._matrix_search import MatrixSearch
from ._problem import keep_finite


class GA(MatrixSearch):
    """A genetic algorithm: winners of tournaments cross over and mutate; the best members survive.

    Real and integer coordinates cross over by simulated binary crossover and mutate by normal steps as large as the
    members differ; categorical ones are taken from either parent and mutate to any category.

    Args:
        x0: Where to start.
        population: How many members.
        elites: How many of the best members survive unchanged.
        tournament: How many members compete to be a parent.
        crossover: How likely a child has two parents.
        eta: The order of the crossover: the higher, the more children resemble a parent.
        mutation: How likely a coordinate mutates; by default 1/P.
        **options: `spread`, `initial`, and those of `Search`.

    Example:
        >>> import torch
        >>> from moduli.evolve import GA
        >>> search = GA(torch.zeros(3), bounds=(-4.0, 4.0), categorical={2: 5})
        >>> for _ in range(80):
        ...     x = search.ask()
        ...     search.tell((x[:, :2] - 1).square().sum(1) + (x[:, 2] != 3))
        >>> search.best_fitness < 1e-3, int(search.best[2])
        (True, 3)

    References:
        Deb and Agrawal (1995); Goldberg and Deb (1991).
    """

    allows_integer = True
    allows_categorical = True

    def __init__(
        self,
        x0: Tensor,
        *,
        population: int = 64,
        elites: int = 2,
        tournament: int = 3,
        crossover: float = 0.9,
        eta: float = 10.0,
        mutation: float | None = None,
        **options: Any,
    ) -> None:
        if tournament < 1:
            raise ValueError(f"tournament={tournament} must be at least 1")
        if elites < 0:
            raise ValueError(f"elites={elites} can't be negative")
        self.elites, self.tournament = min(elites, max(population - 1, 0)), tournament
        self.crossover, self.eta, self.mutation = crossover, eta, mutation
        super().__init__(x0, population=population, **options)

    def _start(self, x0: Tensor) -> None:
        self.state["x"] = self._draw_first(x0)
        self.state["fitness"] = torch.full((self.population,), torch.inf, dtype=torch.float64, device=self.device)

    def _move(self) -> dict[str, Tensor]:
        x, fitness, c, g = self._tensor("x"), self._tensor("fitness"), self.coordinates, self._make_generator()
        if self.generation == 0:
            return {"x": x}
        n, dim = x.shape
        entrants = torch.randint(n, (2 * n, self.tournament), generator=g, device=self.device)
        parents = x.index_select(0, tournament(fitness, entrants))
        a, b = parents[:n], parents[n:]
        swap = self._uniform(g, n, dim) < 0.5
        crossed = sbx(a, b, self._uniform(g, n, dim), swap, self.eta)
        step = self._gauss(g, n, dim)
        deviation = keep_finite(x).std(0, correction=0)
        # The deviation of integers is at least one; a category is copied from one of the parents.
        deviation[c.whole] = deviation[c.whole].clamp(min=1.0)
        labels = list(c.categorical)
        if labels:
            crossed[:, labels] = torch.where(swap, a, b)[:, labels]
        both = self._uniform(g, n, 1) < self.crossover
        child = torch.where(both, crossed, a)
        mutates = self._uniform(g, n, dim) < (1 / dim if self.mutation is None else self.mutation)
        changed = child + deviation * step
        if labels:
            counts = torch.tensor(list(c.categorical.values()), dtype=self.dtype, device=self.device)
            changed[:, labels] = (self._uniform(g, n, len(labels)) * counts).floor()
        child = torch.where(mutates, changed, child).clamp(c.lower, c.upper)
        return {"x": c.rounded(child).clamp(c.lower, c.upper)}

    def _select(self, proposal: dict[str, Tensor], fitness: Tensor) -> None:
        x, old, fitness = proposal["x"], self._tensor("fitness"), fitness.clone()
        if self.generation and self.elites:
            best = old.argsort(stable=True)[: self.elites]
            worst = fitness.argsort(stable=True, descending=True)[: self.elites]
            better = old[best] < fitness[worst]
            best, worst = best[better], worst[better]
            x[worst], fitness[worst] = self._tensor("x")[best], old[best]
        self.state["x"], self.state["fitness"] = x, fitness


def tournament(fitness: Tensor, entrants: Tensor) -> Tensor:
    """Return the winner of each row of `entrants` (indices of members): the lowest fitness, the first of equal ones."""
    return entrants.gather(1, fitness[entrants].argmin(1, keepdim=True))[:, 0]


def sbx(a: Tensor, b: Tensor, u: Tensor, swap: Tensor, eta: float) -> Tensor:
    """Return a child of every pair of rows, ½ ((1 ± β) a + (1 ∓ β) b), by simulated binary crossover.

    β = (2u)^(1/(η+1)) for u ≤ ½ and (1/(2(1-u)))^(1/(η+1)) beyond. Equal parents have equal children.

    Args:
        a: The first parents, one per row.
        b: The second parents.
        u: Uniform numbers of the same shape.
        swap: Where the upper sign holds.
        eta: The order η: the higher, the more children resemble a parent.
    """
    power = 1 / (eta + 1)
    beta = torch.where(u <= 0.5, (2 * u).pow(power), (2 * (1 - u)).clamp(min=1e-12).pow(-power))
    return (a + b) / 2 + torch.where(swap, beta, -beta) * (a - b) / 2
