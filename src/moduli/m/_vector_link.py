"""Links over all parameters as one vector, whose state is that of the first parameter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from ..linalg import LinearOperator
from ..optim import Objective, Transform
from ._flat import flat, mask_absent, size, unflat


def refuse_complex(name: str, params: Sequence[Tensor]) -> None:
    """Second derivatives by complex numbers are not a matrix."""
    for param in params:
        if param.is_complex():
            raise TypeError(
                f"{name} takes real parameters, got {param.dtype}; optimize torch.view_as_real(w), or use LBFGS"
            )


def gather_update(objective: Objective) -> Tensor:
    """The update as one vector, with zeros where a parameter has no gradient. May share memory with it."""
    return flat(mask_absent(objective.peek_updates(), objective.present))


def vector_like(objective: Objective) -> Tensor:
    """An uninitialised vector for all parameters."""
    return flat(objective.params[:1]).new_empty(size(objective.params))


class VectorLink(Transform):
    """A link that learns from, and transforms, the update as one vector: override `learn_vector` and `transform_vector`."""

    vector_state = True
    real_only: ClassVar[bool] = False
    """Whether complex parameters are refused."""
    learnt: ClassVar[str] = ""
    """The entry of the state that it cannot do without."""

    def learn_vector(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        """Learn: change `state`, not the update."""

    @abstractmethod
    def transform_vector(self, objective: Objective, u: Tensor, state: dict[str, Any], setting: Any) -> Tensor | None:
        """The new update from the one that there is; None to leave it."""

    def update_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> None:
        """Learns."""
        if self.real_only:
            refuse_complex(type(self).__name__, objective.params)
        self.learn_vector(objective, states[0], settings[0])

    def apply_states(self, objective: Objective, states: list[dict[str, Any]], settings: Any) -> Objective:
        """Transforms the update."""
        self._ensure_learnt(objective, states[0], settings[0])
        out = self.transform_vector(objective, gather_update(objective), states[0], settings[0])
        if out is not None:
            objective.updates = unflat(out, objective.params)
        return objective

    def _ensure_learnt(self, objective: Objective, state: dict[str, Any], setting: Any) -> None:
        if self.learnt and self.learnt not in state:
            self.update_states(objective, [state], [setting])


class HessianLink(VectorLink):
    """A link over one vector that knows the Hessian, or an approximation of it: override `operator` too."""

    decides_on_host = True

    hessian = "matrix"

    @abstractmethod
    def operator(self, objective: Objective, state: dict[str, Any], setting: Any) -> LinearOperator:
        """The Hessian as it is known now."""

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """The Hessian as this link knows it."""
        param = objective.params[0]
        state, setting = self.state[param], self.settings[param]
        self._ensure_learnt(objective, state, setting)
        return self.operator(objective, state, setting)
