"""The sign of the update."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...optim import TensorTransform


class Sign(TensorTransform):
    r"""Replaces each element by its sign, $u \leftarrow \operatorname{sign}(u)$; real and imaginary parts by themselves.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Sign(), [torch.tensor([3.0, 0.0, -0.1])])
        [tensor([ 1.,  0., -1.])]

    References:
        J. Bernstein, Y.-X. Wang, K. Azizzadenesheli, A. Anandkumar, "signSGD: compressed optimisation for non-convex
        problems", ICML 2018.
    """

    elementwise = True

    def __init__(self) -> None:
        super().__init__()

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        return tensor.sign()
