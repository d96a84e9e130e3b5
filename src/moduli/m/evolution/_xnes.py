"""Exponential natural evolution strategies."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._searches._xnes import XNES as Core
from ._link import SearchLink

__all__ = ["XNES"]


class XNES(SearchLink):
    r"""Moves the parameters along the natural gradient of the expected loss under a Gaussian with any covariance (P x P).

    Args:
        population: How many models are tried; None for 4 + 3 ln P.
        sigma: The first standard deviation.
        lr_mean: Learning rate of the parameters.
        lr_sigma: Learning rate of the step size; None for the paper's.
        lr_shape: Learning rate of the shape; None for the paper's.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(net, m.XNES(population=16))
        >>> for _ in range(60):
        ...     loss = opt.step(mo.closure(lambda f: (f(x) - y).square().mean()))
        >>> bool((net(x) - y).abs().max() < 0.3)
        True

    References:
        T. Glasmachers, T. Schaul, Y. Sun, D. Wierstra, J. Schmidhuber, "Exponential natural evolution strategies", GECCO 2010,
        algorithm 1.
    """

    def __init__(
        self,
        *,
        population: int | None = None,
        sigma: float = 1.0,
        lr_mean: float = 1.0,
        lr_sigma: float | None = None,
        lr_shape: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            seed=seed, population=population, sigma=sigma, lr_mean=lr_mean, lr_sigma=lr_sigma, lr_shape=lr_shape
        )

    def make(self, x0: Tensor, seed: int, options: dict[str, Any]) -> Core:
        return Core(x0, seed=seed, **options)
