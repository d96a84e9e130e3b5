"""The closure of an optimizer over a population: it moves the members, and has gradients collected for the links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ._closure import Evaluator

if TYPE_CHECKING:
    from ._matrices import MemberMatrices


class OtherPresenceError(Exception):
    """Other parameters have gradients than at the last step, so that the step begins again with other blocks."""

    def __init__(self, loss: Any, present: list[bool]) -> None:
        super().__init__("other parameters have gradients than at the step before")
        self.loss = loss
        self.present = present


class MemberEvaluator(Evaluator):
    """A closure whose gradients arrive at a population's leaves, and are wanted as those of its blocks.

    Args:
        inner: The closure's evaluator.
        matrices: The blocks.
        leaves: All leaves that are trained, where this is the evaluator that a step begins with; None where a link has put
            its own closure in the place of the user's.
    """

    def __init__(self, inner: Evaluator, matrices: MemberMatrices, leaves: list[Tensor] | None = None) -> None:
        self.inner = inner
        self.matrices = matrices
        self.leaves = leaves
        self.source, self.closure, self.fn = inner.source, inner.closure, inner.fn
        self.fixed, self.kind = inner.fixed, inner.kind

    @property
    def count(self) -> int:  # type: ignore[override]
        """How often it was asked."""
        return self.inner.count

    def value(self) -> Any:
        """The loss, gradients not asked for."""
        self.matrices.push()
        leaves = self.matrices.leaves
        # A user's closure may zero gradients in place, and those of leaves are columns of what links hold.
        held = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            return self.inner.value()
        finally:
            for leaf, grad in zip(leaves, held, strict=True):
                leaf.grad = grad

    def gradient(self, params: Sequence[Tensor], scalar: Callable[[Any], Tensor]) -> Any:
        """The loss; gradients are left in `.grad`, of leaves and of blocks."""
        matrices = self.matrices
        matrices.push()
        first, self.leaves = self.leaves, None
        loss = self.inner.gradient([*(first or matrices.leaves), *params], scalar)
        # Only at the start of a step: at trial points a parameter without a gradient is one with the gradient zero.
        present = None if first is None else matrices.find_other_presence(first)
        if present is not None:
            raise OtherPresenceError(loss, present)
        matrices.gather()
        return loss
