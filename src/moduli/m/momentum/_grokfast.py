"""GrokFast: slow components of the update amplified."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._checks import fraction
from .._transforms import BufferTransform


class GrokFast(BufferTransform):
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
    ranges = {fraction: ("alpha",)}

    def __init__(self, *, alpha: Any = 0.98, lamb: Any = 2.0) -> None:
        super().__init__(locals())
        self.add_projected_keys("grad", "exp_avg")

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["exp_avg"] = tensor.clone()

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["exp_avg"].lerp_(tensor, 1 - setting["alpha"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor + state["exp_avg"] * setting["lamb"]
