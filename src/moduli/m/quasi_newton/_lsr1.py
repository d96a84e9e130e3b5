"""Limited-memory symmetric rank-one updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...linalg import LinearOperator, LowRankPlusDiagonal, ScaledIdentity
from ...optim import Chainable, Objective, Transform
from .._flat import flat, mask_absent, size, unflat
from ._pairs import changed, forget_point


class LSR1(Transform):
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

    decides_on_host = True

    vector_state = True
    hessian = "matrix"

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
        super().__init__(
            {
                "history_size": history_size,
                "init_scale": init_scale,
                "ptol": ptol,
                "gtol": gtol,
                "ptol_restart": ptol_restart,
                "gtol_restart": gtol_restart,
                "scale_first": scale_first,
            },
            update_freq=update_freq,
            inner=inner,
        )

    def _times(self, state: Any, v: Tensor, gamma: float) -> Tensor:
        """H v."""
        if not state.get("s"):
            return gamma * v
        S, Y = torch.stack(state["s"]), torch.stack(state["y"])
        Z, SY = S - gamma * Y, S @ Y.T
        M = SY.triu() + SY.triu(1).T - gamma * (Y @ Y.T)
        inner: Tensor = torch.linalg.pinv(M, hermitian=True) @ (Z @ v)
        return gamma * v + Z.T @ inner

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        """Takes in the pair of the last step."""
        state, setting = states[0], settings[0]
        x, _, s, y, verdict = changed(objective, state, setting["ptol"], setting["gtol"])
        held = state.setdefault("s", [])
        other = state.setdefault("y", [])
        if held and held[0].shape != x.shape:
            held.clear()
            other.clear()
        if (verdict == "step" and setting["ptol_restart"]) or (verdict == "gradient" and setting["gtol_restart"]):
            held.clear()
            other.clear()
        if s is None or y is None or verdict:
            return
        z = s - self._times(state, y, float(setting["init_scale"]))
        sizes = float(torch.linalg.vector_norm(z)) * float(torch.linalg.vector_norm(y))
        if sizes > 0 and abs(torch.dot(z, y).item()) > 1e-8 * sizes:
            held.append(s)
            other.append(y)
            del held[: -setting["history_size"]], other[: -setting["history_size"]]

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        """Multiplies by the inverse Hessian of the pairs."""
        u = flat(mask_absent(objective.peek_updates(), objective.present))
        out = self._times(states[0], u, float(settings[0]["init_scale"]))
        if settings[0]["scale_first"] and not states[0].get("s"):
            length = float(torch.linalg.vector_norm(out))
            out = out / length if 1 < length < float("inf") else out
        objective.updates = unflat(out, objective.params)
        return objective

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """The SR1 matrix of the pairs: a multiple of the identity and a small matrix between tall ones."""
        param = objective.params[0]
        state, sigma = self.state[param], 1 / float(self.settings[param]["init_scale"])
        like = flat([param]).new_empty(())
        n = size(objective.params)
        if not state.get("s"):
            return ScaledIdentity(n, like.fill_(sigma))
        S, Y = torch.stack(state["s"]), torch.stack(state["y"])
        Z, SY = Y - sigma * S, S @ Y.T
        M = SY.tril() + SY.tril(-1).T - sigma * (S @ S.T)
        core = torch.linalg.pinv(M, hermitian=True)
        return LowRankPlusDiagonal(like.new_full((n,), sigma), Z.T, 0.5 * (core + core.T))

    def reset_for_online(self) -> None:
        """Forgets the last point; the pairs stay."""
        super().reset_for_online()
        for state in self.state.values():
            forget_point(state)
