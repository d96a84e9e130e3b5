"""Guided evolution strategies: more variance along surrogate gradients.

References:
    Maheswaranathan, Metz, Tucker, Choi, Sohl-Dickstein, Guided evolutionary strategies: augmenting random search with
    surrogate gradients, ICML 2019, equations (2) and (3).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._distribution import GradientSearch
from ._problem import SHAPES, check_choice


class GuidedES(GradientSearch):
    """Guided evolution strategies: noise is stretched along a subspace spanned by surrogate gradients.

    Members are mean ± σ (√α ε + √((1 - α) P/k) U ε') where the last k surrogates span U. A surrogate is any vector that
    correlates with the gradient, passed as `tell(fitness, surrogate=g)`; by default it is the estimate itself.

    Args:
        x0: The first mean.
        subspace: k.
        alpha: The share of variance outside of the subspace.
        beta: The factor on the estimate.
        shape: How fitness is transformed, as in `OpenES`.
        **options: Those of `OpenES`, except `rank` and `shapes`.

    Example:
        >>> import torch
        >>> from moduli.evolve import GuidedES
        >>> search = GuidedES(torch.full((50,), 1.0), population=10, lr=0.1)
        >>> for _ in range(100):
        ...     biased = search.mean + 0.3
        ...     search.tell(search.ask().square().sum(1), surrogate=2 * biased)
        >>> bool(search.mean.norm() < 1.0)
        True

    References:
        Maheswaranathan, Metz, Tucker, Choi, Sohl-Dickstein (2019).
    """

    def __init__(
        self,
        x0: Tensor,
        *,
        subspace: int = 4,
        alpha: float = 0.5,
        beta: float = 1.0,
        shape: str = "ranks",
        **options: Any,
    ) -> None:
        if options.get("rank") is not None:
            raise ValueError("GuidedES takes no noise of low rank; that is for OpenES, PGPE and ARS")
        if not options.get("antithetic", True):
            raise ValueError("GuidedES estimates from mirrored pairs; antithetic=False is not part of it")
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha}: the share of variance lies above 0 and at most at 1")
        check_choice("shape", shape, tuple(SHAPES))
        self.subspace = min(subspace, max(x0.numel(), 1))
        if self.subspace < 1:
            raise ValueError(f"subspace={subspace}: at least one surrogate is remembered")
        self.alpha, self.beta, self.shape = alpha, beta, shape
        self._surrogate: Tensor | None = None
        super().__init__(x0, **options)

    def _start(self, x0: Tensor) -> None:
        super()._start(x0)
        self.state["surrogates"] = torch.zeros(self.subspace, self.dim, dtype=self.dtype, device=self.device)
        self.state["basis"] = torch.zeros(self.dim, self.subspace, dtype=self.dtype, device=self.device)
        self.state["given"] = 0

    def tell(self, fitness: Tensor | Iterable[float], surrogate: Tensor | None = None) -> None:
        """Take the fitness of every member, and optionally a surrogate gradient at the mean, one number per coordinate."""
        if surrogate is not None:
            surrogate = surrogate.detach().to(self._tensor("mean"))
            if surrogate.shape != (self.dim,):
                raise ValueError(f"the surrogate has shape {tuple(surrogate.shape)}; give {self.dim} numbers")
        self._surrogate = surrogate
        try:
            super().tell(fitness)
        finally:
            self._surrogate = None

    def _alpha(self) -> float:
        """Return the share of variance outside of the subspace: all of it while there is no surrogate."""
        return self.alpha if self._int("given") else 1.0

    def _count_drawn(self) -> int:
        return self.dim + self.subspace

    def _separable(self) -> bool:
        return False

    def _directions(self, start: int, stop: int) -> Tensor:
        return self._combine_noise(super()._directions(start, stop))

    def _combine_noise(self, drawn: Tensor) -> Tensor:
        whole, inner = drawn[..., : self.dim], drawn[..., self.dim :]
        return directions(whole, inner, self._tensor("basis"), self._alpha())

    def _estimates(self, fitness: Tensor) -> Iterator[tuple[slice, Tensor]]:
        f = SHAPES[self.shape](fitness)
        weights = self._pair_weights(f - f.mean())[0]
        total = self._combine_noise(self._moments(weights)[0])
        # (3): β / (2 σ² P) Σ ε (f(x + ε) - f(x - ε)) over P pairs, from Σ (ε/σ) (f(x + ε) - f(x - ε)).
        yield slice(0, self.dim), total * (self.beta / (2 * self.sigma * len(weights)))

    def _learn(self, fitness: Tensor) -> None:
        gradient = self.gradient(fitness)
        surrogate = gradient if self._surrogate is None else self._surrogate
        if bool(surrogate.isfinite().all()) and bool((surrogate != 0).any()):
            rows = self._tensor("surrogates").roll(1, 0)
            rows[0] = surrogate
            self.state["surrogates"], self.state["basis"] = rows, basis(rows)
            self.state["given"] = self._int("given") + 1
        self._descend(gradient, slice(0, self.dim))


def basis(surrogates: Tensor) -> Tensor:
    """Return orthonormal columns U (P x k) that span the surrogate gradients, the rows of `surrogates` (k x P).

    Rows that are zero, or linearly dependent on the others, give zero columns.
    """
    scale = surrogates.norm(dim=1, keepdim=True)
    q, r = torch.linalg.qr((surrogates / scale.clamp(min=torch.finfo(surrogates.dtype).tiny)).mT)
    good = r.diagonal().abs() > 1e-6
    return torch.mul(q, good)


def directions(whole: Tensor, inner: Tensor, subspace: Tensor, alpha: float) -> Tensor:
    """Return rows of N(0, Σ) with Σ = α/n I + (1 - α)/k U Uᵀ, times n: equation (2), scaled to unit steps for α = 1.

    Args:
        whole: Standard normal numbers, N x P.
        inner: Standard normal numbers, N x k.
        subspace: U, P x k.
        alpha: The share α of variance outside of the subspace.
    """
    n, k = subspace.shape
    return math.sqrt(alpha) * whole + math.sqrt((1 - alpha) * n / k) * (inner @ subspace.mT)
