"""Separable natural evolution strategies."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._searches._snes import SNES as Core
from ._link import SearchLink

__all__ = ["SNES"]


class SNES(SearchLink):
    r"""Moves the parameters along the natural gradient of the expected loss, and adapts a deviation for each.

    Args:
        population: How many models are tried; None for 4 + 3 ln P.
        sigma: The first standard deviation.
        lr_mean: Learning rate of the parameters.
        lr_sigma: Learning rate of the deviations; None for the paper's.
        antithetic: Whether models come in pairs, mirrored at the parameters.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(net, m.SNES(population=16))
        >>> for _ in range(60):
        ...     loss = opt.step(mo.closure(lambda f: (f(x) - y).square().mean()))
        >>> bool((net(x) - y).abs().max() < 0.3)
        True

    References:
        T. Schaul, T. Glasmachers, J. Schmidhuber, "High dimensions and heavy tails for natural evolution strategies", GECCO
        2011, algorithm 2.
    """

    def __init__(
        self,
        *,
        population: int | None = None,
        sigma: float = 1.0,
        lr_mean: float = 1.0,
        lr_sigma: float | None = None,
        antithetic: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(
            seed=seed, population=population, sigma=sigma, lr_mean=lr_mean, lr_sigma=lr_sigma, antithetic=antithetic
        )

    def make(self, x0: Tensor, seed: int, options: dict[str, Any]) -> Core:
        return Core(x0, seed=seed, **options)
