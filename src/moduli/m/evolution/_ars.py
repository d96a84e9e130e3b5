"""Augmented random search."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._searches._ars import ARS as Core
from ._link import SearchLink

__all__ = ["ARS"]


class ARS(SearchLink):
    r"""Emits the mean of the best directions, weighted by the differences of their losses over the deviation of these.

    Args:
        population: How many models are tried, two for each direction.
        top: How many directions are kept; None for all.
        sigma: Their standard deviation around the parameters.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(net, m.ARS(population=32), m.LR(0.05))
        >>> for _ in range(100):
        ...     loss = opt.step(mo.closure(lambda f: (f(x) - y).square().mean()))
        >>> bool((net(x) - y).abs().max() < 0.3)
        True

    References:
        H. Mania, A. Guy, B. Recht, "Simple random search of static linear policies is competitive for reinforcement learning",
        NeurIPS 2018, algorithm 2.
    """

    def __init__(self, *, population: int = 32, top: int | None = None, sigma: float = 0.05, seed: int = 0) -> None:
        super().__init__(seed=seed, population=population, top=top, sigma=sigma)

    def make(self, x0: Tensor, seed: int, options: dict[str, Any]) -> Core:
        return Core(x0, seed=seed, optimizer="sgd", lr=1.0, **options)
