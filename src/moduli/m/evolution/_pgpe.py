"""Policy gradients with parameter-based exploration."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._searches._pgpe import PGPE as Core
from ._link import SearchLink

__all__ = ["PGPE"]


class PGPE(SearchLink):
    r"""Emits an estimate of the gradient, and adapts the standard deviation of every parameter.

    Args:
        population: How many models are tried.
        sigma: The first standard deviation.
        sigma_lr: Learning rate of the deviations.
        max_change: The largest relative change of a deviation.
        shape: How losses enter: "ranks" (centred ranks), "standardize" or "raw".
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(net, m.PGPE(population=32), m.Adam(), m.LR(0.1))
        >>> for _ in range(80):
        ...     loss = opt.step(mo.closure(lambda f: (f(x) - y).square().mean()))
        >>> bool((net(x) - y).abs().max() < 0.3)
        True

    References:
        F. Sehnke, C. Osendorfer, T. Rückstiess, A. Graves, J. Peters, J. Schmidhuber, "Parameter-exploring policy gradients",
        Neural Networks 23 (2010), algorithm 1.
    """

    def __init__(
        self,
        *,
        population: int = 64,
        sigma: float = 0.1,
        sigma_lr: float = 0.1,
        max_change: float = 0.2,
        shape: str = "ranks",
        seed: int = 0,
    ) -> None:
        super().__init__(
            seed=seed, population=population, sigma=sigma, sigma_lr=sigma_lr, max_change=max_change, shape=shape
        )

    def make(self, x0: Tensor, seed: int, options: dict[str, Any]) -> Core:
        return Core(x0, seed=seed, optimizer="sgd", lr=1.0, **options)
