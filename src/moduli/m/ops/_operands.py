"""What all operations share: operands that are numbers, or links run on a copy of the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable, Module, Objective, Schedule, as_real, restore_complex
from ...optim import step as run

Operand = float | int | Tensor | Chainable


class MultiOperation(Module):
    """A link that combines the update with operands: numbers, and links each run on a copy of the update.

    Override `combine`, or `transform` where it needs all tensors. (Base class of the operations; a link of its own only in
    subclasses.)

    Args:
        defaults: Settings.
        **operands: Numbers, links, or None for an operand that is left out.
    """

    needs = frozenset()
    members = True
    differentiable = True

    def __init__(self, defaults: dict[str, Any] | None = None, **operands: Operand | None) -> None:
        super().__init__(
            {
                **(defaults or {}),
                **{k: v for k, v in operands.items() if isinstance(v, float | int | Tensor | Schedule)},
            }
        )
        self.operands = list(operands)
        for key, value in operands.items():
            if value is not None and not isinstance(value, float | int | Tensor | Schedule):
                self.set_child(key, value)

    def combine(self, *update: Any, **operands: Any) -> Tensor:
        """What becomes of one tensor of the update: a function of it and, by name, of what each operand is for it."""
        raise TypeError(f"{type(self).__name__} does not say how to combine an update with its operands")

    def transform(self, objective: Objective, update: list[Tensor], values: dict[str, Any]) -> list[Tensor]:
        """The new update. `values` has a list for each operand that is given: numbers or tensors, one for each parameter."""
        return [self.combine(u, **{key: column[i] for key, column in values.items()}) for i, u in enumerate(update)]

    def _clone(self, objective: Objective) -> Objective:
        copy = objective.clone(clone_updates=True)
        copy.stop = False
        return copy

    def update(self, objective: Objective) -> None:
        """Every operand learns from a copy of the update."""
        for key in self.operands:
            if key in self.children:
                copy = self._clone(objective)
                self.children[key].update(copy)
                objective.update_attrs_from_clone_(copy)

    def _combine(self, objective: Objective, learn: bool) -> Objective:
        values: dict[str, Any] = {}
        for key in self.operands:
            child = self.children.get(key)
            if child is None:
                if key in self.defaults:
                    values[key] = spread_numbers(objective, [self.settings[p][key] for p in objective.params])
                continue
            copy = self._clone(objective)
            copy.get_updates()
            out = run(copy, [child]) if learn else child.apply(copy)
            values[key] = out.get_updates()
            objective.update_attrs_from_clone_(out)
        objective.updates = self.transform(objective, objective.get_updates(), values)
        return objective

    def apply(self, objective: Objective) -> Objective:
        """Combine, learning nothing."""
        return self._combine(objective, learn=False)

    def step(self, objective: Objective) -> Objective:
        """Each operand makes its step on a copy of the update; then they are combined."""
        return self._combine(objective, learn=True)


def spread_numbers(objective: Objective, values: Sequence[Any]) -> list[Any]:
    """One number for each parameter; with one number per member, shaped to multiply stacked tensors."""
    out = []
    for value, param in zip(values, objective.params, strict=True):
        if isinstance(value, torch.Tensor) and value.dim() == 1 and objective.members is not None:
            value = value.reshape(-1, *([1] * (param.dim() - 1)))
        out.append(value)
    return out


def as_tensor(u: Tensor, value: Any) -> Tensor:
    """A number as a tensor like u; a tensor as it is."""
    return value if isinstance(value, Tensor) else torch.full_like(u, value)


def apply_in_pairs(function: Callable[..., Tensor], u: Tensor, *others: Any) -> Tensor:
    """A pointwise function that compares: complex numbers have no order, so it sees them as pairs of reals."""
    if not u.is_complex():
        return function(u, *(as_tensor(u, other) for other in others))
    pairs = as_real(u)
    shown = [as_real(other.to(u.dtype)) if isinstance(other, Tensor) else as_tensor(pairs, other) for other in others]
    return restore_complex(function(pairs, *shown), u)
