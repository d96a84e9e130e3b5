"""Bounds on the elements of the update."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...optim import TensorTransform


class Clip(TensorTransform):
    r"""Keeps each element between two numbers, $u \leftarrow \min(\max(u, a), b)$.

    Args:
        min: The lower bound a, or None.
        max: The upper bound b, or None.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Clip(min=-1.0, max=0.5), [torch.tensor([3.0, 0.0, -2.0])])
        [tensor([ 0.5000,  0.0000, -1.0000])]
    """

    elementwise = True

    def __init__(self, *, min: Any = None, max: Any = None) -> None:
        if min is None and max is None:
            raise ValueError("Clip: give min, max or both")
        if isinstance(min, int | float) and isinstance(max, int | float) and min > max:
            raise ValueError(f"Clip: min is {min!r}, which is above max, {max!r}")
        super().__init__({"min": min, "max": max})

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        if setting["min"] is not None:
            tensor = tensor.clamp(min=setting["min"])
        if setting["max"] is not None:
            tensor = tensor.clamp(max=setting["max"])
        return tensor
