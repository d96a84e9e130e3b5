"""`OpenES`: evolution strategies as gradient estimation, asked and told."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .._evolution import _open_es as core
from .._evolution._ranks import clean, shaped
from ._distribution import GradientSearch

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
        shaped(x0.new_zeros(1).double(), shape)
        self.shape = shape
        super().__init__(x0, **options)

    def gradient(self, fitness: Tensor) -> Tensor:
        """The gradient estimate that the fitness of the current generation gives; the state stays as it is."""
        f = shaped(clean(fitness), self.shape)
        return core.gradient(self._noise, self._int("seed"), self._int("counter"), f, self.sigma, self.antithetic)

    def _estimates(self, fitness: Tensor) -> Iterator[tuple[slice, Tensor]]:
        f = shaped(fitness, self.shape)
        return core.gradients(self._noise, self._int("seed"), self._int("counter"), f, self.sigma, self.antithetic)
