"""What particles still ask of this room until they ask `layout`: whether tensors look as they did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Guard", "Sum", "Watch", "guard", "watch"]


class Watch:
    """Remembers type, dtype, device, shape, strides and `requires_grad` of each tensor of a list."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._facts = [_facts(tensor) for tensor in tensors]

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a list of as many tensors looks the same."""
        return [_facts(tensor) for tensor in tensors] == self._facts

    def same_star(self, *tensors: Tensor) -> bool:
        """The same for tensors that are arguments."""
        return self.same(tensors)


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    layout = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    lazy = (tensor.is_neg(), tensor.is_conj(), tensor.is_inference())
    return (type(tensor), tensor.dtype, tensor.device, tensor.shape, layout, tensor.requires_grad, lazy)


watch = Watch


class Guard:
    """Tells whether a model changed since the guard was made."""

    def same(self, own: dict[str, Any], flags: bool = True) -> bool:
        """Whether nothing changed."""
        return False


class Sum:
    """The sum s x + t y of two models."""

    blank: Tensor

    @classmethod
    def of(cls, sizes: Sequence[int], dtype: torch.dtype, x: Guard | None, y: Guard | None) -> Sum | None:
        """The sum, where it can be compiled."""
        return None

    def fits(self, x: Guard | None, y: Guard | None) -> bool:
        """Whether it is the sum of these."""
        return False

    def __call__(self, x: int, y: int, s: float, t: float, out: Tensor) -> None:
        """Compute, after the guards were asked."""
        raise NotImplementedError

    def guarded(self, own_x: Any, own_y: Any, x: int, y: int, s: float, t: float, out: Tensor) -> bool:
        """Ask the guards and compute."""
        return False


def guard(root: nn.Module, modules: Sequence[nn.Module], tensors: list[Tensor]) -> Guard | None:
    """A guard of a model, where there can be one."""
    return None
