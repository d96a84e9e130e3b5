"""Polyak's step size: from the distance to the optimum's value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...optim import Chainable, Need, Objective
from .._checks import allow_none, fraction, non_negative, positive
from .._lists import dot
from .._scalars import choose, divide, larger, read, smaller
from .._transforms import Settings, States
from ._step_scale import StepScale


class PolyakStepSize(StepScale):
    r"""Multiplies the update by $\frac{f(x) - f^*}{\langle u, g\rangle}$.

    For a convex function with known least value it needs nothing else. Where that is not known (`f_star=None`) the target
    is the best value so far minus y, which shrinks.

    Args:
        f_star: The least value of the loss; None to estimate it.
        y: How far below the best value so far the target is.
        y_decay: The part of y that each step takes away.
        max: The largest step.
        use_grad: Divide by $\langle u, g\rangle$; False: by $\|u\|^2$.
        alpha: A factor.
        inner: Links that transform the update before the step is measured.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([4.0]))
        >>> _ = mo.Optimizer([w], m.PolyakStepSize()).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([2.])

    References:
        B. T. Polyak, "Introduction to optimization", 1987.
    """

    needs = frozenset({Need.GRADIENT, Need.LOSS})
    ranges = {non_negative: ("y",), fraction: ("y_decay",), positive: ("alpha",), allow_none(positive): ("max",)}
    key = "step"

    def __init__(
        self,
        *,
        f_star: float | None = 0.0,
        y: float = 1.0,
        y_decay: float = 1e-3,
        max: float | None = None,
        use_grad: bool = True,
        alpha: float = 1.0,
        inner: Chainable | None = None,
    ) -> None:
        super().__init__(locals())

    def update_states(self, objective: Objective, states: States, settings: Settings) -> None:
        """Where the best value so far, and the target below it, are kept."""
        setting, memory = settings[0], self.global_state
        loss = read(objective.get_loss(backward=True).double())
        memory["y"] = memory["y"] * (1 - setting["y_decay"]) if "y" in memory else setting["y"]
        memory["best"] = smaller(memory.get("best", loss), loss)
        target = setting["f_star"]
        memory["gap"] = loss - (memory["best"] - memory["y"] if target is None else target)
        memory["step"] = self._step(objective, objective.peek_updates(), setting)

    def _step(self, objective: Objective, updates: Sequence[Tensor], setting: Mapping[str, Any]) -> Any:
        size = dot(updates, objective.get_grads()) if setting["use_grad"] else dot(updates, updates)
        if isinstance(size, Tensor) or size <= 0:  # no direction of descent: its own length is left to measure by
            size = choose(size > 0, size, dot(updates, updates))
        gap = self.global_state["gap"]
        step = divide(setting["alpha"] * larger(gap, 0.0), size, 0.0)
        return step if setting["max"] is None else smaller(step, setting["max"])

    def apply_states(self, objective: Objective, states: States, settings: Settings) -> Objective:
        """Scales the update, which the links inside may have changed."""
        updates = objective.get_updates()
        step = self._step(objective, updates, settings[0])
        objective.updates = [update.mul_(step) for update in updates]
        return objective
