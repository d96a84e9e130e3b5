"""AdaBelief: steps scaled by how far updates are from what was expected."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import TensorTransform
from .._checks import fraction, non_negative


class AdaBelief(TensorTransform):
    r"""Adam with the variance of the update around its running mean in place of the second moment.

    $m_t = \beta_1 m_{t-1} + (1-\beta_1) u_t,\quad s_t = \beta_2 s_{t-1} + (1-\beta_2)(u_t - m_t)^2 + \epsilon,\quad
    u \leftarrow \frac{m_t/(1-\beta_1^t)}{\sqrt{s_t/(1-\beta_2^t)} + \epsilon}$

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the variance.
        eps: Added to the variance and to the denominator.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> opt = mo.Optimizer([w], m.AdaBelief(), m.LR(0.01))
        >>> for _ in range(300):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> abs(w.item()) < 0.1
        True

    References:
        J. Zhuang et al., "AdaBelief optimizer: adapting stepsizes by the belief in observed gradients", NeurIPS 2020,
        Algorithm 2.
    """

    elementwise = True
    counts = True
    aliases = {"betas": ("beta1", "beta2")}

    def __init__(self, *, beta1: Any = 0.9, beta2: Any = 0.999, eps: Any = 1e-16) -> None:
        fraction("AdaBelief", beta1=beta1, beta2=beta2)
        non_negative("AdaBelief", eps=eps)
        super().__init__({"beta1": beta1, "beta2": beta2, "eps": eps})
        self.add_projected_keys("grad", "exp_avg")
        self.add_projected_keys("grad_sq", "exp_avg_var")

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["exp_avg"] = torch.zeros_like(tensor)
        state["exp_avg_var"] = torch.zeros_like(tensor)

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        beta2 = setting["beta2"]
        state["exp_avg"].lerp_(tensor, 1 - setting["beta1"])
        away = tensor - state["exp_avg"]
        state["exp_avg_var"].mul_(beta2).addcmul_(away, away * (1 - beta2)).add_(setting["eps"])

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        t = state["step"]
        grow = (1 - setting["beta2"] ** t) ** -0.5
        size = 1 / (1 - setting["beta1"] ** t)
        out: Tensor = state["exp_avg"] * size / (state["exp_avg_var"].sqrt() * grow + setting["eps"])
        return out
