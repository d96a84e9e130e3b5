"""Adan: Nesterov momentum from differences of updates."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...optim import Chainable
from .._checks import fraction, non_negative
from .._transforms import BufferTransform


class Adan(BufferTransform):
    r"""Adaptive Nesterov momentum, with the look-ahead gradient written through differences of gradients.

    With $d_t = u_t - u_{t-1}$ (zero at first),
    $m_t = \beta_1 m_{t-1} + (1-\beta_1) u_t,\quad v_t = \beta_2 v_{t-1} + (1-\beta_2) d_t,\quad
    n_t = \beta_3 n_{t-1} + (1-\beta_3)(u_t + \beta_2 d_t)^2$, and, all with bias correction,
    $u \leftarrow \frac{m_t + \beta_2 v_t}{\sqrt{n_t} + \epsilon}$.

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the mean difference.
        beta3: Memory of the mean square.
        eps: Added to the denominator.
        m_tfm: Links that transform a copy of the mean before it is used.
        v_tfm: The same for the mean difference.
        n_tfm: The same for the mean square.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -8.0]))
        >>> _ = mo.Optimizer([w], m.Adan(), m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([ 0.7500, -7.7500])

    References:
        X. Xie, P. Zhou, H. Li, Z. Lin, S. Yan, "Adan: adaptive Nesterov momentum algorithm for faster optimizing deep
        models", 2022. The paper writes 1 - beta for these betas.
    """

    elementwise = True
    counts = True
    aliases = {"betas": ("beta1", "beta2", "beta3")}
    tfms = {"m_tfm": ("exp_avg",), "v_tfm": ("exp_avg_diff",), "n_tfm": ("exp_avg_sq",)}
    buffers = {"exp_avg": "grad", "exp_avg_diff": "grad", "exp_avg_sq": "grad_sq"}
    ranges = {fraction: ("beta1", "beta2", "beta3"), non_negative: ("eps",)}

    def __init__(
        self,
        *,
        beta1: Any = 0.98,
        beta2: Any = 0.92,
        beta3: Any = 0.99,
        eps: Any = 1e-8,
        m_tfm: Chainable | None = None,
        v_tfm: Chainable | None = None,
        n_tfm: Chainable | None = None,
    ) -> None:
        super().__init__(locals())
        self.add_projected_keys("grad", "previous")

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["previous"] = tensor.clone()

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        beta2, beta3 = setting["beta2"], setting["beta3"]
        difference = tensor - state["previous"]
        ahead = tensor + difference * beta2
        state["exp_avg"].lerp_(tensor, 1 - setting["beta1"])
        state["exp_avg_diff"].lerp_(difference, 1 - beta2)
        state["exp_avg_sq"].mul_(beta3).addcmul_(ahead, ahead * (1 - beta3))
        state["previous"].copy_(tensor)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        t, beta2 = state["step"], setting["beta2"]
        mean = state["exp_avg"] / (1 - setting["beta1"] ** t)
        change = state["exp_avg_diff"] * (beta2 / (1 - beta2**t))
        grow = (1 - setting["beta3"] ** t) ** -0.5
        return (mean + change) / (state["exp_avg_sq"].sqrt() * grow + setting["eps"])
