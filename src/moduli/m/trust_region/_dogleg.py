"""Powell's dogleg."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...linalg import LinearOperator, SingularError
from ...optim import Chainable
from .._checks import collect_settings
from ._base import TrustRegionBase


class Dogleg(TrustRegionBase):
    r"""Goes along the gradient to the Cauchy point and from there towards the Newton point, as far as the radius allows.

    The Newton point itself is taken where it is inside; where the curvature along the gradient is negative, the step goes
    along the gradient to the boundary.

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
        >>> opt = mo.Optimizer([w], m.Dogleg(m.Newton()))
        >>> for _ in range(60):
        ...     _ = opt.step(mo.closure(lambda: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2))
        >>> torch.allclose(w.data, torch.ones(2, dtype=torch.float64))
        True

    References:
        M. J. D. Powell, "A hybrid method for nonlinear equations", Numerical Methods for Nonlinear Algebraic Equations (1970);
        J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., section 4.1.
    """

    solves = True

    def __init__(
        self,
        hess_module: Chainable,
        *,
        eta: float = 0.0,
        nplus: float = 2.0,
        nminus: float = 0.25,
        rho_good: float = 0.75,
        rho_bad: float = 0.25,
        boundary_tol: float | None = 1e-6,
        init: float = 1.0,
        max_attempts: int = 10,
        update_freq: int = 1,
        inner: Chainable | None = None,
    ) -> None:
        super().__init__({}, **collect_settings(locals()))

    def trust_solve(self, H: LinearOperator, u: Tensor, radius: float, setting: Any) -> Tensor:
        """A point of the dogleg path at the radius, or its end."""
        size = float(torch.linalg.vector_norm(u))
        unit: Tensor = u / size
        curvature = float(torch.dot(unit, H.matvec(unit)))
        if curvature <= 0:
            return unit * radius
        cauchy = unit * (size / curvature)
        if size / curvature >= radius:
            return unit * radius
        try:
            newton = H.solve(u)
        except SingularError:
            from ..second_order._solve import solve, solve_live

            newton = solve_live(H.to_dense(), u, solve)  # parameters without curvature stay out of the system
        if not bool(torch.isfinite(newton).all()) or float(torch.dot(newton, u)) <= 0:
            return cauchy
        if float(torch.linalg.vector_norm(newton)) <= radius:
            return newton
        # |cauchy + t (newton - cauchy)| = radius, the root in [0, 1]
        rest = newton - cauchy
        a, b = float(torch.dot(rest, rest)), 2 * float(torch.dot(cauchy, rest))
        c = float(torch.dot(cauchy, cauchy)) - radius * radius
        t = (-b + math.sqrt(max(b * b - 4 * a * c, 0.0))) / (2 * a) if a > 0 else 0.0
        return cauchy + min(max(t, 0.0), 1.0) * rest
