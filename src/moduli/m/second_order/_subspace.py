"""Newton's method in a subspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...linalg import Eigendecomposition, LinearOperator
from ...optim import Chainable, Objective
from .._checks import collect_settings
from .._flat import flat
from .._vector_link import gather_update
from ._newton import SpectralLink

_TYPES = ("common_directions", "orthonormal", "rademacher", "rows", "topk", "mixed")


class SubspaceNewton(SpectralLink):
    r"""Solves $(S^THS + \lambda I)\,z = S^Tu$ in a subspace with orthonormal columns $S$, and goes along $Sz$.

    Args:
        sketch_size: The dimension of the subspace, k; as many products with the Hessian per step.
        sketch_type: "common_directions" (the last gradients), "orthonormal" and "rademacher" (random), "rows" (random
            coordinates), "topk" (coordinates with the largest gradients), "mixed" (gradient, its slow and fast means, the
            last step, and random ones).
        damping: $\lambda$.
        eigval_fn: A function of the eigenvalues in the subspace, applied before they are inverted (`torch.abs`: saddle-free).
        eigv_tol: Leave out eigenvalues below this fraction of the largest (by magnitude).
        truncate: Keep only this many eigenvalues, the largest by magnitude.
        use_lstsq: Always take the shortest least-squares solution.
        update_freq: Evaluate the Hessian in the subspace at every n-th step only.
        hvp_method: As for `NewtonCG`.
        h: The length of difference steps.
        seed: Draws from a generator of its own, which is saved; None for torch's.
        inner: Links that transform the right-hand side.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.SubspaceNewton(sketch_size=2))
        >>> for _ in range(5):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 9 * w[1] ** 2))
        >>> bool(w.abs().max() < 1e-6)
        True

    References:
        R. M. Gower, D. Kovalev, F. Lieder, P. Richtarik, "RSN: randomized subspace Newton", NeurIPS 2019; P.-W. Wang,
        C.-P. Lee, C.-J. Lin, "The common-directions method for regularized empirical risk minimization", JMLR 20 (2019).
    """

    learnt = "basis"

    def __init__(
        self,
        *,
        sketch_size: int = 100,
        sketch_type: str = "common_directions",
        damping: float = 0.0,
        eigval_fn: Callable[[Tensor], Tensor] | None = None,
        eigv_tol: float | None = None,
        truncate: int | None = None,
        use_lstsq: bool = False,
        update_freq: int = 1,
        hvp_method: str = "batched_autograd",
        h: float = 1e-2,
        seed: int | None = None,
        inner: Chainable | None = None,
    ) -> None:
        if sketch_type not in _TYPES:
            raise ValueError(f"SubspaceNewton: sketch_type is {sketch_type!r}; it can be {', '.join(_TYPES)}")
        if sketch_size < 1 or damping < 0:
            raise ValueError("SubspaceNewton: sketch_size is at least 1, damping not negative")
        super().__init__(**collect_settings(locals()))

    def _columns(self, g: Tensor, x: Tensor, state: Any, setting: Any) -> Tensor:
        """Columns that span the subspace."""
        kind, n = setting["sketch_type"], g.numel()
        k = min(setting["sketch_size"], n)
        generator = self.get_generator(g.device, self.seed)
        if kind == "common_directions":
            state.setdefault("gradients", []).append(g.clone())
            del state["gradients"][:-k]
            return torch.stack(state["gradients"][::-1], 1)
        if kind == "rows":
            return _unit(torch.randperm(n, generator=generator, device=g.device)[:k], g)
        if kind == "topk":
            return _unit(g.abs().topk(k).indices, g)
        if kind == "rademacher":
            return torch.randint(0, 2, (n, k), generator=generator, device=g.device).to(g) * 2 - 1
        draw = torch.randn(n, k, dtype=g.dtype, device=g.device, generator=generator)
        if kind == "orthonormal":
            return draw
        known = [g]
        for name, beta in (("fast", 0.9), ("slow", 0.99)):
            state[name] = g.clone() if name not in state else torch.lerp(g, state[name], beta)
            known.append(state[name])
        if "point" in state:
            known.append(x - state["point"])
        state["point"] = x.clone()
        return torch.cat([torch.stack(known, 1), draw], 1)[:, : max(k, 1)]

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        """Chooses the subspace, and evaluates the Hessian there."""
        g = gather_update(objective)
        columns = self._columns(g, flat(objective.params), state, setting)
        columns = columns / torch.linalg.vector_norm(columns, dim=0).clamp(min=torch.finfo(g.dtype).tiny)
        Q, R = torch.linalg.qr(columns)
        keep = R.diagonal().abs() > 1e-10
        S = Q[:, keep] if bool(keep.any()) else Q[:, :1]
        HS = objective.hessian_matrix_product(S, hvp_method=setting["hvp_method"], h=setting["h"])[0].to(S.dtype)
        small = S.T @ HS
        state["basis"] = list(S.unbind(1))
        state["small"] = [row.tolist() for row in 0.5 * (small + small.T)]

    def _parts(self, state: Any, setting: Any) -> tuple[Tensor, Tensor]:
        S = torch.stack(state["basis"], 1)
        small = torch.tensor(state["small"], dtype=S.dtype, device=S.device)
        small.diagonal().add_(setting["damping"])
        return S, small

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        """Solves in the subspace."""
        S, small = self._parts(state, setting)
        out = S @ self.solve(small, S.T @ u, setting)
        if torch.dot(out, u).item() <= 0:
            out = S @ (S.T @ u)  # indefinite there: the gradient's part in the subspace goes downhill
        return out

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        """The Hessian's part in the subspace."""
        S, small = self._parts(state, setting)
        kept = self.decompose(small, setting) or Eigendecomposition.of(small)
        return Eigendecomposition(kept.values, S @ kept.vectors)


def _unit(index: Tensor, like: Tensor) -> Tensor:
    out = torch.zeros(like.numel(), index.numel(), dtype=like.dtype, device=like.device)
    out[index, torch.arange(index.numel(), device=like.device)] = 1.0
    return out
