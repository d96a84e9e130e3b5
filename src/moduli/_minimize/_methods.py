"""Methods by name, as chains of links, and the links that only they have: those that stay within bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import m
from ..linalg import LinearOperator
from ..optim import Module, Objective
from ._point import to_vector
from ._variables import Variables


class BoundedLevenbergMarquardt(m.LevenbergMarquardt):
    r"""Minimises the damped model over the box: variables that would leave it are set to their bound, the others solved again.

    With $F$ the free and $A$ the held numbers, $(B + D)_{FF}\,d_F = u_F - B_{FA}\,d_A$. Numbers at a bound that the
    gradient pushes against are held from the beginning. Each pass holds at least one more, so that there are at most n, and
    none of them evaluates the function.

    Args:
        variables: The variables with their bounds.
        hess_module: The link that gives the Hessian.
        **settings: Those of `m.LevenbergMarquardt`.

    References:
        D. P. Bertsekas, "Projected Newton methods for optimization problems with simple constraints", SIAM J. Control 20
        (1982); C. Kanzow, N. Yamashita, M. Fukushima, "Levenberg-Marquardt methods with strong local convergence
        properties for solving nonlinear equations with convex constraints", J. Comput. Appl. Math. 172 (2004).
    """

    def __init__(self, variables: Variables, hess_module: Any, **settings: Any) -> None:
        super().__init__(hess_module, **settings)
        self.variables = variables

    def apply(self, objective: Objective) -> Objective:
        """Compute the distances to the bounds, then apply the link."""
        leaves, variables = objective.params, self.variables

        def distance(bounds: list[Tensor | None], open_end: float) -> Tensor:
            pairs = zip(leaves, bounds, strict=True)
            return to_vector([torch.full_like(z, open_end) if b is None else z.detach() - b for z, b in pairs])

        # x - d stays within the bounds where least <= d <= most
        self.most, self.least = distance(variables.low, torch.inf), distance(variables.high, -torch.inf)
        return super().apply(objective)

    def trust_solve(self, H: LinearOperator, u: Tensor, radius: float, setting: Any) -> Tensor:
        """Return the damped step within the box.

        Args:
            H: The Hessian.
            u: The gradient.
            radius: The trust radius, the inverse of the damping.
            setting: The settings of the link.
        """
        B = H.to_dense()
        damping = 1 / radius
        damped = B + torch.diag(torch.full_like(u, damping))
        at_bound = ((self.most <= 0) & (u > 0)) | ((self.least >= 0) & (u < 0))
        d = torch.zeros_like(u)
        for _ in range(len(u) + 1):
            free = ~at_bound
            if not bool(free.any()):
                break
            right = u[free] - B[free][:, at_bound] @ d[at_bound]
            part, failed = torch.linalg.solve_ex(damped[free][:, free], right)
            if int(failed):
                return torch.zeros_like(u)
            d[free] = part
            over = free & ((d > self.most) | (d < self.least))
            if not bool(over.any()):
                break
            d = torch.where(over, torch.minimum(torch.maximum(d, self.least), self.most), d)
            at_bound = at_bound | over
        return d if float(torch.dot(d, u)) > 0 else torch.zeros_like(u)


class Free(Module):
    """Sets the update to zero where it pushes against a bound."""

    def __init__(self, variables: Variables) -> None:
        super().__init__()
        self.variables = variables

    def apply(self, objective: Objective) -> Objective:
        """Zero the update of variables that are held by their bounds."""
        free = self.variables.find_free(objective.params, objective.get_grads())
        objective.updates = [u * f for u, f in zip(objective.peek_updates(), free, strict=True)]
        return objective


# Nocedal and Wright, Numerical Optimization, algorithm 4.1.
_RADIUS: dict[str, Any] = {"nplus": 2.0, "nminus": 0.25, "rho_good": 0.75, "rho_bad": 0.25}

CHAINS: dict[str, Callable[[], list[Module]]] = {
    "bfgs": lambda: [m.BFGS(), m.StrongWolfe()],
    "lbfgs": lambda: [m.LBFGS(history_size=10), m.StrongWolfe()],
    "cg": lambda: [m.PolakRibiere(), m.StrongWolfe(c2=0.1, a_init="first-order", maxiter=40)],
    "newton": lambda: [m.Newton(eigval_fn=torch.abs, eigv_tol=1e-14), m.Backtracking(maxiter=40)],
    "damped-newton": lambda: [m.LevenbergMarquardt(m.Newton(), max_attempts=30)],
    # Looser tolerances of the linear systems (also by the square root of the gradient) cost more evaluations than they save.
    "newton-cg": lambda: [m.NewtonCG(tol=1e-2, reg=0.0), m.Backtracking(maxiter=40)],
    "trust-ncg": lambda: [m.TrustCG(m.NewtonCG(reg=0.0), cg_tol=0.03, max_attempts=30, **_RADIUS)],
    "trust-exact": lambda: [m.TrustExact(m.Newton(), max_attempts=30, **_RADIUS)],
    "dogleg": lambda: [m.Dogleg(m.Newton(), max_attempts=30)],
    "gn": lambda: [m.GaussNewton(reg=1e-14), m.Backtracking(maxiter=40)],
    "gd": lambda: [m.AdaptiveBacktracking(maxiter=40)],
    "adam": lambda: [m.Adam(), m.LR(1e-2)],
    "spsa": lambda: [m.SPSA(h=1e-4, n_samples=4, seed=0), m.AdaptiveBacktracking(maxiter=20)],
}
"""Chains that `minimize` knows by name."""


IN_BOX: dict[str, Callable[[Variables], list[Module]]] = {
    "bfgs": lambda v: [Free(v), m.LBFGS(history_size=30), Free(v), m.Backtracking(maxiter=40)],
    "lbfgs": lambda v: [Free(v), m.LBFGS(history_size=10), Free(v), m.Backtracking(maxiter=40)],
    "cg": lambda v: [Free(v), m.PolakRibiere(), Free(v), m.AdaptiveBacktracking(maxiter=40)],
    "gd": lambda v: [Free(v), m.AdaptiveBacktracking(maxiter=40)],
    "adam": lambda v: [Free(v), m.Adam(), m.LR(1e-2), Free(v)],
    "damped-newton": lambda v: [BoundedLevenbergMarquardt(v, m.Newton(), max_attempts=30)],
}
"""Chains that stay within bounds by themselves; the others get theirs by a change of variables."""
