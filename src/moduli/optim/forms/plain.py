"""The form of ordinary parameters, which links get themselves. It is the interface of every form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from .. import Module, Objective
    from .._closure import Evaluator


class StepForm:
    """A form in which links get the parameters of a step.

    Attributes:
        fuses: Whether runs of pointwise links are one pass.
        enters: Whether links get other tensors than the parameters.
    """

    fuses = True
    enters = False

    def enter(self, leaves: list[Tensor], evaluator: Evaluator | None) -> tuple[list[Tensor], Evaluator | None]:
        """Return the tensors for links, and an evaluator that writes gradients to them.

        Args:
            leaves: The parameters that are trained.
            evaluator: The closure's evaluator; None if the gradients are in `.grad`.
        """
        return leaves, evaluator

    def run(self, link: Module, objective: Objective) -> Objective:
        """Run a link on the tensors that it needs, and convert the result back to the tensors of the step."""
        return link.step(objective)

    def leave(self, objective: Objective) -> Objective:
        """Return the objective over the tensors of the step, after the last link."""
        return objective

    def describe(self, link: Any) -> str:
        """Return a description of the tensors that a link works on; empty for the parameters themselves."""
        return ""


PLAIN = StepForm()
