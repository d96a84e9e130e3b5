"""The precision of saved state: values of a parameter that has another dtype here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import map_tensors
from ._checks import HALVES
from .transform import TensorTransform

if TYPE_CHECKING:
    from .module import Module


def widens_state(link: Module, key: str) -> bool:
    """Return whether a link stores a state of half-precision parameters in single precision."""
    return isinstance(link, TensorTransform) and link.elementwise and key not in link.narrow_states


def cast_value(value: Any, saved: str | None, param: Tensor, pointwise: bool) -> Any:
    """Return a value with numbers in the precision of the saved parameter converted to that here; others (counts, scales) stay.

    Pointwise links keep state of half-precision parameters in single precision.

    Args:
        value: The value, perhaps nested.
        saved: The dtype of the saved parameter, as text; None if it is that here.
        param: The parameter.
        pointwise: Whether the link widens its state.
    """
    before = getattr(torch, saved.removeprefix("torch.")) if saved else param.dtype
    after = torch.float32 if pointwise and param.dtype in HALVES else param.dtype
    kinds = {before.to_real(): after.to_real(), before: after}
    if pointwise and before in HALVES:
        kinds[torch.float32] = after
    return map_tensors(value, lambda tensor: tensor.to(kinds.get(tensor.dtype, tensor.dtype)))
