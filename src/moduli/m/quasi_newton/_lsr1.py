"""Limited-memory symmetric rank-one updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...linalg import LinearOperator, LowRankPlusDiagonal, ScaledIdentity
from ...optim import Chainable, Objective
from .._checks import collect_settings
from .._vector_link import HessianLink, vector_like
from ._pairs import PairLink, take_tensors


class LSR1(PairLink, HessianLink):
    r"""Multiplies the update by the SR1 matrix of the last pairs, started from $\gamma I$.

    $H = \gamma I + Z^T (R + R^T - D - \gamma Y Y^T)^{-1} Z,\ Z = S - \gamma Y$ (pairs in rows), with $D$ the diagonal and
    $R$ the upper part of $S Y^T$. It may be indefinite, as the Hessian may: best in a trust region.

    Args:
        history_size: How many pairs are kept.
        init_scale: $\gamma$.
        ptol: A step whose largest component is not above this gives no pair.
        gtol: A change of the gradient whose largest component is not above this gives no pair.
        ptol_restart: Forget all pairs after a step that gives none.
        gtol_restart: Forget all pairs after a change of the gradient that gives none.
        scale_first: Before there is a pair, scale the update to a length of at most one.
        update_freq: Take in a pair at every n-th step only.
        inner: Links between learning and the product.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.TrustCG(m.LSR1()))
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2, fixed=True))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-4)
        True

    References:
        R. H. Byrd, J. Nocedal, R. B. Schnabel, "Representations of quasi-Newton matrices", Math. Programming 63 (1994),
        theorem 5.1.
    """

    def __init__(
        self,
        *,
        history_size: int = 10,
        init_scale: float = 1.0,
        ptol: float = 1e-32,
        gtol: float = 1e-32,
        ptol_restart: bool = False,
        gtol_restart: bool = False,
        scale_first: bool = False,
        update_freq: int = 1,
        inner: Chainable | None = None,
    ) -> None:
        if history_size < 1 or not init_scale > 0:
            raise ValueError(f"LSR1: history_size is {history_size} and init_scale {init_scale}; both are positive")
        settings = collect_settings(locals(), "update_freq", "inner")
        super().__init__(settings, update_freq=update_freq, inner=inner)

    def _times(self, state: Any, v: Tensor, gamma: float) -> Tensor:
        """H v."""
        if not state.get("s"):
            return gamma * v
        S, Y = torch.stack(state["s"]), torch.stack(state["y"])
        Z, SY = S - gamma * Y, S @ Y.T
        M = SY.triu() + SY.triu(1).T - gamma * (Y @ Y.T)
        inner: Tensor = torch.linalg.pinv(M, hermitian=True) @ (Z @ v)
        return gamma * v + Z.T @ inner

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        """Takes in the pair of the last step."""
        x, s, y, verdict = take_tensors(objective, state, setting)
        held = state.setdefault("s", [])
        other = state.setdefault("y", [])
        restart = (verdict == "step" and setting["ptol_restart"]) or (verdict == "gradient" and setting["gtol_restart"])
        if restart or (held and held[0].shape != x.shape):
            held.clear()
            other.clear()
        if s is None or y is None:
            return
        z = s - self._times(state, y, float(setting["init_scale"]))
        sizes = float(torch.linalg.vector_norm(z)) * float(torch.linalg.vector_norm(y))
        if sizes > 0 and abs(torch.dot(z, y).item()) > 1e-8 * sizes:
            held.append(s)
            other.append(y)
            del held[: -setting["history_size"]], other[: -setting["history_size"]]

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        """Multiplies by the inverse Hessian of the pairs."""
        out = self._times(state, u, float(setting["init_scale"]))
        if setting["scale_first"] and not state.get("s"):
            length = float(torch.linalg.vector_norm(out))
            out = out / length if 1 < length < float("inf") else out
        return out

    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        """The SR1 matrix of the pairs: a multiple of the identity and a small matrix between tall ones."""
        sigma = 1 / float(setting["init_scale"])
        diag = vector_like(objective).fill_(sigma)
        if not state.get("s"):
            return ScaledIdentity(len(diag), diag.new_tensor(sigma))
        S, Y = torch.stack(state["s"]), torch.stack(state["y"])
        Z, SY = Y - sigma * S, S @ Y.T
        M = SY.tril() + SY.tril(-1).T - sigma * (S @ S.T)
        core = torch.linalg.pinv(M, hermitian=True)
        return LowRankPlusDiagonal(diag, Z.T, 0.5 * (core + core.T))
