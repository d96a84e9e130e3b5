"""A genetic algorithm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._searches._ga import GA as Core
from ._search_link import PopulationSearch

__all__ = ["GA"]


class GA(PopulationSearch):
    r"""Tournaments choose parents, simulated binary crossover and polynomial mutation make children; elites stay.

    Args:
        elites: How many of the best stay.
        tournament: How many compete to become a parent.
        crossover: The probability that two parents mix.
        eta: How near children are to their parents.
        mutation: The probability that a coordinate mutates; None for one in P.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> _ = torch.manual_seed(0)
        >>> pop = mo.Population.of(torch.nn.Linear, 32, 2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(pop, m.GA())
        >>> for _ in range(60):
        ...     losses = opt.step(mo.closure(lambda net: (net(x) - y).square().mean()))
        >>> opt.attrs["best_loss"] < 0.1
        True

    References:
        K. Deb, R. B. Agrawal, "Simulated binary crossover for continuous search space", Complex Systems 9 (1995).
    """

    def __init__(
        self,
        *,
        elites: int = 2,
        tournament: int = 3,
        crossover: float = 0.9,
        eta: float = 10.0,
        mutation: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            seed=seed, elites=elites, tournament=tournament, crossover=crossover, eta=eta, mutation=mutation
        )

    def make(self, members: Tensor, seed: int, options: dict[str, Any]) -> Core:
        return Core(members[0], population=len(members), initial=members, seed=seed, **options)
