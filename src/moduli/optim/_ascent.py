"""Ascent: every link sees the loss and its gradient with the other sign."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._closure import Evaluator

if TYPE_CHECKING:
    from .optimizer import Optimizer


def ascend(optimizer: Optimizer, *given: Any, **kwargs: Any) -> Tensor | None:
    """A step of descent on the negated loss; the loss and the gradients that users see are theirs."""
    try:
        found = optimizer._hooked_step(*given, **kwargs)
    finally:
        evaluator, optimizer._ascent = optimizer._ascent, None
        if evaluator is not None:
            evaluator.restore(param for group in optimizer.param_groups for param in group["params"])
    return None if found is None else -found


class NegatedEvaluator(Evaluator):
    """A closure whose loss is to be made large; gradients are left in `.grad` with the sign that links want."""

    def __init__(self, source: Callable[..., Any]) -> None:
        super().__init__(source)
        self._differentiated = False

    def value(self) -> Any:
        """Minus the loss."""
        return -super().value()

    def graph(self) -> Any:
        """Minus the loss, with its graph."""
        self._differentiated = True
        with torch.enable_grad():
            return -super().graph()

    def gradient(self, params: Sequence[Tensor], scalar: Callable[[Any], Tensor]) -> Any:
        """Minus the loss, and its gradient."""
        self._differentiated = True
        loss = super().gradient(params, scalar)
        for param in params:
            if param.grad is not None:
                param.grad = -param.grad
        return None if loss is None else -loss

    def restore(self, params: Iterable[Tensor]) -> None:
        """Leave users the gradients of their loss."""
        for param in params if self._differentiated else ():
            if param.grad is not None:
                param.grad = -param.grad
