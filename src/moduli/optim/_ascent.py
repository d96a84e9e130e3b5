"""Ascent: every link sees the loss and its gradient with the other sign."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._closure import Evaluator

__all__ = ["NegatedEvaluator"]


class NegatedEvaluator(Evaluator):
    """A closure whose loss is to be made large; gradients are left in `.grad` with the sign that links want."""

    def __init__(self, source: Callable[..., Any]) -> None:
        super().__init__(source)
        self._made: list[Tensor] = []
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
        loss = super().gradient(params, scalar)
        for param in params:
            if param.grad is not None:
                param.grad = -param.grad
                self._made.append(param.grad)
        return None if loss is None else -loss

    def restore(self, params: Iterable[Tensor]) -> None:
        """Leave users the gradients of their loss."""
        made = {id(grad) for grad in self._made}
        for param in params:
            if param.grad is not None and (self._differentiated or id(param.grad) in made):
                param.grad = -param.grad
