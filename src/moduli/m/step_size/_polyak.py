"""Polyak's step size: from the distance to the optimum's value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...linalg import ScaledIdentity
from ...optim import Chainable, Need, Transform
from .._checks import fraction, non_negative, positive
from .._lists import dot
from .._scalars import choose, divide, larger, read, smaller

if TYPE_CHECKING:
    from ...linalg import LinearOperator
    from ...optim import Objective


def make_scaled_identity(objective: Objective, alpha: float) -> LinearOperator:
    """The Hessian for which the Newton step is this step size."""
    first = objective.params[0]
    count = sum(p.numel() * (2 if p.is_complex() else 1) for p in objective.params)
    dtype = first.dtype.to_real() if first.is_complex() else first.dtype
    return ScaledIdentity(count, 1 / alpha, dtype=dtype, device=first.device)


class PolyakStepSize(Transform):
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

    members = "batched"

    shared_settings = True
    needs = frozenset({Need.GRADIENT, Need.LOSS})

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
        non_negative("PolyakStepSize", y=y)
        fraction("PolyakStepSize", y_decay=y_decay)
        positive("PolyakStepSize", alpha=alpha)
        if max is not None:
            positive("PolyakStepSize", max=max)
        super().__init__(
            {"f_star": f_star, "y": y, "y_decay": y_decay, "max": max, "use_grad": use_grad, "alpha": alpha},
            inner=inner,
        )

    def update_states(
        self, objective: Objective, states: list[dict[str, Any]], settings: Sequence[Mapping[str, Any]]
    ) -> None:
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

    def apply_states(
        self, objective: Objective, states: list[dict[str, Any]], settings: Sequence[Mapping[str, Any]]
    ) -> Objective:
        """Scales the update."""
        updates = objective.get_updates()
        step = self._step(objective, updates, settings[0])
        objective.updates = [update.mul_(step) for update in updates]
        return objective

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """A multiple of the identity, with the step as its inverse."""
        step = self.global_state.get("step", 0.0)
        return make_scaled_identity(objective, step) if step > 0 else None
