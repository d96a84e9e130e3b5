"""Closures of parameters in pieces: gradients arrive at the pieces, and are wanted there or as whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._closure import Evaluator
from ._needs import ClosureError

if TYPE_CHECKING:
    from ._shards import ShardedParams


class ShardEvaluator(Evaluator):
    """A closure whose gradients arrive at parameters in pieces, and are wanted as those of the local tensors.

    Args:
        inner: The closure's evaluator.
        shards: The pieces.
        params: The parameters that are trained.
    """

    def __init__(self, inner: Evaluator, shards: ShardedParams, params: list[Any]) -> None:
        self.inner = inner
        self.shards = shards
        self.leaves = params
        self.source, self.closure, self.fn = inner.source, inner.closure, inner.fn
        self.fixed, self.kind = False, inner.kind

    @property
    def count(self) -> int:  # type: ignore[override]
        """How often it was asked."""
        return self.inner.count

    def value(self) -> Any:
        """The loss, gradients not asked for."""
        held = [param.grad for param in self.leaves]
        for param in self.leaves:
            param.grad = None
        try:
            if self.shards._resharded:
                loss = self.inner.value()
                self.shards.reshard()
                return loss
            # Only a backward pass is known to let go of whole parameters.
            return self.inner.gradient(self.leaves, _as_scalar)
        finally:
            for param, grad in zip(self.leaves, held, strict=True):
                param.grad = grad

    def gradient(self, params: Sequence[Tensor], scalar: Callable[[Any], Tensor]) -> Any:
        """The loss; gradients are left in `.grad`, of parameters and of local tensors."""
        loss = self.inner.gradient(self.leaves, scalar)
        self.shards.take_gradients(self.leaves, self.shards._active[1])
        return loss

    def graph(self) -> Any:
        """Refused: the graph goes through pieces once."""
        raise ClosureError("a loss of parameters in pieces (DTensor) can be differentiated once, by backward")


def _as_scalar(loss: Any) -> Tensor:
    return loss if isinstance(loss, Tensor) else torch.as_tensor(loss.data)


class WholeEvaluator(Evaluator):
    """A closure for links that move whole parameters: the pieces are moved first, and gradients are gathered.

    Args:
        inner: The evaluator for local tensors.
        shards: The pieces.
        locals_: The local tensors whose whole tensors are moved.
    """

    def __init__(self, inner: Evaluator, shards: ShardedParams, locals_: list[Tensor]) -> None:
        self.inner = inner
        self.shards = shards
        self.locals = locals_
        self.source, self.closure, self.fn = inner.source, inner.closure, inner.fn
        self.fixed, self.kind = False, inner.kind

    @property
    def count(self) -> int:  # type: ignore[override]
        """How often it was asked."""
        return self.inner.count

    def _gather_wholes(self) -> dict[int, Tensor]:
        shards = self.shards
        return {i: shards.wholes[i] for i in (shards.places[id(local)] for local in self.locals)}

    def value(self) -> Any:
        """The loss at the whole parameters as they are."""
        self.shards.push(list(self._gather_wholes().values()))
        return self.inner.value()

    def gradient(self, params: Sequence[Tensor], scalar: Callable[[Any], Tensor]) -> Any:
        """The loss; gradients are left in `.grad` of the whole parameters."""
        wholes = self._gather_wholes()
        self.shards.push(list(wholes.values()))
        loss = self.inner.gradient(self.locals, scalar)
        found = {i: local.grad for i, local in zip(wholes, self.locals, strict=True) if local.grad is not None}
        grads = self.shards._exchange().to_all(found)
        for i, whole in wholes.items():
            whole.grad = grads.get(i)
        return loss

    def graph(self) -> Any:
        """Refused: the graph goes through pieces once."""
        return self.inner.graph()
