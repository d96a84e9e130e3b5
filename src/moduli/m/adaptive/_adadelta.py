"""Adadelta: steps in the units of the parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._checks import fraction, positive
from .._transforms import BufferTransform


class Adadelta(BufferTransform):
    r"""Scales the update by the ratio of two root mean squares: of the steps so far and of the updates so far.

    $v_t = \rho v_{t-1} + (1-\rho) u_t^2,\quad \Delta_t = \sqrt{\frac{d_{t-1}+\epsilon}{v_t+\epsilon}}\,u_t,\quad
    d_t = \rho d_{t-1} + (1-\rho)\Delta_t^2,\quad u \leftarrow \Delta_t$

    Args:
        rho: Memory of both means; above zero.
        eps: Added to both means.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> _ = mo.Optimizer([w], m.Adadelta(eps=1e-2)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.6877])

    References:
        M. D. Zeiler, "ADADELTA: an adaptive learning rate method", 2012, Algorithm 1.
    """

    elementwise = True
    buffers = {"square_avg": "grad_sq", "acc_delta": "grad_sq"}
    ranges = {fraction: ("rho",), positive: ("rho", "eps")}

    def __init__(self, *, rho: Any = 0.9, eps: Any = 1e-6) -> None:
        super().__init__(locals())

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        rho, eps = setting["rho"], setting["eps"]
        state["square_avg"].mul_(rho).addcmul_(tensor, tensor * (1 - rho))
        ratio = tensor * tensor / (state["square_avg"] + eps)
        state["acc_delta"] = state["acc_delta"] * rho + (state["acc_delta"] + eps) * ratio * (1 - rho)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        rho, eps = setting["rho"], setting["eps"]
        below = state["square_avg"] + eps
        ratio = tensor * tensor / below
        # d_t = rho d + (1 - rho)(d + eps) ratio, solved for the d of before this step, which then need not be kept.
        before = (state["acc_delta"] - ratio * (eps * (1 - rho))) / (ratio * (1 - rho) + rho)
        return tensor * ((before.clamp(min=0) + eps) / below).sqrt()
