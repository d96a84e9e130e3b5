"""Evaluators around that of the user's closure: for parameters that links see in another form, and for ascent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import show_pieces
from ._closure import Evaluator
from ._needs import ClosureError

if TYPE_CHECKING:
    from ._matrices import MemberMatrices
    from ._shards import ShardedParams
    from .optimizer import Optimizer


@contextmanager
def hold_gradients(params: Sequence[Tensor]) -> Iterator[None]:
    """A block in which parameters have no gradients: a user's closure may call backward, or zero them in place."""
    held = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zip(params, held, strict=True):
            param.grad = grad


class FormEvaluator(Evaluator):
    """A closure of parameters that links see in another form.

    Args:
        inner: The closure's evaluator.
        fixed: Whether what is found at the end of a step may be handed to the next one.
    """

    def __init__(self, inner: Evaluator, fixed: bool = False) -> None:
        self.inner = inner
        self.source, self.closure, self.fn = inner.source, inner.closure, inner.fn
        self.fixed, self.kind = fixed, inner.kind

    @property
    def count(self) -> int:  # type: ignore[override]
        """How often it was asked."""
        return self.inner.count

    def graph(self) -> Any:
        """Refused: the graph goes through the parameters in their own form."""
        raise ClosureError(
            "a loss of parameters in pieces (DTensor), or of a population's matrix, can be differentiated once, by backward"
        )


class OtherPresenceError(Exception):
    """Other parameters have gradients than at the last step, so that the step begins again with other blocks."""

    def __init__(self, matrices: MemberMatrices, loss: Any) -> None:
        super().__init__("other parameters have gradients than at the step before")
        self.matrices, self.loss = matrices, loss


class MemberEvaluator(FormEvaluator):
    """A closure whose gradients arrive at a population's leaves, and are wanted as those of its blocks.

    Args:
        inner: The closure's evaluator.
        matrices: The blocks.
        leaves: All leaves that are trained, where this is the evaluator that a step begins with; None where a link has put
            its own closure in the place of the user's.
    """

    def __init__(self, inner: Evaluator, matrices: MemberMatrices, leaves: list[Tensor] | None = None) -> None:
        super().__init__(inner, inner.fixed)
        self.matrices = matrices
        self.leaves = leaves

    def value(self) -> Any:
        """The loss, gradients not asked for."""
        self.matrices.push()
        with hold_gradients(self.matrices.leaves):
            return self.inner.value()

    def gradient(self, params: Sequence[Tensor], scalar: Callable[[Any], Tensor]) -> Any:
        """The loss; gradients are left in `.grad`, of leaves and of blocks."""
        matrices = self.matrices
        matrices.push()
        first, self.leaves = self.leaves, None
        loss = self.inner.gradient([*(first or matrices.leaves), *params], scalar)
        # Only at the start of a step: at trial points a parameter without a gradient is one with the gradient zero.
        if first is not None and matrices.has_other_presence(first):
            raise OtherPresenceError(matrices, loss)
        matrices.gather()
        return loss


class ShardEvaluator(FormEvaluator):
    """A closure whose gradients arrive at parameters in pieces, and are wanted as those of the local tensors.

    Args:
        inner: The closure's evaluator.
        shards: The pieces.
        params: The parameters that are trained.
    """

    def __init__(self, inner: Evaluator, shards: ShardedParams, params: list[Any]) -> None:
        super().__init__(inner)
        self.shards = shards
        self.leaves = params

    def value(self) -> Any:
        """The loss, gradients not asked for."""
        with hold_gradients(self.leaves):
            if self.shards.keeps_whole:
                loss = self.inner.value()
                show_pieces(self.shards.modules)
                return loss
            # Only a backward pass is known to let go of whole parameters.
            return self.inner.gradient(
                self.leaves, lambda loss: loss if isinstance(loss, Tensor) else torch.as_tensor(loss.data)
            )

    def gradient(self, params: Sequence[Tensor], scalar: Callable[[Any], Tensor]) -> Any:
        """The loss; gradients are left in `.grad`, of parameters and of local tensors."""
        loss = self.inner.gradient(self.leaves, scalar)
        self.shards.take_gradients(self.leaves, self.shards._active[1])
        return loss


class WholeEvaluator(FormEvaluator):
    """A closure for links that move whole parameters: the pieces are moved first, and gradients are gathered.

    Args:
        inner: The evaluator for local tensors.
        shards: The pieces.
        locals_: The local tensors whose whole tensors are moved.
    """

    def __init__(self, inner: Evaluator, shards: ShardedParams, locals_: list[Tensor]) -> None:
        super().__init__(inner)
        self.shards = shards
        self.locals = locals_

    def _push(self) -> list[int]:
        """Move the pieces to where the whole tensors are; the positions of those."""
        shards = self.shards
        places = [shards.places[id(local)] for local in self.locals]
        shards.push([shards.wholes[i] for i in places])
        return places

    def value(self) -> Any:
        """The loss at the whole parameters as they are."""
        self._push()
        return self.inner.value()

    def gradient(self, params: Sequence[Tensor], scalar: Callable[[Any], Tensor]) -> Any:
        """The loss; gradients are left in `.grad` of the whole parameters."""
        places = self._push()
        loss = self.inner.gradient(self.locals, scalar)
        found = {i: local.grad for i, local in zip(places, self.locals, strict=True) if local.grad is not None}
        grads = self.shards.exchange.to_all(found)
        for i in places:
            self.shards.wholes[i].grad = grads.get(i)
        return loss


class NegatedEvaluator(Evaluator):
    """A closure whose loss is to be made large; gradients are left in `.grad` with the sign that links want."""

    differentiated = False

    def value(self) -> Any:
        """Minus the loss."""
        return -super().value()

    def graph(self) -> Any:
        """Minus the loss, with its graph."""
        self.differentiated = True
        with torch.enable_grad():
            return -super().graph()

    def gradient(self, params: Sequence[Tensor], scalar: Callable[[Any], Tensor]) -> Any:
        """Minus the loss, and its gradient."""
        self.differentiated = True
        loss = super().gradient(params, scalar)
        _negate_gradients(params)
        return None if loss is None else -loss


def ascend(optimizer: Optimizer, *given: Any, **kwargs: Any) -> Tensor | None:
    """A step of descent on the negated loss; the loss and the gradients that users see are theirs."""
    try:
        found = optimizer._hooked_step(*given, **kwargs)
    finally:
        evaluator, optimizer._ascent = optimizer._ascent, None
        if evaluator is not None and evaluator.differentiated:
            _negate_gradients(param for group in optimizer.param_groups for param in group["params"])
    return None if found is None else -found


def _negate_gradients(params: Iterable[Tensor]) -> None:
    for param in params:
        if param.grad is not None:
            param.grad = -param.grad
