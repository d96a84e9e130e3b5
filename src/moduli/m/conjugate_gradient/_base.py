"""Nonlinear conjugate gradients: one implementation with a rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable, Objective
from .._checks import collect_settings
from .._vector_link import VectorLink, gather_update
from ._rules import RULES


class ConjugateGradient(VectorLink):
    r"""Adds to the update a multiple of the last direction, $D = u + \beta D_-$, with a rule for $\beta$.

    Follow it with a tight line search: `m.StrongWolfe(c2=0.1, a_init="first-order")`. Where $D$ would not point downhill
    the direction starts afresh from the update.

    Args:
        rule: "fletcher-reeves", "polak-ribiere", "hestenes-stiefel", "dai-yuan", "hager-zhang", "liu-storey",
            "conjugate-descent" or "dai-yuan-hestenes-stiefel".
        clip_beta: Replace a negative beta by zero.
        restart_interval: Start afresh after this many steps; "auto" for n + 1, None for never.
        inner: Links between learning and the transformation.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.ConjugateGradient("dai-yuan"), m.StrongWolfe(c2=0.1))
        >>> for _ in range(20):
        ...     _ = opt.step(mo.closure(lambda: w[0] ** 2 + 5 * w[1] ** 2, fixed=True))
        >>> bool(w.abs().max() < 1e-3)
        True

    References:
        W. W. Hager, H. Zhang, "A survey of nonlinear conjugate gradient methods", Pacific J. Optim. 2 (2006).
    """

    members = "batched"
    shared_settings = True

    def __init__(
        self,
        rule: str = "polak-ribiere",
        *,
        clip_beta: bool = False,
        restart_interval: int | str | None = "auto",
        inner: Chainable | None = None,
    ) -> None:
        name = type(self).__name__
        if rule not in RULES:
            raise ValueError(f"{name}: rule is {rule!r}; it can be {', '.join(RULES)}")
        if not (restart_interval in (None, "auto") or (isinstance(restart_interval, int) and restart_interval > 0)):
            raise ValueError(
                f"{name}: restart_interval is {restart_interval!r}; give a number of steps, 'auto' or None"
            )
        super().__init__(collect_settings(locals(), "name", "inner"), inner=inner)

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        """Finds beta from this gradient and the last one."""
        g = gather_update(objective)
        last, D = state.get("last"), state.get("direction")
        every = setting["restart_interval"]
        every = g.numel() + 1 if every == "auto" else every
        if last is None or D is None or last.shape != g.shape or last.dtype is not g.dtype:
            state["age"] = torch.ones((), dtype=torch.long, device=g.device)
            state["beta"] = torch.zeros((), dtype=g.dtype, device=g.device)
            D = torch.zeros_like(g)
        else:
            beta = RULES[setting["rule"]](g, last, g - last, D)
            beta = beta.clamp(min=0.0) if setting["clip_beta"] else beta
            goes_on = beta.isfinite() if every is None else beta.isfinite() & (state["age"] < every)
            state["beta"] = torch.where(goes_on, beta, 0.0)
            state["age"] = torch.where(state["beta"] != 0, state["age"] + 1, 1)
        state["last"] = g.clone()
        state["previous"] = D
        state["direction"] = self._combine(g, state)

    @staticmethod
    def _combine(g: Tensor, state: dict[str, Any]) -> Tensor:
        D = state.get("previous")
        if D is None or D.shape != g.shape:
            return g.clone()
        out = torch.where(state["beta"] != 0, g + state["beta"] * D, g)
        return torch.where(torch.dot(out, g) > 0, out, g)

    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor:
        """Adds the last direction."""
        out = self._combine(u, state)
        if "inner" in self.children:  # what they make of the gradient is part of the direction
            state["direction"] = out
        return out.clone()

    def reset_for_online(self) -> None:
        """Forgets the last gradient."""
        super().reset_for_online()
        for state in self.state.values():
            state.pop("last", None)
