"""Parts of a function that runs under `torch.vmap`: its in-place operations, and nested data as a list of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch import pytree


class OutOfPlace(TorchFunctionMode):
    """Replaces in-place operations for which `torch.vmap` would loop over members by out-of-place ones that it vectorises."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out_of_place = _OUT_OF_PLACE.get(func)
        if out_of_place is None:
            return func(*args, **(kwargs or {}))
        # Autograd may save the first argument, which must not be written after that.
        first = args[0].clone() if torch.is_grad_enabled() else args[0]
        return args[0].copy_(out_of_place(first, *args[1:], **(kwargs or {})))


_OUT_OF_PLACE: dict[Any, Any] = {
    Tensor.lerp_: torch.lerp,
    Tensor.addcmul_: torch.addcmul,
    Tensor.addcdiv_: torch.addcdiv,
    Tensor.addmm_: torch.addmm,
    Tensor.baddbmm_: torch.baddbmm,
}


def flatten_tensors(data: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors of nested data, and its structure with all other values."""
    leaves, spec = pytree.tree_flatten(data)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, [spec, [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]]


def unflatten_tensors(tensors: Sequence[Tensor], structure: Any) -> Any:
    """Return the nested data with these tensors and this structure."""
    spec, others = structure
    remaining = iter(tensors)
    return pytree.tree_unflatten([next(remaining) if other is None else other[0] for other in others], spec)
