"""Differential evolution."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._searches._de import DE as Core
from ._search_link import PopulationSearch

__all__ = ["DE"]


class DE(PopulationSearch):
    r"""Tries differences of members added to members, and keeps what is better.

    Args:
        strategy: "rand/1", "best/1" or "current-to-pbest/1".
        adapt: None, "jade" or "shade": learn scale and rate from what has worked.
        scale: The factor of differences, F.
        rate: The share of coordinates taken from a trial, CR.
        p: The share of best members, for "current-to-pbest/1".
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> _ = torch.manual_seed(0)
        >>> pop = mo.Population.of(torch.nn.Linear, 32, 2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(pop, m.DE())
        >>> for _ in range(60):
        ...     losses = opt.step(mo.closure(lambda net: (net(x) - y).square().mean()))
        >>> opt.attrs["best_loss"] < 1e-3
        True

    References:
        R. Storn, K. Price, "Differential evolution", Journal of Global Optimization 11 (1997). J. Zhang, A. C. Sanderson, "JADE",
        IEEE TEC 13 (2009). R. Tanabe, A. Fukunaga, "Success-history based parameter adaptation for differential evolution",
        CEC 2013.
    """

    def __init__(
        self,
        *,
        strategy: str = "rand/1",
        adapt: str | None = None,
        scale: float = 0.5,
        rate: float = 0.9,
        p: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__(seed=seed, strategy=strategy, adapt=adapt, scale=scale, rate=rate, p=p)

    def make(self, members: Tensor, seed: int, options: dict[str, Any]) -> Core:
        return Core(members[0], population=len(members), initial=members, seed=seed, **options)
