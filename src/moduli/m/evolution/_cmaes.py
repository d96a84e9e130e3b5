"""Covariance matrix adaptation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._searches._cmaes import CMAES as Core
from ._link import SearchLink

__all__ = ["CMAES"]


class CMAES(SearchLink):
    r"""Moves the parameters to the weighted mean of the best of a Gaussian whose covariance learns from the steps.

    Args:
        population: How many models are tried; None for 4 + 3 ln P.
        sigma: The first step size.
        covariance: "full" (P x P), or "separable".
        restarts: None, "ipop" or "bipop": begin again with larger populations where the search has converged.
        max_restarts: How often at most.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(net, m.CMAES(sigma=0.5))
        >>> for _ in range(80):
        ...     loss = opt.step(mo.closure(lambda f: (f(x) - y).square().mean()))
        >>> bool((net(x) - y).abs().max() < 0.1)
        True

    References:
        N. Hansen, "The CMA evolution strategy: a tutorial", 2016. R. Ros, N. Hansen, "A simple modification in CMA-ES achieving
        linear time and space complexity", PPSN 2008. N. Hansen, "Benchmarking a BI-population CMA-ES on the BBOB-2009
        function testbed", GECCO 2009.
    """

    def __init__(
        self,
        *,
        population: int | None = None,
        sigma: float = 0.3,
        covariance: str = "full",
        restarts: str | None = None,
        max_restarts: int = 9,
        seed: int = 0,
    ) -> None:
        super().__init__(
            seed=seed,
            population=population,
            sigma=sigma,
            covariance=covariance,
            restarts=restarts,
            max_restarts=max_restarts,
        )

    def make(self, x0: Tensor, seed: int, options: dict[str, Any]) -> Core:
        return Core(x0, seed=seed, **options)
