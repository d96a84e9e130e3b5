"""The cross-entropy method."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._searches._cem import CEM as Core
from ._search_link import PopulationSearch

__all__ = ["CEM"]


class CEM(PopulationSearch):
    r"""Draws members from a Gaussian that follows the best of them.

    Args:
        sigma: The first standard deviation around the mean of the members; None for theirs.
        elites: The share of members that the Gaussian follows.
        smoothing: How much of the new Gaussian is taken.
        noise: Added to the deviations, so that they do not vanish too early.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> _ = torch.manual_seed(0)
        >>> pop = mo.Population.of(torch.nn.Linear, 32, 2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(pop, m.CEM())
        >>> for _ in range(40):
        ...     losses = opt.step(mo.closure(lambda net: (net(x) - y).square().mean()))
        >>> opt.attrs["best_loss"] < 1e-2
        True

    References:
        R. Y. Rubinstein, "The cross-entropy method for combinatorial and continuous optimization", Methodology and Computing in
        Applied Probability 1 (1999).
    """

    def __init__(
        self,
        *,
        sigma: float | None = None,
        elites: float = 0.25,
        smoothing: float = 0.8,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(seed=seed, sigma=sigma, elites=elites, smoothing=smoothing, noise=noise)

    def make(self, members: Tensor, seed: int, options: dict[str, Any]) -> Core:
        spread = max(float(members.std(0).mean()), 1e-3) if len(members) > 1 else 1.0
        return Core(members.mean(0), population=len(members), seed=seed, **{"sigma": spread, **options})
