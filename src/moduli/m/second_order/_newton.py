"""Newton's method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...linalg import Dense, Eigendecomposition, LinearOperator
from ...optim import Chainable, Need, Objective
from .._checks import collect_settings
from .._vector_link import HessianLink
from ._base import SecondOrderLink
from ._solve import decompose, shortest, solve, solve_live


class SpectralLink(SecondOrderLink, HessianLink):
    """A link that solves with a matrix, or with what is kept of its eigenvalues.

    Args:
        eigval_fn: A function of the eigenvalues; None to keep them.
        **arguments: Those of `SecondOrderLink`; of the settings it uses `eigv_tol`, `truncate` and `use_lstsq`.
    """

    shared_settings = True
    real_only = True

    def __init__(self, *, eigval_fn: Callable[[Tensor], Tensor] | None, **arguments: Any) -> None:
        super().__init__(**arguments)
        # Not a setting: a setting that can be called is a schedule.
        self.eigval_fn = eigval_fn

    def decompose(self, H: Tensor, setting: Any) -> Eigendecomposition | None:
        """What is kept of the eigenvalues; None where all are, as they are."""
        if self.eigval_fn is None and setting["eigv_tol"] is None and setting["truncate"] is None:
            return None
        return decompose(H, self.eigval_fn, setting["eigv_tol"], setting["truncate"])

    def solve(self, H: Tensor, b: Tensor, setting: Any) -> Tensor:
        """The solution d of H d = b."""
        kept = self.decompose(H, setting)
        if kept is None:
            return (shortest if setting["use_lstsq"] else solve)(H, b)
        return kept.vectors @ ((kept.vectors.mT @ b) / kept.values)


class Newton(SpectralLink):
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

    needs = frozenset({Need.GRADIENT, Need.HESSIAN})
    learnt = "H"

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
        if isinstance(damping, int | float) and damping < 0:
            raise ValueError(f"Newton: damping is {damping}; what is added to the diagonal is not negative")
        super().__init__(**collect_settings(locals()))

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        """Evaluates the Hessian."""
        state["H"] = evaluate_hessian(objective, setting)

    def _damp(self, H: Tensor, setting: Any) -> Tensor:
        damping = setting["damping"]
        if damping:
            H = H.clone()
            H.diagonal().add_(damping)
        return H

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor | None:
        """Solves for the update."""
        H = self._damp(state["H"].to(u.dtype), setting)
        if not bool(torch.isfinite(H).all()):
            return None
        return solve_live(H, u, lambda A, b: self.solve(A, b, setting))

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        """The Hessian, or what is left of its eigenvalues."""
        H = self._damp(state["H"], setting)
        kept = self.decompose(H, setting)
        return Dense(H, symmetric=True) if kept is None else kept


def evaluate_hessian(objective: Objective, setting: Any) -> Tensor:
    """The Hessian of the loss, exactly symmetric and at least in single precision."""
    H = objective.hessian(setting["hessian_method"], setting["h"])[2]
    H = H.float() if H.dtype in (torch.float16, torch.bfloat16) else H
    return 0.5 * (H + H.mT)
