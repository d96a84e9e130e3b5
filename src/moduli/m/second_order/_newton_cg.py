"""Truncated Newton methods: products with the Hessian only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...linalg import LinearOperator, LinearSolution, Outcome, cg, minres
from ...optim import Chainable, Objective
from .._checks import collect_settings
from .._vector_link import HessianLink, refuse_complex
from ..trust_region import TrustCG
from ._base import SecondOrderLink, hessian_operator


class NewtonCG(SecondOrderLink, HessianLink):
    r"""Solves $(H + \epsilon I)\,d = u$ by conjugate gradients (or MINRES), with products $Hz$ only.

    A direction of negative curvature ends the iteration with what was reached and a step along it, as long as its absolute
    curvature says, so that a line search belongs behind it; or with the update itself at the first.

    Args:
        maxiter: The largest number of products; n by default.
        tol: Stop when the residual has fallen to this part of the right-hand side; None for min(1/2, sqrt|u|).
        reg: $\epsilon$, added to the Hessian's diagonal.
        hvp_method: "autograd", "batched_autograd", "fd_forward" or "fd_central".
        solver: "cg" or "minres" (which takes indefinite systems).
        h: The length of difference steps.
        warm_start: Start from the last solution.
        warm_beta: How much of the last start is mixed into the next.
        inner: Links that transform the right-hand side.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> _ = mo.Optimizer([w], m.NewtonCG()).step(mo.closure(lambda: w[0] ** 2 + w[0] * w[1] + 3 * w[1] ** 2))
        >>> w.data.abs().round(decimals=4)
        tensor([0., 0.])

    References:
        R. S. Dembo, T. Steihaug, "Truncated-Newton algorithms for large-scale unconstrained optimization", Math.
        Programming 26 (1983); J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., algorithm 7.1.
    """

    shared_settings = True
    real_only = True
    hessian = "products"

    def __init__(
        self,
        *,
        maxiter: int | None = None,
        tol: float | None = 1e-8,
        reg: float = 1e-8,
        hvp_method: str = "autograd",
        solver: str = "cg",
        h: float = 1e-3,
        warm_start: bool = False,
        warm_beta: float = 0.0,
        inner: Chainable | None = None,
    ) -> None:
        if solver not in ("cg", "minres"):
            raise ValueError(f"NewtonCG: solver is {solver!r}; it is 'cg' or 'minres'")
        if reg < 0 or not 0 <= warm_beta < 1:
            raise ValueError(f"NewtonCG: reg is {reg} and warm_beta is {warm_beta}; reg >= 0 and 0 <= warm_beta < 1")
        super().__init__(**collect_settings(locals()))

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor | None:
        """Solves for the update."""
        if not bool(torch.isfinite(u).all()) or not bool(u.any()):
            return None
        A = self.operator(objective, state, setting)
        tol = setting["tol"]
        tol = min(0.5, float(torch.linalg.vector_norm(u)) ** 0.5) if tol is None else tol
        start = state.get("start") if setting["warm_start"] else None
        most = setting["maxiter"] or u.numel()
        try:
            if setting["solver"] == "cg":
                out = _extend(A, u, cg(A, u, x0=start, rtol=tol, maxiter=most))
            else:  # MINRES starts at zero, so it solves for the correction of the start
                rest = u if start is None else u - A.matvec(start)
                out = minres(A, rest, rtol=tol, maxiter=most).x
                out = out if start is None else out + start
        except ValueError:
            out = u  # a product was not finite: there is no curvature to use here
        if not bool(out.any()) or not bool(torch.isfinite(out).all()):
            out = u.clone()
        if setting["warm_start"]:
            state["start"] = out.clone() if start is None else torch.lerp(out, start, setting["warm_beta"])
        return out

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        """The Hessian, by its products."""
        refuse_complex("NewtonCG", objective.params)
        H = hessian_operator(objective, setting)
        return H + setting["reg"] if setting["reg"] else H


def _extend(A: LinearOperator, b: Tensor, solution: LinearSolution) -> Tensor:
    """What conjugate gradients reached, and along a direction of negative curvature a step of its absolute curvature.

    What was reached before it may be the gradient alone, which crawls along a valley; p falls with it, since pᵀb > 0.
    """
    out, p = solution.x, solution.direction
    if solution.outcome is not Outcome.NEGATIVE_CURVATURE or p is None or not bool(out.any()):
        return out
    squared, slope, curvature = float(p @ p), float(p @ b), float(p @ A.matvec(p))
    # Near the solution of a definite system the sign of pᵀAp is rounding; |b| / |x| is of the size of A.
    size = float(torch.linalg.vector_norm(b) / torch.linalg.vector_norm(out))
    if not slope > 0 or not -curvature > torch.finfo(b.dtype).eps ** 0.5 * size * squared:
        return out
    return out + p * (slope / -curvature)


class NewtonCGSteihaug(TrustCG):
    r"""The trust-region Newton method with products only: `TrustCG(NewtonCG())` under its own name.

    Args:
        hvp_method: As for `NewtonCG`.
        h: The length of difference steps.
        reg: Added to the Hessian's diagonal.
        **settings: Those of `TrustCG`.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.NewtonCGSteihaug())
        >>> for _ in range(60):
        ...     _ = opt.step(mo.closure(lambda: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2))
        >>> torch.allclose(w.data, torch.ones(2, dtype=torch.float64))
        True

    References:
        T. Steihaug, "The conjugate gradient method and trust regions in large scale optimization", SIAM J. Numer. Anal. 20
        (1983).
    """

    def __init__(self, *, hvp_method: str = "autograd", h: float = 1e-3, reg: float = 0.0, **settings: Any) -> None:
        for name, number in (("reg", reg), ("h", h)):
            if not number >= 0:
                raise ValueError(f"NewtonCGSteihaug: {name} is {number}; give a number that is not negative")
        super().__init__(NewtonCG(hvp_method=hvp_method, h=h, reg=reg), **settings)
