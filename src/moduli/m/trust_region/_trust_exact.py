"""A trust region whose problem is solved exactly."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...linalg import LinearOperator, trust_exact
from ...optim import Chainable
from .._checks import collect_settings
from ._base import SpectralRegion


class TrustExact(SpectralRegion):
    r"""Minimises the model within the radius to working precision, from the eigenvalues of the Hessian (More and Sorensen).

    The eigenvalues are computed once per step, whatever the number of radii that are tried.

    Args:
        hess_module: Any link that gives a Hessian (`get_H`).
        eta: Accept where the ratio of the decrease to the model's is above this.
        nplus: How much the radius grows.
        nminus: How much it shrinks.
        rho_good: The ratio above which it grows.
        rho_bad: The ratio below which it shrinks.
        boundary_tol: Grow only where the step came this near to the boundary; None for always.
        init: The first radius.
        max_attempts: How many radii to try in one step.
        update_freq: Let the Hessian learn at every n-th step only.
        inner: Links that transform the gradient before the model is made.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.TrustExact(m.Newton()))
        >>> for _ in range(60):
        ...     _ = opt.step(mo.closure(lambda: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2))
        >>> torch.allclose(w.data, torch.ones(2, dtype=torch.float64))
        True

    References:
        J. J. More, D. C. Sorensen, "Computing a trust region step", SIAM J. Sci. Stat. Comput. 4 (1983).
    """

    def __init__(
        self,
        hess_module: Chainable,
        *,
        eta: float = 0.0,
        nplus: float = 3.5,
        nminus: float = 0.25,
        rho_good: float = 0.99,
        rho_bad: float = 1e-4,
        boundary_tol: float | None = 1e-6,
        init: float = 1.0,
        max_attempts: int = 10,
        update_freq: int = 1,
        inner: Chainable | None = None,
    ) -> None:
        super().__init__({}, **collect_settings(locals()))

    def trust_solve(self, H: LinearOperator, u: Tensor, radius: float, setting: Any) -> Tensor:
        """The model's minimiser within the radius."""
        return -trust_exact(H, u, radius).step
