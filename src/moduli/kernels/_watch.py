"""Noticing, without holding on to them, that the tensors of a list are not what they were."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch

__all__ = ["Watch", "watch"]


class Watch(Protocol):
    """Remembers type, dtype, device, shape, strides and `requires_grad` of each tensor of a list."""

    def same(self, tensors: list[torch.Tensor]) -> bool:
        """Whether a list of as many tensors looks the same."""
        ...


class _Native:
    """torch's own check of compiled functions: 0.06 us per tensor for all of it."""

    __slots__ = ("same_star",)

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        # A number in these lists is a size that must be met; None would be one that is free.
        sizes = [list(tensor.shape) for tensor in tensors]
        strides = [list(tensor.stride()) for tensor in tensors]
        guards: Any = torch._C._dynamo.guards.TensorGuards
        self.same_star: Any = guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def same(self, tensors: list[torch.Tensor]) -> bool:
        return bool(self.same_star(*tensors))


class _Plain:
    """The same in Python, for versions of torch where the check is not there or means something else."""

    __slots__ = ("facts",)

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.facts = [_facts(tensor) for tensor in tensors]

    def same(self, tensors: list[torch.Tensor]) -> bool:
        return [_facts(tensor) for tensor in tensors] == self.facts


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.shape,
        tensor.stride() if tensor.layout is torch.strided else tensor.layout,
        tensor.requires_grad,
        tensor.is_neg(),
        tensor.is_conj(),
        tensor.is_inference(),
    )


@lru_cache(maxsize=1)
def _native_works() -> bool:
    """Whether torch's check notices all that a kernel relies on: it is internal to torch and may change."""
    with torch.inference_mode(False), torch.device("cpu"):
        return _notices_everything()


def _notices_everything() -> bool:
    try:
        base = torch.zeros(2, 3)
        check = _Native([base]).same_star
        others = [
            base.t(),
            base.double(),
            torch.zeros(6),
            torch.zeros(3, 3)[:2, :],
            torch.zeros(2, 4)[:, :3],
            torch.nn.Parameter(base),
            torch._neg_view(base),
            torch.zeros(2, 3, requires_grad=True),
            torch.zeros(2, 3, device="meta"),
        ]
        return (
            bool(check(torch.zeros(2, 3)))
            and bool(check(others[3]))
            and not any(check(other) for position, other in enumerate(others) if position != 3)
        )
    except (AttributeError, TypeError, RuntimeError, SystemError):
        return False


def watch(tensors: Sequence[torch.Tensor]) -> Watch:
    """A watch on these tensors. It holds no reference to them."""
    found = list(tensors)
    # torch's check takes the same tensor twice for a difference.
    plain = all(tensor.layout is torch.strided for tensor in found)
    if found and plain and _native_works() and len(set(map(id, found))) == len(found):
        return _Native(found)
    return _Plain(found)
