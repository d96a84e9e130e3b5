"""GrokFast: slow components of the update amplified."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...optim import TensorTransform
from .._checks import fraction


class GrokFast(TensorTransform):
    r"""Adds a running mean of the update to it, so that slow components count for more.

    $h_t = \alpha h_{t-1} + (1-\alpha) u_t$ from $h_0 = u_1$, and $u \leftarrow u_t + \lambda h_t$. Put it first.

    Args:
        alpha: Memory of the mean.
        lamb: How much of the mean is added, $\lambda$.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.GrokFast(lamb=2.0), [torch.tensor([1.0])])
        [tensor([3.])]

    References:
        J. Lee, B. G. Kang, K. Kim, K. M. Lee, "Grokfast: accelerated grokking by amplifying slow gradients", 2024,
        Algorithm 2 (the EMA filter).
    """

    elementwise = True

    def __init__(self, *, alpha: Any = 0.98, lamb: Any = 2.0) -> None:
        fraction("GrokFast", alpha=alpha)
        super().__init__({"alpha": alpha, "lamb": lamb})
        self.add_projected_keys("grad", "exp_avg")

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["exp_avg"] = tensor.clone()

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["exp_avg"].lerp_(tensor, 1 - setting["alpha"])

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        out: Tensor = tensor + state["exp_avg"] * setting["lamb"]
        return out
