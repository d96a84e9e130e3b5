"""Lion: the sign of a momentum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._checks import fraction, positive
from .._transforms import BufferTransform


class Lion(BufferTransform):
    r"""The sign of the update mixed with a slower running mean of it.

    $c_t = \beta_1 m_{t-1} + (1-\beta_1) u_t,\quad m_t = \beta_2 m_{t-1} + (1-\beta_2) u_t,\quad
    u \leftarrow \operatorname{sign}(c_t)$

    Args:
        beta1: How much of the mean enters the step.
        beta2: Memory of the mean; above zero.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -8.0]))
        >>> _ = mo.Optimizer([w], m.Lion(), m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([ 0.7500, -7.7500])

    References:
        X. Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023.
    """

    elementwise = True
    aliases = {"betas": ("beta1", "beta2")}
    buffers = {"exp_avg": "grad"}
    ranges = {fraction: ("beta1", "beta2"), positive: ("beta2",)}

    def __init__(self, *, beta1: Any = 0.9, beta2: Any = 0.99) -> None:
        super().__init__(locals())

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["exp_avg"].lerp_(tensor, 1 - setting["beta2"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        # The mean has already moved; u - m_t = beta2 (u - m_{t-1}), so the old one need not be kept.
        back = setting["beta1"] / setting["beta2"]
        mixed: Tensor = tensor - (tensor - state["exp_avg"]) * back
        return mixed.sign()
