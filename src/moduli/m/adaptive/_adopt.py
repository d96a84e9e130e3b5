"""ADOPT: Adam that converges for every memory of the second moment."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._checks import fraction, positive
from .._transforms import BufferTransform


class ADOPT(BufferTransform):
    r"""Divides the update by the second moment of the steps *before* it, then takes the running mean.

    $c_t = (t-1)^{1/4},\quad m_t = \beta_1 m_{t-1} + (1-\beta_1)\,\operatorname{clip}\!\left(
    \frac{u_t}{\max(\sqrt{v_{t-1}},\,\epsilon)},\ \pm c_t\right),\quad u \leftarrow m_t,\quad
    v_t = \beta_2 v_{t-1} + (1-\beta_2) u_t^2$, and $v_1 = u_1^2$. The first step only measures: it moves nothing.

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        eps: The smallest denominator.
        clip: Clip the scaled update by $c_t$, as the authors' second version does.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -8.0]))
        >>> opt = mo.Optimizer([w], m.ADOPT(beta1=0.0), m.LR(0.25))
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: w.abs().sum()))
        >>> w.data
        tensor([ 0.7500, -7.7500])

    References:
        S. Taniguchi et al., "ADOPT: modified Adam can converge with any beta2 with the optimal rate", NeurIPS 2024,
        Algorithm 2.
    """

    elementwise = True
    counts = True
    static = ("clip",)
    aliases = {"betas": ("beta1", "beta2")}
    buffers = {"exp_avg": "grad", "exp_avg_sq": "grad_sq"}
    ranges = {fraction: ("beta1", "beta2"), positive: ("eps",)}

    def __init__(self, *, beta1: Any = 0.9, beta2: Any = 0.9999, eps: Any = 1e-6, clip: bool = True) -> None:
        super().__init__(locals())

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        before, beta2 = state["step"] - 1, setting["beta2"]
        first = 0.0**before
        scaled = tensor / state["exp_avg_sq"].sqrt().clamp(min=setting["eps"])
        if setting["clip"]:
            bound = before**0.25  # zero at the first step
            scaled = scaled.clamp(-bound, bound)
        state["exp_avg"].lerp_(scaled * (1 - first), 1 - setting["beta1"])
        state["exp_avg_sq"].mul_(beta2).addcmul_(tensor, tensor * (first + (1 - first) * (1 - beta2)))

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return state["exp_avg"].clone()
