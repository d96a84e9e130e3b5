"""Least squares: links for closures that return a vector of residuals r, whose loss is half of |r|^2.

* The method of Gauss and Newton.
* Residuals as a loss for links that need a number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._search_ranges import OWN_STEPS
from ..linalg import AtA, LinearOperator, SingularError
from ..optim import Chainable, Module, Need, Objective
from ..optim import ranges as check
from ._vectors import HessianLink, jacobian, unflat
from .second_order._newton import shortest

__all__ = [
    "GaussNewton",
    "SumOfSquares",
]


class GaussNewton(HessianLink):
    r"""Solves $(J^TJ + \epsilon I)\,d = u$, where $J$ is the Jacobian of the residuals that the closure returns.

    The loss is $\tfrac12\|r\|^2$ and its gradient $J^Tr$, also for the links that follow. With fewer residuals than
    parameters the system is solved in the space of residuals. Put it into `LevenbergMarquardt` or `TrustCG`, or follow it
    by a line search.

    Args:
        reg: $\epsilon$.
        update_freq: Evaluate the Jacobian at every n-th step only.
        batched: Compute all of its rows in one vectorised pass.
        inner: Links that transform the right-hand side.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
        >>> residuals = mo.closure(lambda: torch.stack([10 * (w[1] - w[0] ** 2), 1 - w[0]]))
        >>> opt = mo.Optimizer([w], m.GaussNewton())
        >>> for _ in range(3):
        ...     _ = opt.step(residuals)
        >>> torch.allclose(w.data, torch.ones(2, dtype=torch.float64))
        True

    References:
        J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., section 10.3.
    """

    search_ranges = {"lr": OWN_STEPS}

    shared_settings = True
    needs = frozenset({Need.GRADIENT, Need.RESIDUALS})
    real_only = True
    required_state = "J"

    ranges = {check.non_negative: ("reg",)}
    attributes = ("batched",)

    reg: float = 1e-8
    update_freq: int = 1
    batched: bool = True
    inner: Chainable | None = None

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        residuals = objective.get_residuals()
        # A list, so that its rows are not permuted like parameters when a saved state is reordered.
        state["J"] = list(jacobian(residuals, objective.params, self.batched).unbind(0))

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        J = torch.stack(states[0]["J"])
        if objective.updates is not None or J.shape[0] >= J.shape[1]:
            return super().apply_states(objective, states, settings)
        # The shortest of all solutions, by a system as small as the residuals.
        gram = J @ J.T
        gram.diagonal().add_(float(settings[0]["reg"]))
        weights = shortest(gram, objective.get_residuals().detach().reshape(-1).to(J.dtype))
        objective.updates = unflat(J.T @ weights, objective.params)
        return objective

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        A, reg = self.operator(objective, state, setting), float(setting["reg"])
        try:
            out = A.solve_plus_diag(u, reg) if reg else A.solve(u)
        except SingularError:
            return shortest(A.to_dense(), u)
        return out if bool(torch.isfinite(out).all()) else shortest(A.to_dense(), u)

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        return AtA(torch.stack(state["J"]))


class SumOfSquares(Module):
    r"""Lets the closure return a vector of residuals, whose loss is $\frac12 \sum_i r_i^2$ for all links of the chain.

    So that any optimizer can be compared with `GaussNewton` on the same closure, with the same gradient $J^Tr$.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> _ = mo.Optimizer([w], m.SumOfSquares(), m.LR(0.5)).step(mo.closure(lambda: w * 1.0))
        >>> w.data
        tensor([1.5000, 0.5000])
    """

    needs = frozenset({Need.GRADIENT, Need.RESIDUALS})

    def __init__(self) -> None:
        super().__init__()

    def apply(self, objective: Objective) -> Objective:
        """Return the objective unmodified: the link only declares that the closure returns residuals."""
        return objective
