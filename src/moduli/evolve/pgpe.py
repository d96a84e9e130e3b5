"""Parameter-exploring policy gradients, with symmetric sampling.

References:
    Sehnke, Osendorfer, Rückstiess, Graves, Peters, Schmidhuber, Parameter-exploring policy gradients, Neural Networks 23
    (2010) 551-559, section 3.2 and algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._distribution import GradientSearch
from ._problem import SHAPES, check_choice, clean


class PGPE(GradientSearch):
    """Policy gradients with parameter-based exploration: both the mean and the deviation of each coordinate descend.

    The relative change of a deviation in one generation is at most `max_change`.

    Args:
        x0: The first mean.
        sigma: The first standard deviation.
        sigma_lr: The learning rate of the deviations.
        max_change: The largest relative change of a deviation.
        shape: How fitness is transformed, as in `OpenES`.
        **options: Those of `OpenES`.

    Example:
        >>> import torch
        >>> from moduli.evolve import PGPE
        >>> search = PGPE(torch.full((10,), 1.0), population=40, lr=0.1, sigma=0.3)
        >>> for _ in range(100):
        ...     search.tell(search.ask().square().sum(1))
        >>> bool(search.mean.norm() < 0.3)
        True

    References:
        Sehnke et al. (2010), algorithm 1.
    """

    def __init__(
        self,
        x0: Tensor,
        *,
        sigma: float = 0.1,
        sigma_lr: float = 0.1,
        max_change: float = 0.2,
        shape: str = "ranks",
        **options: Any,
    ) -> None:
        check_choice("shape", shape, tuple(SHAPES))
        self.sigma_lr, self.max_change, self.shape = sigma_lr, max_change, shape
        super().__init__(x0, sigma=sigma, **options)

    def _start(self, x0: Tensor) -> None:
        super()._start(x0)
        self.state["sigma"] = torch.full_like(x0, self.sigma)

    def _scale(self) -> Tensor | float:
        return self._tensor("sigma")

    def gradients(self, fitness: Tensor) -> tuple[Tensor, Tensor]:
        """Return the estimates of ∂E[f]/∂mean and ∂E[f]/∂σ; the state is unchanged.

        With symmetric sampling, ∂mean = Σ ½ (f₊ - f₋) ε / (σ M) and ∂σ = Σ (½ (f₊ + f₋) - b) (ε² - 1) / (σ M) over M
        pairs, with the mean of the transformed fitness as the baseline b: T r_T and S r_S of the paper, in units of σ.
        """
        f = SHAPES[self.shape](clean(fitness))
        first, second = self._pair_weights(f - f.mean())
        if self.antithetic:
            half = f.new_full((len(first),), 0.5)
            half[len(f) // 2 :] = 1.0  # the last of an odd number has no mirror image
            first, second = first * half, second * half
        linear, square = self._moments(first, second)
        of_all = self._tensor("sigma") * len(first)
        return linear / of_all, (square - float(second.sum())) / of_all

    def _estimates(self, fitness: Tensor) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, self.dim), self.gradients(fitness)[0]

    def _learn(self, fitness: Tensor) -> None:
        gradient, of_sigma = self.gradients(fitness)
        sigma = self._tensor("sigma")
        # σ ∂σ is a gradient in log σ, so that the step does not depend on the units of the coordinate.
        change = of_sigma.mul_(sigma).mul_(-self.sigma_lr).clamp_(-self.max_change, self.max_change)
        self.state["sigma"] = sigma * change.add_(1)
        self._descend(gradient, slice(0, self.dim))
