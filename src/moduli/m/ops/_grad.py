"""The gradient as the update."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from ...optim import TensorTransform


class Grad(TensorTransform):
    r"""Replaces the update by the gradient, $u \leftarrow g$: what the links before it made is forgotten.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Grad(), [torch.tensor([3.0, 0.0])], grads=[torch.tensor([1.0, 2.0])])
        [tensor([1., 2.])]
    """

    elementwise = True

    def __init__(self) -> None:
        super().__init__(uses_grad=True)

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        return cast(Tensor, grad).clone()
