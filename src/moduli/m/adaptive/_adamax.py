"""Adamax: Adam with the infinity norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import fraction, non_negative
from .._transforms import BufferTransform


class Adamax(BufferTransform):
    r"""Divides a running mean of the update by its decaying largest magnitude.

    $m_t = \beta_1 m_{t-1} + (1-\beta_1) u_t,\quad n_t = \max(\beta_2 n_{t-1},\ |u_t| + \epsilon),\quad
    u \leftarrow \frac{m_t}{(1-\beta_1^t)\,n_t}$

    Args:
        beta1: Memory of the mean.
        beta2: Decay of the largest magnitude.
        eps: Added to the magnitude, as torch does.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -8.0]))
        >>> _ = mo.Optimizer([w], m.Adamax(), m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([ 0.7500, -7.7500])

    References:
        D. P. Kingma, J. Ba, "Adam: a method for stochastic optimization", ICLR 2015, Algorithm 2.
    """

    elementwise = True
    counts = True
    aliases = {"betas": ("beta1", "beta2")}
    buffers = {"exp_avg": "grad", "exp_inf": None}
    ranges = {fraction: ("beta1", "beta2"), non_negative: ("eps",)}

    def __init__(self, *, beta1: Any = 0.9, beta2: Any = 0.999, eps: Any = 1e-8) -> None:
        super().__init__(locals())

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["exp_avg"].lerp_(tensor, 1 - setting["beta1"])
        state["exp_inf"] = torch.maximum(state["exp_inf"] * setting["beta2"], tensor.abs() + setting["eps"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        size = 1 / (1 - setting["beta1"] ** state["step"])
        # Where nothing but zeros was ever seen there is nothing to divide: zero over zero is zero.
        below = torch.where(state["exp_inf"] > 0, state["exp_inf"], 1.0)
        return state["exp_avg"] * size / below
