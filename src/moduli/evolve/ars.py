"""Augmented random search.

References:
    Mania, Guy, Recht, Simple random search of static linear policies is competitive for reinforcement learning,
    NeurIPS 2018, algorithm 2 (V1-t; the normalisation of observations of V2 belongs to the policy).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._distribution import GradientSearch


class ARS(GradientSearch):
    """Augmented random search: finite differences along the best random directions, divided by their deviation.

    Args:
        x0: The first mean.
        population: The number of members: two for each direction, hence even.
        top: How many directions are used; by default all of them.
        lr: The step size.
        sigma: The standard deviation of the members around the mean.
        **options: `optimizer`, `momentum`, `rank`, `shapes`, and those of `Search`.

    Example:
        >>> import torch
        >>> from moduli.evolve import ARS
        >>> search = ARS(torch.full((10,), 1.0), population=20, top=5)
        >>> for _ in range(200):
        ...     search.tell(search.ask().square().sum(1))
        >>> bool(search.mean.norm() < 0.3)
        True

    References:
        Mania, Guy, Recht (2018), algorithm 2.
    """

    least = multiple = 2

    def __init__(
        self,
        x0: Tensor,
        *,
        population: int = 32,
        top: int | None = None,
        lr: float = 0.02,
        sigma: float = 0.05,
        optimizer: str = "sgd",
        **options: Any,
    ) -> None:
        if population % 2:
            raise ValueError(f"ARS looks both ways along each direction: population={population} has to be even")
        if not options.pop("antithetic", True):
            raise ValueError("ARS looks both ways along each direction: antithetic=False is another method; use OpenES")
        directions = population // 2
        self.top = directions if top is None else top
        if not 1 <= self.top <= max(directions, 1):
            raise ValueError(f"top={top} of {directions} directions; choose between 1 and {directions}")
        super().__init__(x0, population=population, lr=lr, sigma=sigma, optimizer=optimizer, antithetic=True, **options)

    def _estimates(self, fitness: Tensor) -> Iterator[tuple[slice, Tensor]]:
        # Line 7 with the sign of a gradient: Σ (f₊ - f₋) δ / (b σ_f) over the b best directions.
        return self._sums(direction_weights(fitness[0::2], fitness[1::2], self.top).to(self.dtype))


def direction_weights(plus: Tensor, minus: Tensor, top: int) -> Tensor:
    """Return the weights of directions in the estimate (lines 6 and 7); zero for all but the `top` ones.

    Directions are ordered by the better of their two members. The weights are divided by the deviation of the fitness. A
    direction with a fitness that is not finite gets zero.

    Args:
        plus: The fitness of the members on one side, one for each direction.
        minus: The fitness of the mirrored members.
        top: How many directions get a weight.
    """
    weights = torch.zeros_like(plus)
    usable = plus.isfinite() & minus.isfinite()
    score = torch.where(usable, torch.minimum(plus, minus), torch.full_like(plus, torch.inf))
    chosen = score.argsort(stable=True)[:top]
    chosen = chosen[usable[chosen]]
    if len(chosen) == 0:
        return weights
    deviation = torch.cat([plus[chosen], minus[chosen]]).std(correction=0)
    if deviation > 0:
        weights[chosen] = (plus[chosen] - minus[chosen]) / (len(chosen) * deviation)
    return weights
