"""A trust region by truncated conjugate gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...linalg import LinearOperator, steihaug
from ...optim import Chainable
from .._checks import collect_settings
from ._base import TrustRegionBase


class TrustCG(TrustRegionBase):
    r"""Minimises the model by conjugate gradients, cut at the boundary and along negative curvature (Steihaug and Toint).

    It takes products with the Hessian only, so that it works with every link that gives one.

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
        reg: Added to the Hessian's diagonal.
        maxiter: The largest number of products; n by default.
        cg_tol: Stop when the residual has fallen to this part of the gradient; None for min(1/2, sqrt|g|), which is enough
            for superlinear convergence.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.TrustCG(m.Newton()))
        >>> for _ in range(60):
        ...     _ = opt.step(mo.closure(lambda: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2))
        >>> torch.allclose(w.data, torch.ones(2, dtype=torch.float64))
        True

    References:
        T. Steihaug, "The conjugate gradient method and trust regions in large scale optimization", SIAM J. Numer. Anal. 20
        (1983); N. Gould et al., "Sensitivity of trust-region algorithms to their parameters", 4OR 3 (2005).
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
        reg: float = 0.0,
        maxiter: int | None = None,
        cg_tol: float | None = 1e-8,
    ) -> None:
        more = {"reg": reg, "maxiter": maxiter, "cg_tol": cg_tol}
        super().__init__(more, **collect_settings(locals(), "more", *more))

    def prepare(self, H: LinearOperator, setting: Any) -> LinearOperator:
        """Adds the regularisation."""
        return H + setting["reg"] if setting["reg"] else H

    def trust_solve(self, H: LinearOperator, u: Tensor, radius: float, setting: Any) -> Tensor:
        """The model's minimiser in the Krylov space, within the radius."""
        tol = setting["cg_tol"]
        if tol is None:
            tol = min(0.5, float(torch.linalg.vector_norm(u)) ** 0.5)
        return -steihaug(H, u, radius, rtol=tol, maxiter=setting["maxiter"]).step
