"""Newton's method without a solution of systems."""

from __future__ import annotations

from typing import Any

import torch

from ...linalg import Dense, LinearOperator
from ...optim import HESSIAN_METHODS, Chainable, Need, Objective, Transform
from .._flat import flat, mask_absent, unflat
from ._solve import refuse_complex


class InverseFreeNewton(Transform):
    r"""Multiplies the update by an inverse of the Hessian that one product improves at each step.

    $Y \leftarrow Y (2I - HY),\quad u \leftarrow Yu$, the iteration of Schulz, from $Y = H^T / (\|H\|_1 \|H\|_\infty)$. Y is
    carried over from step to step, and begun again where the Hessian has changed so much that $\|I - HY\| \ge 1$, from where
    the iteration would not return.

    Args:
        update_freq: Evaluate the Hessian, and improve Y, at every n-th step only.
        hessian_method: How the Hessian is computed (see `Objective.hessian`).
        h: The length of difference steps, for the methods that use them.
        inner: Links between the Hessian's evaluation and the product.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.InverseFreeNewton())
        >>> for _ in range(12):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + w[0] * w[1] + 3 * w[1] ** 2))
        >>> bool(w.abs().max() < 1e-6)
        True

    References:
        G. Schulz, "Iterative Berechnung der reziproken Matrix", ZAMM 13 (1933); M. Massalski, M. Nockowska-Rosiak,
        "Inverse-free Newton's method", 2025.
    """

    decides_on_host = True

    shared_settings = True
    needs = frozenset({Need.GRADIENT, Need.HESSIAN})
    vector_state = True
    hessian = "matrix"

    def __init__(
        self,
        *,
        update_freq: int = 1,
        hessian_method: str = "batched_autograd",
        h: float = 1e-3,
        inner: Chainable | None = None,
    ) -> None:
        if hessian_method not in HESSIAN_METHODS:
            raise ValueError(
                f"InverseFreeNewton: hessian_method is {hessian_method!r}; it can be {', '.join(HESSIAN_METHODS)}"
            )
        super().__init__({"hessian_method": hessian_method, "h": h}, update_freq=update_freq, inner=inner)

    def all_needs(self) -> frozenset[Need]:
        """The Hessian; only evaluations elsewhere where it is made of differences."""
        if "fd" in self.defaults["hessian_method"]:
            return (super().all_needs() - {Need.HESSIAN}) | {Need.CLOSURE}
        return super().all_needs()

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        """Evaluates the Hessian, and improves its inverse."""
        state, setting = states[0], settings[0]
        refuse_complex("InverseFreeNewton", objective.params)
        H = objective.hessian(setting["hessian_method"], setting["h"])[2]
        H = H.float() if H.dtype in (torch.float16, torch.bfloat16) else H
        state["H"] = H = 0.5 * (H + H.mT)
        Y = state.get("Y")
        if Y is not None:
            rest = -(H @ Y)
            rest.diagonal().add_(1.0)
            if float(torch.linalg.matrix_norm(rest, 2)) >= 1.0 + 1e-6:
                Y = None
        if Y is None:
            size = float(torch.linalg.matrix_norm(H, 1)) * float(torch.linalg.matrix_norm(H, float("inf")))
            state["Y"] = H.mT / size if 0 < size < float("inf") else torch.eye(len(H), dtype=H.dtype, device=H.device)
        else:
            state["Y"] = Y + Y @ rest

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        """Multiplies by the inverse as it is known."""
        u = flat(mask_absent(objective.peek_updates(), objective.present))
        objective.updates = unflat(states[0]["Y"].to(u.dtype) @ u, objective.params)
        return objective

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """The Hessian."""
        param = objective.params[0]
        if "H" not in self.state[param]:
            self.update_states(objective, [self.state[param]], [self.settings[param]])
        return Dense(self.state[param]["H"], symmetric=True)
