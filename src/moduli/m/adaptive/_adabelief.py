"""AdaBelief: steps scaled by how far updates are from what was expected."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._checks import fraction, non_negative
from .._transforms import BufferTransform


class AdaBelief(BufferTransform):
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
    buffers = {"exp_avg": "grad", "exp_avg_var": "grad_sq"}
    ranges = {fraction: ("beta1", "beta2"), non_negative: ("eps",)}

    def __init__(self, *, beta1: Any = 0.9, beta2: Any = 0.999, eps: Any = 1e-16) -> None:
        super().__init__(locals())

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        beta2 = setting["beta2"]
        state["exp_avg"].lerp_(tensor, 1 - setting["beta1"])
        away = tensor - state["exp_avg"]
        state["exp_avg_var"].mul_(beta2).addcmul_(away, away * (1 - beta2)).add_(setting["eps"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        t = state["step"]
        grow = (1 - setting["beta2"] ** t) ** -0.5
        size = 1 / (1 - setting["beta1"] ** t)
        return state["exp_avg"] * size / (state["exp_avg_var"].sqrt() * grow + setting["eps"])
