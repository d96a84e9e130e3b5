"""Populations of chosen members."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn  # noqa: F401 - for the examples

from . import selection
from ._indexing import Indexing


class Choosing(Indexing):
    """How members are selected by fitness."""

    __slots__ = ()

    def sort(self, fitness: Tensor, maximize: bool = False) -> Self:
        """All members, best first.

        Args:
            fitness: One number per member; lower is better.
            maximize: Whether higher is better.

        Raises:
            ValueError: If there is not one number per member.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear, 3, 1, 1)
            >>> torch.equal(pop.sort(torch.tensor([3.0, 1.0, 2.0]))[0].weight, pop[1].weight)
            True
        """
        self._rank(fitness)
        return self._take_members(selection.order(fitness, maximize))

    def top(self, fitness: Tensor, k: int, maximize: bool = False) -> Self:
        """The `k` best members, best first.

        Args:
            fitness: One number per member; lower is better.
            k: How many.
            maximize: Whether higher is better.

        Example:
            >>> from moduli.population import Population
            >>> len(Population.of(nn.Linear, 3, 1, 1).top(torch.tensor([3.0, 1.0, 2.0]), 2))
            2
        """
        self._rank(fitness)
        return self._take_members(selection.top(fitness, k, maximize))

    def tournament(
        self,
        fitness: Tensor,
        k: int | None = None,
        size: int = 2,
        maximize: bool = False,
        generator: torch.Generator | None = None,
    ) -> Self:
        """The winners of `k` tournaments, as many as there are members by default.

        Args:
            fitness: One number per member; lower is better.
            k: How many tournaments.
            size: How many members take part in each.
            maximize: Whether higher is better.
            generator: Where the randomness comes from; torch's own by default.

        Example:
            >>> from moduli.population import Population
            >>> len(Population.of(nn.Linear, 3, 1, 1).tournament(torch.tensor([3.0, 1.0, 2.0]), 7))
            7
        """
        self._rank(fitness)
        return self._take_members(
            selection.tournament(fitness, self._count if k is None else k, size, maximize, generator)
        )

    def roulette(
        self,
        fitness: Tensor,
        k: int | None = None,
        maximize: bool = False,
        generator: torch.Generator | None = None,
    ) -> Self:
        """`k` members drawn in proportion to how much better than the worst they are.

        Args:
            fitness: One number per member; lower is better.
            k: How many; as many as there are members by default.
            maximize: Whether higher is better.
            generator: Where the randomness comes from; torch's own by default.

        Example:
            >>> from moduli.population import Population
            >>> len(Population.of(nn.Linear, 3, 1, 1).roulette(torch.tensor([3.0, 1.0, 2.0])))
            3
        """
        self._rank(fitness)
        return self._take_members(selection.roulette(fitness, self._count if k is None else k, maximize, generator))

    def _rank(self, fitness: Tensor) -> None:
        """Check what members are ranked by, and that all of them are here."""
        self._refuse_shard("a choice by fitness")
        self._fits(fitness)

    def _fits(self, numbers: Any, what: str = "fitness") -> None:
        self._check_members()
        shape = tuple(numbers.shape) if isinstance(numbers, Tensor) else None
        if shape != (self._count,):
            got = f"shape {shape}" if shape is not None else f"a {type(numbers).__name__}"
            raise ValueError(f"{what} is a tensor of one number for each of {self._count} members; got {got}")
