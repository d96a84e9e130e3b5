"""What approximations of the gradient have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...optim import Chainable, Need, Objective, Reformulation


class GradApproximator(Reformulation):
    """Replaces the gradient by one made from values of the loss; override `approximate`.

    The links that follow (or `modules`) see the loss with that gradient, wherever they evaluate it.

    Args:
        defaults: The settings.
        modules: Links that see it; all that follow by default.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
        >>> _ = mo.Optimizer([w], m.FDM(), m.LR(0.5)).step(mo.closure(lambda: (w**2).sum()))
        >>> abs(w.item()) < 1e-6
        True
    """

    shared_settings = True
    needs = frozenset({Need.CLOSURE})

    def __init__(self, defaults: dict[str, Any] | None = None, modules: Chainable | None = None) -> None:
        super().__init__(defaults, modules)

    @abstractmethod
    def approximate(
        self, value: Callable[[], Tensor], params: list[Tensor], loss: Tensor | None, setting: Any
    ) -> tuple[list[Tensor], Tensor | None]:
        """The gradient, and the loss at the parameters where it was evaluated.

        Args:
            value: The loss at the parameters as they are then; they may be moved, and are put back.
            params: The parameters.
            loss: The loss at the parameters, where it is known.
            setting: The settings in force.
        """

    def closure(
        self, backward: bool, closure: Callable[..., Tensor], params: list[Tensor], objective: Objective
    ) -> tuple[Tensor | float, list[Tensor] | None]:
        """The loss, and its approximate gradient where it is asked for."""

        def value() -> Tensor:
            return closure(False)

        if not backward:
            return value(), None
        setting = self.settings[params[0]]
        grads, loss = self.approximate(value, params, None, setting)
        return (value() if loss is None else loss), grads
