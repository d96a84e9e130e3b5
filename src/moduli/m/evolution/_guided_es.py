"""Evolution strategies guided by the estimates so far."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._searches._guided_es import GuidedES as Core
from ._link import SearchLink

__all__ = ["GuidedES"]


class GuidedES(SearchLink):
    r"""Emits a gradient estimate from noise that is stretched along the subspace of the latest estimates.

    Args:
        population: How many models are tried.
        sigma: Their standard deviation around the parameters.
        subspace: How many estimates span the subspace.
        alpha: How much of the noise is in the whole space.
        beta: Scale of the estimate.
        shape: How losses enter: "ranks" (centred ranks), "standardize" or "raw".
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(net, m.GuidedES(population=32), m.Adam(), m.LR(0.1))
        >>> for _ in range(80):
        ...     loss = opt.step(mo.closure(lambda f: (f(x) - y).square().mean()))
        >>> bool((net(x) - y).abs().max() < 0.3)
        True

    References:
        N. Maheswaranathan, L. Metz, G. Tucker, D. Choi, J. Sohl-Dickstein, "Guided evolutionary strategies", ICML 2019.
    """

    def __init__(
        self,
        *,
        population: int = 64,
        sigma: float = 0.1,
        subspace: int = 4,
        alpha: float = 0.5,
        beta: float = 1.0,
        shape: str = "ranks",
        seed: int = 0,
    ) -> None:
        super().__init__(
            seed=seed, population=population, sigma=sigma, subspace=subspace, alpha=alpha, beta=beta, shape=shape
        )

    def make(self, x0: Tensor, seed: int, options: dict[str, Any]) -> Core:
        return Core(x0, seed=seed, optimizer="sgd", lr=1.0, **options)
