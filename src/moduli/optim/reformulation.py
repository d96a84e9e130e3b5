"""Links that replace the objective by another one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import Guard
from ._needs import Need
from .module import Chainable, Module

if TYPE_CHECKING:
    from .objective import Objective

__all__ = ["Reformulation"]


class Reformulation(Module):
    """A link that replaces the loss by another function (a smoothed one, a perturbed one).

    Override `closure`; `pre_step` runs once at the beginning of each step.

    Args:
        defaults: The settings.
        modules: Links that get the new objective. Without them all following links get it, so that a reformulation
            has to come before any link that evaluates.

    Example:
        >>> import torch, moduli as mo
        >>> class Twice(mo.optim.Reformulation):
        ...     def closure(self, backward, closure, params, objective):
        ...         loss = closure(backward)
        ...         return 2 * loss, [2 * p.grad for p in params] if backward else None
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> _ = mo.Optimizer([w], Twice(), m.LR(0.1)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.6000])
    """

    needs = frozenset({Need.GRADIENT, Need.CLOSURE})

    def __init__(self, defaults: dict[str, Any] | None = None, modules: Chainable | None = None) -> None:
        super().__init__(defaults)
        self.set_child("modules", modules)

    @abstractmethod
    def closure(
        self, backward: bool, closure: Callable[..., Tensor], params: list[Tensor], objective: Objective
    ) -> tuple[Tensor | float, Sequence[Tensor] | None]:
        """Return the new loss, and its gradient if `backward` is true.

        Args:
            backward: Whether the gradient is wanted.
            closure: The original one; `closure(True)` writes the gradient to `.grad`.
            params: The parameters, which may be moved: they are restored.
            objective: The original objective.
        """

    def pre_step(self, objective: Objective) -> None:
        """Prepare a step; called once at its start."""

    def _wrap_closure(self, objective: Objective) -> Callable[..., Tensor]:
        """Return the closure of the new objective, which restores the parameters after each call."""
        original = objective.clone(clone_updates=False)
        params = original.params
        plain: Any = objective.closure

        def evaluate(backward: bool = True) -> Tensor:
            with Guard(deferred=True, grad=False) as guard:
                guard.tensors(params)
                loss, grads = self.closure(backward, plain, params, original)
                guard.restore()
                if backward and grads is not None:
                    for param, grad in zip(params, grads, strict=True):
                        param.grad = grad
                return torch.as_tensor(loss)

        return evaluate

    def apply(self, objective: Objective) -> Objective:
        """Set the new objective, for the inner links or for the following ones, and return it."""
        self.pre_step(objective)
        objective._closure("evaluations at other points")  # raises without a closure
        inner = objective.clone(clone_updates=False)
        inner.closure = self._wrap_closure(objective)
        inner.loss = inner.loss_approx = inner.grads = None
        inner._graph = None
        if "modules" not in self.children:
            return inner
        out = self.children["modules"].step(inner)
        objective.updates = out.get_updates()
        # Loss and gradient of `out` are those of another function.
        out.loss = out.loss_approx = out.grads = out._graph = out.accepted = None
        objective.update_attrs_from_clone_(out)
        return objective
