"""Newton's method without a solution of systems."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...linalg import Dense, LinearOperator
from ...optim import Chainable, Need, Objective
from .._checks import collect_settings
from .._vector_link import HessianLink
from ._base import SecondOrderLink
from ._newton import evaluate_hessian


class InverseFreeNewton(SecondOrderLink, HessianLink):
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

    shared_settings = True
    needs = frozenset({Need.GRADIENT, Need.HESSIAN})
    real_only = True
    learnt = "H"

    def __init__(
        self,
        *,
        update_freq: int = 1,
        hessian_method: str = "batched_autograd",
        h: float = 1e-3,
        inner: Chainable | None = None,
    ) -> None:
        super().__init__(**collect_settings(locals()))

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        """Evaluates the Hessian, and improves its inverse."""
        state["H"] = H = evaluate_hessian(objective, setting)
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

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        """Multiplies by the inverse as it is known."""
        out: Tensor = state["Y"].to(u.dtype) @ u
        return out

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        """The Hessian."""
        return Dense(state["H"], symmetric=True)
