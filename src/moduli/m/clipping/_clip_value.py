"""A bound on the size of each element."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...optim import TensorTransform
from .._checks import non_negative


class ClipValue(TensorTransform):
    r"""Keeps each element within $[-c, c]$, as `torch.nn.utils.clip_grad_value_` does.

    Args:
        value: The bound c.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.ClipValue(1.0), [torch.tensor([3.0, -0.5, -2.0])])
        [tensor([ 1.0000, -0.5000, -1.0000])]
    """

    elementwise = True

    def __init__(self, value: Any) -> None:
        non_negative("ClipValue", value=value)
        super().__init__({"value": value})

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        return tensor.clamp(-setting["value"], setting["value"])
