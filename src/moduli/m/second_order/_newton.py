"""Newton's method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...linalg import Dense, LinearOperator
from ...optim import HESSIAN_METHODS, Chainable, Need, Objective, Transform
from .._flat import flat, mask_absent, unflat
from ._solve import decompose, refuse_complex, shortest, solve, solve_live


class Newton(Transform):
    r"""Solves $(H + \lambda I)\,d = u$ with the Hessian $H$ of the loss.

    Where $H$ is indefinite this is the plain Newton step, which a line search or a trust region has to guard;
    `eigval_fn=torch.abs` is the saddle-free method. A singular system is solved in the least-squares sense; parameters
    without any curvature (unused or linear ones) keep their gradient.

    Args:
        damping: $\lambda$, added to the diagonal.
        eigval_fn: A function of the eigenvalues, applied before they are inverted.
        eigv_tol: Leave out eigenvalues below this fraction of the largest (by magnitude).
        truncate: Keep only this many eigenvalues, the largest by magnitude.
        update_freq: Evaluate the Hessian at every n-th step only.
        use_lstsq: Always take the shortest least-squares solution.
        hessian_method: How the Hessian is computed (see `Objective.hessian`).
        h: The length of difference steps, for the methods that use them.
        inner: Links between the Hessian's evaluation and the solution.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> _ = mo.Optimizer([w], m.Newton()).step(mo.closure(lambda: w[0] ** 2 + w[0] * w[1] + 3 * w[1] ** 2))
        >>> w.data.abs().round(decimals=5)
        tensor([0., 0.])

    References:
        J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., section 3.3; Y. N. Dauphin et al., "Identifying and
        attacking the saddle point problem in high-dimensional non-convex optimization", NeurIPS 2014.
    """

    decides_on_host = True

    shared_settings = True
    needs = frozenset({Need.GRADIENT, Need.HESSIAN})
    vector_state = True
    hessian = "matrix"

    def __init__(
        self,
        *,
        damping: Any = 0.0,
        eigval_fn: Callable[[Tensor], Tensor] | None = None,
        eigv_tol: float | None = None,
        truncate: int | None = None,
        update_freq: int = 1,
        use_lstsq: bool = False,
        hessian_method: str = "batched_autograd",
        h: float = 1e-3,
        inner: Chainable | None = None,
    ) -> None:
        if hessian_method not in HESSIAN_METHODS:
            raise ValueError(f"Newton: hessian_method is {hessian_method!r}; it can be {', '.join(HESSIAN_METHODS)}")
        if isinstance(damping, int | float) and damping < 0:
            raise ValueError(f"Newton: damping is {damping}; what is added to the diagonal is not negative")
        if truncate is not None and truncate < 1:
            raise ValueError(f"Newton: truncate is {truncate}; keep at least one eigenvalue")
        if eigv_tol is not None and not 0 <= eigv_tol < 1:
            raise ValueError(f"Newton: eigv_tol is {eigv_tol}; it is a fraction of the largest eigenvalue")
        super().__init__(
            {
                "damping": damping,
                "eigv_tol": eigv_tol,
                "truncate": truncate,
                "use_lstsq": use_lstsq,
                "hessian_method": hessian_method,
                "h": h,
            },
            update_freq=update_freq,
            inner=inner,
        )
        # Not a setting: a setting that can be called is a schedule.
        self.eigval_fn = eigval_fn

    def all_needs(self) -> frozenset[Need]:
        """The Hessian; only evaluations elsewhere where it is made of differences."""
        if "fd" in self.defaults["hessian_method"]:
            return (super().all_needs() - {Need.HESSIAN}) | {Need.CLOSURE}
        return super().all_needs()

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        """Evaluates the Hessian."""
        setting = settings[0]
        refuse_complex(type(self).__name__, objective.params)
        H = objective.hessian(setting["hessian_method"], setting["h"])[2]
        H = H.float() if H.dtype in (torch.float16, torch.bfloat16) else H
        states[0]["H"] = 0.5 * (H + H.T)

    def _damp(self, H: Tensor, setting: Any) -> Tensor:
        damping = setting["damping"]
        if damping:
            H = H.clone()
            H.diagonal().add_(damping)
        return H

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        """Solves for the update."""
        setting = settings[0]
        u = flat(mask_absent(objective.peek_updates(), objective.present))
        H = self._damp(states[0]["H"].to(u.dtype), setting)
        if not bool(torch.isfinite(H).all()):
            return objective
        if self._uses_eigenvalues(setting):

            def solve_symmetric(A: Tensor, b: Tensor) -> Tensor:
                kept = decompose(A, self.eigval_fn, setting["eigv_tol"], setting["truncate"])
                return kept.vectors @ ((kept.vectors.mT @ b) / kept.values)

            out = solve_live(H, u, solve_symmetric)
        else:
            out = solve_live(H, u, shortest if setting["use_lstsq"] else solve)
        objective.updates = unflat(out, objective.params)
        return objective

    def _uses_eigenvalues(self, setting: Any) -> bool:
        return self.eigval_fn is not None or setting["eigv_tol"] is not None or setting["truncate"] is not None

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """The Hessian, or what is left of its eigenvalues."""
        param = objective.params[0]
        setting = self.settings[param]
        if "H" not in self.state[param]:
            self.update_states(objective, [self.state[param]], [setting])
        H = self._damp(self.state[param]["H"], setting)
        if self._uses_eigenvalues(setting):
            return decompose(H, self.eigval_fn, setting["eigv_tol"], setting["truncate"])
        return Dense(H, symmetric=True)
