"""Evolution strategies as a gradient estimator.

References:
    Salimans, Ho, Chen, Sidor, Sutskever, Evolution strategies as a scalable alternative to reinforcement learning (2017),
    equation (1) and algorithm 1; mirrored sampling as in Brockhoff et al., PPSN XI (2010).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ._distribution import GradientSearch
from ._problem import SHAPES, check_choice


class OpenES(GradientSearch):
    """Evolution strategies: the mean descends along Σ fᵢ εᵢ / (N σ), an estimate of the gradient of E[f(mean + σε)].

    Args:
        x0: The first mean.
        shape: How fitness is transformed: `"ranks"` (centred ranks), `"standardize"` or `"raw"`.
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
        check_choice("shape", shape, tuple(SHAPES))
        self.shape = shape
        super().__init__(x0, **options)

    def _estimates(self, fitness: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over an estimate of ∇ E[f(mean + σε)] = E[f ε] / σ from the transformed fitness: equation (1)."""
        f = SHAPES[self.shape](fitness)
        weights = self._pair_weights(f - f.mean())[0]
        # The baseline is estimated from the same members, which costs one degree of freedom, as in a variance.
        count = len(fitness) if self.antithetic else max(len(fitness) - 1, 1)
        # The weights are divided, not the sum, because there are fewer members than coordinates.
        return self._sums(weights / (count * self.sigma))
