"""The method of Levenberg and Marquardt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...linalg import LinearOperator, SingularError
from ...optim import Chainable
from .._checks import collect_settings
from ._base import TrustRegionBase


class LevenbergMarquardt(TrustRegionBase):
    r"""Solves $(B + D/r)\,d = u$ with $D = (1-y) I + y\,\mathrm{diag}(B)$; the radius $r$ is the inverse of the damping.

    With `GaussNewton` it is the classic method for least squares, with any other Hessian its generalisation.

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
        y: 0 for Levenberg's damping by the identity, 1 for Marquardt's by the diagonal.
        adaptive: Multiply the damping by the root of the gradient's norm, so that it vanishes at the optimum.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.LevenbergMarquardt(m.Newton()))
        >>> for _ in range(60):
        ...     _ = opt.step(mo.closure(lambda: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2))
        >>> torch.allclose(w.data, torch.ones(2, dtype=torch.float64))
        True

    References:
        D. W. Marquardt, "An algorithm for least-squares estimation of nonlinear parameters", J. SIAM 11 (1963); J. Fan,
        Y. Yuan, "On the quadratic convergence of the Levenberg-Marquardt method", Computing 74 (2005).
    """

    solves = True
    norm_radius = False

    def __init__(
        self,
        hess_module: Chainable,
        *,
        eta: float = 0.0,
        nplus: float = 3.5,
        nminus: float = 0.25,
        rho_good: float = 0.99,
        rho_bad: float = 1e-4,
        boundary_tol: float | None = None,
        init: float = 1.0,
        max_attempts: int = 10,
        update_freq: int = 1,
        inner: Chainable | None = None,
        y: float = 0.0,
        adaptive: bool = False,
    ) -> None:
        if not 0 <= y <= 1:
            raise ValueError(f"LevenbergMarquardt: y is {y}; it goes from 0 (identity) to 1 (diagonal)")
        super().__init__({"y": y, "adaptive": adaptive}, **collect_settings(locals(), "y", "adaptive"))

    def trust_solve(self, H: LinearOperator, u: Tensor, radius: float, setting: Any) -> Tensor:
        """The damped step."""
        y, damping = setting["y"], 1 / radius
        if setting["adaptive"]:
            damping *= float(torch.linalg.vector_norm(u)) ** 0.5
        diag: float | Tensor = damping
        if y:
            own = H.diagonal().abs()
            # A parameter without curvature is damped by the smallest that there is, not by nothing.
            own = own.clamp(min=max(float(own.max()), 1e-300) * torch.finfo(own.dtype).eps)
            diag = damping * ((1 - y) + y * own)
        try:
            d = H.solve_plus_diag(u, diag)
        except SingularError:
            return torch.zeros_like(u)
        # Where the damped matrix is indefinite the step may point uphill: more damping is needed.
        return d if float(torch.dot(d, u)) > 0 else torch.zeros_like(u)
