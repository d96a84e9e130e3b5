"""What step sizes from differences share: the last point and gradient."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...optim import Chainable, Transform
from .._checks import positive
from ._polyak import make_scaled_identity

if TYPE_CHECKING:
    from ...linalg import LinearOperator
    from ...optim import Objective


class DifferenceStep(Transform):
    """A step size found from $s = x - x_-$ and $y = g - g_-$; the first step has a given size."""

    shared_settings = True

    def __init__(self, defaults: dict[str, Any], alpha_0: float, use_grad: bool, inner: Chainable | None) -> None:
        positive(type(self).__name__, alpha_0=alpha_0)
        super().__init__({**defaults, "alpha_0": alpha_0, "use_grad": use_grad}, inner=inner)

    @abstractmethod
    def find(self, s: list[Tensor], y: list[Tensor], grads: list[Tensor], setting: Mapping[str, Any]) -> Any:
        """The step size: a number, or a 0-d tensor on the parameters' device."""

    def update_states(
        self, objective: Objective, states: list[dict[str, Any]], settings: Sequence[Mapping[str, Any]]
    ) -> None:
        """Finds the step size, and remembers this point."""
        setting = settings[0]
        grads = objective.get_grads() if setting["use_grad"] else objective.peek_updates()
        params = [param.detach() for param in objective.params]
        if all("previous" in state for state in states):
            s = [param - state["previous"] for param, state in zip(params, states, strict=True)]
            y = [grad - state["previous_grad"] for grad, state in zip(grads, states, strict=True)]
            self.global_state["alpha"] = self.find(s, y, grads, setting)
        else:
            self.global_state.setdefault("alpha", setting["alpha_0"])
        for state, param, grad in zip(states, params, grads, strict=True):
            state["previous"], state["previous_grad"] = param.clone(), grad.clone()

    def apply_states(
        self, objective: Objective, states: list[dict[str, Any]], settings: Sequence[Mapping[str, Any]]
    ) -> Objective:
        """Scales the update."""
        alpha = self.global_state["alpha"]
        objective.updates = [update.mul_(alpha) for update in objective.get_updates()]
        return objective

    def reset_for_online(self) -> None:
        """Forgets the last point."""
        super().reset_for_online()
        self.clear_state_keys("previous", "previous_grad")

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """A multiple of the identity, with the step as its inverse."""
        alpha = self.global_state.get("alpha", 0.0)
        return make_scaled_identity(objective, alpha) if alpha > 0 else None
