"""Evolution strategies as a gradient estimator.

References:
    Salimans, Ho, Chen, Sidor, Sutskever, Evolution strategies as a scalable alternative to reinforcement learning (2017),
    equation (1) and algorithm 1; mirrored sampling as in Brockhoff et al., PPSN XI (2010).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._distribution import GradientSearch
from ._fitness import clean, host, shape_fitness, tensor
from ._noise import Noise

__all__ = ["OpenES"]


class OpenES(GradientSearch):
    """Evolution strategies: the mean descends along Σ fᵢ εᵢ / (N σ), an estimate of the gradient of E[f(mean + σε)].

    Args:
        x0: The first mean.
        shape: How fitness enters: `"ranks"` (centred ranks), `"standardize"` or `"raw"`.
        **options: `population`, `lr`, `sigma`, `optimizer` (`"adam"` or `"sgd"`), `momentum`, `antithetic`, `rank` and
            `shapes` (noise of low rank), and those of `Search`.

    Example:
        >>> import torch
        >>> from moduli.evolve import OpenES
        >>> search = OpenES(torch.full((10,), 1.0), population=40, lr=0.05)
        >>> for _ in range(100):
        ...     search.tell(search.ask().square().sum(1))
        >>> bool(search.mean.norm() < 0.2)
        True

    References:
        Salimans, Ho, Chen, Sidor, Sutskever (2017), algorithm 1.
    """

    def __init__(self, x0: Tensor, *, shape: str = "ranks", **options: Any) -> None:
        shape_fitness(x0.new_zeros(1).double(), shape)
        self.shape = shape
        super().__init__(x0, **options)

    def gradient(self, fitness: Tensor) -> Tensor:
        """The gradient estimate that the fitness of the current generation gives; the state stays as it is."""
        f = shape_fitness(clean(fitness), self.shape)
        return gradient(self._noise, self._int("seed"), self._int("counter"), f, self.sigma, self.antithetic)

    def _estimates(self, fitness: Tensor) -> Iterator[tuple[slice, Tensor]]:
        f = shape_fitness(fitness, self.shape)
        return gradients(self._noise, self._int("seed"), self._int("counter"), f, self.sigma, self.antithetic)


def direction_weights(fitness: Tensor, antithetic: bool) -> Tensor:
    """One weight per direction: f(mean + σε) - f(mean - σε) of a mirrored pair, or f less the mean fitness."""
    f = host(fitness)
    if not antithetic:
        return tensor(f - f.mean(), fitness)
    paired = len(f) // 2 * 2
    weights = np.empty(-(-len(f) // 2))
    weights[: paired // 2] = f[0:paired:2] - f[1:paired:2]
    if paired < len(f):
        weights[-1] = f[-1] - f.mean()
    return tensor(weights, fitness)


def gradient(noise: Noise, seed: int, counter: int, fitness: Tensor, sigma: float, antithetic: bool) -> Tensor:
    """An estimate of ∇ E[f(mean + σε)] = E[f ε] / σ from the (shaped) fitness of each member: equation (1)."""
    parts = [part.clone() for _, part in gradients(noise, seed, counter, fitness, sigma, antithetic)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def gradients(
    noise: Noise, seed: int, counter: int, fitness: Tensor, sigma: float, antithetic: bool
) -> Iterator[tuple[slice, Tensor]]:
    """The same in parts, each to be used before the next."""
    weights = direction_weights(fitness, antithetic).to(noise.dtype, copy=True)
    # A mean that was estimated from the same members takes one of them, as in a variance.
    count = len(fitness) if antithetic else max(len(fitness) - 1, 1)
    # Divided before the sum: there are fewer members than coordinates.
    for columns, total, _ in noise.sums(seed, counter, weights.div_(count * sigma)):
        yield columns, total
