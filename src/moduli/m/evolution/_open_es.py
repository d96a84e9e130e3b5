"""Evolution strategies as a gradient estimate."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._searches._open_es import OpenES as Core
from ._link import SearchLink

__all__ = ["OpenES"]


class OpenES(SearchLink):
    r"""Emits an estimate of the gradient of $E[f(x + \sigma\epsilon)]$, for the next link to use.

    $u = \frac{1}{n\sigma}\sum_i f(x + \sigma\epsilon_i)\,\epsilon_i$; the noise is drawn again from seeds, so that memory does not
    grow with the number of models.

    Args:
        population: How many models are tried.
        sigma: Their standard deviation around the parameters.
        antithetic: Whether models come in pairs, mirrored at the parameters.
        shape: How losses enter: "ranks" (centred ranks), "standardize" or "raw".
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(net, m.OpenES(population=32), m.Adam(), m.LR(0.1))
        >>> for _ in range(80):
        ...     loss = opt.step(mo.closure(lambda f: (f(x) - y).square().mean()))
        >>> bool((net(x) - y).abs().max() < 0.3)
        True

    References:
        T. Salimans, J. Ho, X. Chen, S. Sidor, I. Sutskever, "Evolution strategies as a scalable alternative to reinforcement
        learning", 2017, equation (1).
    """

    def __init__(
        self, *, population: int = 64, sigma: float = 0.1, antithetic: bool = True, shape: str = "ranks", seed: int = 0
    ) -> None:
        super().__init__(seed=seed, population=population, sigma=sigma, antithetic=antithetic, shape=shape)

    def make(self, x0: Tensor, seed: int, options: dict[str, Any]) -> Core:
        return Core(x0, seed=seed, optimizer="sgd", lr=1.0, **options)
