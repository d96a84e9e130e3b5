"""The form of ordinary parameters: links see them as they are. It is the interface that every form has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .. import Module, Objective
    from .._closure import Evaluator


class StepForm:
    """How links meet the parameters of a step.

    Attributes:
        fuses: Whether runs of pointwise links are one pass.
        enters: Whether links see other tensors than the parameters.
    """

    fuses = True
    enters = False

    def enter(self, leaves: list[Tensor], evaluator: Evaluator | None) -> tuple[list[Tensor], Evaluator | None]:
        """Return the tensors that links see for these parameters, and an evaluator whose gradients arrive at them.

        Args:
            leaves: The parameters that are trained.
            evaluator: That of the closure; None where the gradients are known already.
        """
        return leaves, evaluator

    def run(self, link: Module, objective: Objective) -> Objective:
        """Run a link on what it needs, and come back to the tensors of the step."""
        return link.step(objective)

    def leave(self, objective: Objective) -> Objective:
        """Return the objective over the tensors of the step, after the last link."""
        return objective

    def describe(self, link: Any) -> str:
        """Say what a link works on, where that is not the parameters themselves."""
        return ""


PLAIN = StepForm()
