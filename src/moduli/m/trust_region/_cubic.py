"""Cubic regularisation of Newton's method."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...linalg import Eigendecomposition, LinearOperator
from ...optim import Chainable
from .._checks import collect_settings
from ._base import SpectralRegion


class CubicRegularization(SpectralRegion):
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
        maxiter: int = 100,
        eps: float = 1e-8,
    ) -> None:
        super().__init__({"maxiter": maxiter, "eps": eps}, **collect_settings(locals(), "maxiter", "eps"))

    def extra(self, d: Tensor, radius: float) -> float:
        """The cubic term."""
        return float(torch.linalg.vector_norm(d)) ** 3 / (3 * radius)

    def trust_solve(self, H: LinearOperator, u: Tensor, radius: float, setting: Any) -> Tensor:
        """The minimiser of the cubic model."""
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
            # The hard case: no part of the gradient along the lowest eigenvector, which fills up the norm.
            d[int(values.argmin())] += math.sqrt(least * least - length * length)
        return H.vectors @ d
