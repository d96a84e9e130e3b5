"""The gradient where an exact line search would have ended."""

from __future__ import annotations

from typing import Any

import torch

from ...optim import Objective, Transform
from .._flat import flat, mask_absent, unflat
from ._pairs import changed, forget_point


class GradientCorrection(Transform):
    r"""Corrects the update as if the last line search had been exact: $u \leftarrow u - y\,\frac{s^Tu}{s^Ty}$.

    With s the last step and y the change of the update, the result has no part left along s. Use it as `inner` of a
    quasi-Newton link, whose theory supposes that.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.DFP(inner=m.GradientCorrection()), m.Backtracking())
        >>> for _ in range(30):
        ...     _ = opt.step(mo.closure(lambda: (w[0] - 1) ** 2 + 3 * w[1] ** 2))
        >>> bool((w - torch.tensor([1.0, 0.0])).abs().max() < 1e-3)
        True

    References:
        S. Hoshino, "A formulation of variable metric methods", J. Inst. Maths Applics 10 (1972).
    """

    vector_state = True

    def __init__(self) -> None:
        super().__init__()

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        """The pair of the last step."""
        state = states[0]
        _, _, s, y, verdict = changed(objective, state, 0.0, 0.0)
        state.pop("s", None)
        if s is not None and y is not None and not verdict and torch.dot(s, y).item() > 0:
            state["s"], state["y"] = s, y

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        """Takes out the part along the last step."""
        state = states[0]
        if "s" in state:
            u = flat(mask_absent(objective.peek_updates(), objective.present))
            s, y = state["s"], state["y"]
            out = u - y * (torch.dot(s, u.to(s.dtype)) / torch.dot(s, y))
            objective.updates = unflat(out, objective.params)
        return objective

    def reset_for_online(self) -> None:
        """Forgets the last point."""
        super().reset_for_online()
        for state in self.state.values():
            forget_point(state)
