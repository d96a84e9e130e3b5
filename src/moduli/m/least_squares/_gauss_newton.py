"""The method of Gauss and Newton."""

from __future__ import annotations

from typing import Any

import torch

from ...linalg import AtA, LinearOperator, SingularError
from ...optim import Chainable, Need, Objective, Transform
from .._flat import flat, mask_absent, unflat
from .._vector_link import refuse_complex
from ..second_order._solve import shortest
from ._jacobian import jacobian


class GaussNewton(Transform):
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

    decides_on_host = True

    shared_settings = True
    needs = frozenset({Need.GRADIENT, Need.RESIDUALS})
    vector_state = True
    hessian = "matrix"

    def __init__(
        self, *, reg: float = 1e-8, update_freq: int = 1, batched: bool = True, inner: Chainable | None = None
    ) -> None:
        if isinstance(reg, int | float) and reg < 0:
            raise ValueError(f"GaussNewton: reg is {reg}; what is added to the diagonal is not negative")
        super().__init__({"reg": reg}, update_freq=update_freq, inner=inner)
        self.batched = batched

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        """Evaluates the Jacobian."""
        refuse_complex("GaussNewton", objective.params)
        residuals = objective.get_residuals()
        # A list, so that its rows are not taken for parameters when a saved state is reordered.
        states[0]["J"] = list(jacobian(residuals, objective.params, self.batched).unbind(0))

    def _operator(self, state: Any) -> AtA:
        return AtA(torch.stack(state["J"]))

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        """Solves for the update."""
        reg = float(settings[0]["reg"])
        J = torch.stack(states[0]["J"])
        if objective.updates is None and J.shape[0] < J.shape[1]:
            # Of all steps that solve it, the shortest, from a system as small as the residuals.
            gram = J @ J.T
            gram.diagonal().add_(reg)
            weights = shortest(gram, objective.get_residuals().detach().reshape(-1))
            objective.updates = unflat(J.T @ weights, objective.params)
            return objective
        u = flat(mask_absent(objective.peek_updates(), objective.present))
        A = self._operator(states[0])
        try:
            out = A.solve_plus_diag(u, reg) if reg else A.solve(u)
        except SingularError:
            out = shortest(A.to_dense(), u)
        if not bool(torch.isfinite(out).all()):
            out = shortest(A.to_dense(), u)
        objective.updates = unflat(out, objective.params)
        return objective

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """$J^TJ$, by its factor."""
        param = objective.params[0]
        if "J" not in self.state[param]:
            self.update_states(objective, [self.state[param]], [self.settings[param]])
        return self._operator(self.state[param])
