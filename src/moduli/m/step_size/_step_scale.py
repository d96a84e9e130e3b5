"""What step sizes that a link finds by itself share, and those from differences of points and gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from ...linalg import LinearOperator
from ...optim import Objective, Transform
from .._checks import Ranges, check_settings, positive
from .._transforms import Settings, States
from ..ops._identity import make_scaled_identity


class StepScale(Transform):
    """A link that multiplies the update by one step size for all parameters, which it keeps in `global_state`.

    Args:
        given: The settings and `inner`: the arguments of the link as they are, `locals()`.

    Attributes:
        ranges: The arguments that a check of `_checks` is for, by check.
        key: The step size in `global_state`: a number, or a 0-d tensor on the parameters' device.
    """

    members = "batched"
    shared_settings = True
    ranges: ClassVar[Ranges] = {}
    key: ClassVar[str] = "alpha"

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(check_settings(self, given, "inner"), inner=given["inner"])

    def apply_states(self, objective: Objective, states: States, settings: Settings) -> Objective:
        """Scales the update."""
        step = self.global_state[self.key]
        objective.updates = [update.mul_(step) for update in objective.get_updates()]
        return objective

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """A multiple of the identity, with the step as its inverse."""
        step = self.global_state.get(self.key, 0.0)
        return make_scaled_identity(objective, step) if step > 0 else None


class DifferenceStep(StepScale):
    """A step size found from $s = x - x_-$ and $y = g - g_-$; the first step has a given size."""

    ranges = {positive: ("alpha_0",)}

    @abstractmethod
    def find(self, s: list[Tensor], y: list[Tensor], grads: list[Tensor], setting: Mapping[str, Any]) -> Any:
        """The step size: a number, or a 0-d tensor on the parameters' device."""

    def update_states(self, objective: Objective, states: States, settings: Settings) -> None:
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

    def reset_for_online(self) -> None:
        """Forgets the last point."""
        super().reset_for_online()
        self.clear_state_keys("previous", "previous_grad")
