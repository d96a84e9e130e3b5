"""Trust regions by how their problem is solved.

* Cubic regularisation of Newton's method.
* Powell's dogleg.
* The method of Levenberg and Marquardt.
* A trust region by truncated conjugate gradients.
* A trust region whose problem is solved exactly.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...linalg import Eigendecomposition, LinearOperator, SingularError, steihaug, trust_exact
from ...optim import ranges as check
from ._base import TrustRegionBase, _SpectralRegion


class CubicRegularization(_SpectralRegion):
    r"""Minimises $-u^Td + \tfrac12 d^TBd + \tfrac{M}{3}\|d\|^3$ with $M = 1/r$.

    The minimiser obeys $(B + M\|d\| I)\,d = u$ with that matrix positive semidefinite; its norm is found from the
    eigenvalues of $B$, which are computed once per step.

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
        maxiter: The largest number of steps of the search for the norm.
        eps: The relative accuracy of the norm.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.CubicRegularization(m.Newton()))
        >>> for _ in range(60):
        ...     _ = opt.step(mo.closure(lambda: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2))
        >>> torch.allclose(w.data, torch.ones(2, dtype=torch.float64))
        True

    References:
        Y. Nesterov, B. T. Polyak, "Cubic regularization of Newton method and its global performance", Math. Programming 108
        (2006); C. Cartis, N. I. M. Gould, P. L. Toint, "Adaptive cubic regularisation methods", Math. Prog. 127 (2011).
    """

    norm_radius = False

    boundary_tol: float | None = None
    maxiter: int = 100
    eps: float = 1e-8

    def extra(self, d: Tensor, radius: float) -> float:
        """Return the cubic term."""
        return float(torch.linalg.vector_norm(d)) ** 3 / (3 * radius)

    def trust_solve(self, H: LinearOperator, u: Tensor, radius: float, setting: Any) -> Tensor:
        if not isinstance(H, Eigendecomposition):
            raise TypeError("the Hessian was not decomposed")
        values, parts, M = H.values, H.vectors.mT @ u, 1 / radius
        low = float(values.min())

        def step(norm: float) -> Tensor:
            below = values + M * norm
            tiny = torch.finfo(values.dtype).tiny
            return torch.where(parts == 0, torch.zeros_like(parts), parts / below.clamp(min=tiny))

        # |d(t)| falls and t grows: one crossing above the point where the matrix becomes semidefinite.
        least = max(0.0, -low / M)
        most = max(2 * least, 1e-30)
        while float(torch.linalg.vector_norm(step(most))) > most and most < 1e150:
            most *= 2
        floor = least
        for _ in range(setting["maxiter"]):
            middle = 0.5 * (floor + most)
            if float(torch.linalg.vector_norm(step(middle))) > middle:
                floor = middle
            else:
                most = middle
            if most - floor <= setting["eps"] * most:
                break
        d = step(most)
        length = float(torch.linalg.vector_norm(d))
        if low < 0 and length < least * (1 - 1e-6):
            # The hard case: the gradient has no part along the lowest eigenvector, which is added to reach the norm.
            d[int(values.argmin())] += math.sqrt(least * least - length * length)
        return H.vectors @ d


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

    nplus: float = 2.0
    rho_good: float = 0.75
    rho_bad: float = 0.25

    def trust_solve(self, H: LinearOperator, u: Tensor, radius: float, setting: Any) -> Tensor:
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
            from ..second_order._newton import solve, solve_live

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

    ranges = {check.probability: ("y",)}

    boundary_tol: float | None = None
    y: float = 0.0
    adaptive: bool = False

    def trust_solve(self, H: LinearOperator, u: Tensor, radius: float, setting: Any) -> Tensor:
        y, damping = setting["y"], 1 / radius
        if setting["adaptive"]:
            damping *= float(torch.linalg.vector_norm(u)) ** 0.5
        diag: float | Tensor = damping
        if y:
            own = H.diagonal().abs()
            # A parameter without curvature is damped by the smallest diagonal element, not by zero.
            own = own.clamp(min=max(float(own.max()), 1e-300) * torch.finfo(own.dtype).eps)
            diag = damping * ((1 - y) + y * own)
        try:
            d = H.solve_plus_diag(u, diag)
        except SingularError:
            return torch.zeros_like(u)
        # Where the damped matrix is indefinite the step may point uphill: more damping is needed.
        return d if float(torch.dot(d, u)) > 0 else torch.zeros_like(u)


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

    reg: float = 0.0
    maxiter: int | None = None
    cg_tol: float | None = 1e-8

    def prepare(self, H: LinearOperator, setting: Any) -> LinearOperator:
        """Add the regularisation."""
        return H + setting["reg"] if setting["reg"] else H

    def trust_solve(self, H: LinearOperator, u: Tensor, radius: float, setting: Any) -> Tensor:
        tol = setting["cg_tol"]
        if tol is None:
            tol = min(0.5, float(torch.linalg.vector_norm(u)) ** 0.5)
        return -steihaug(H, u, radius, rtol=tol, maxiter=setting["maxiter"]).step


class TrustExact(_SpectralRegion):
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

    def trust_solve(self, H: LinearOperator, u: Tensor, radius: float, setting: Any) -> Tensor:
        return -trust_exact(H, u, radius).step
