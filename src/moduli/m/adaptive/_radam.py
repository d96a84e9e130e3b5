"""RAdam: Adam without a warmup."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._checks import fraction, positive
from .._transforms import BufferTransform


class RAdam(BufferTransform):
    r"""Adam that is momentum until the second moment has seen enough, and rectified from then on.

    With $\rho_\infty = \frac{2}{1-\beta_2} - 1$ and $\rho_t = \rho_\infty - \frac{2 t \beta_2^t}{1-\beta_2^t}$: where
    $\rho_t > 5$ the step of `Adam` times
    $\sqrt{\frac{(\rho_t-4)(\rho_t-2)\rho_\infty}{(\rho_\infty-4)(\rho_\infty-2)\rho_t}}$, otherwise $m_t / (1-\beta_1^t)$.

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        eps: Added to the root of the mean square, before its bias is corrected, as torch does.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> _ = mo.Optimizer([w], m.RAdam(), m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.5000])

    References:
        L. Liu et al., "On the variance of the adaptive learning rate and beyond", ICLR 2020, Algorithm 2.
    """

    elementwise = True
    counts = True
    aliases = {"betas": ("beta1", "beta2")}
    buffers = {"exp_avg": "grad", "exp_avg_sq": "grad_sq"}
    ranges = {fraction: ("beta1", "beta2"), positive: ("eps",)}

    def __init__(self, *, beta1: Any = 0.9, beta2: Any = 0.999, eps: Any = 1e-8) -> None:
        super().__init__(locals())

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        beta2 = setting["beta2"]
        state["exp_avg"].lerp_(tensor, 1 - setting["beta1"])
        state["exp_avg_sq"].mul_(beta2).addcmul_(tensor, tensor * (1 - beta2))

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        t, beta2 = state["step"], setting["beta2"]
        power = beta2**t
        limit = 2 / (1 - beta2) - 1
        length = limit - 2 * t * power / (1 - power)
        known = (length > 5) * 1.0
        # Where the variance is unknown yet the root would be of a negative number: it is that of one, times zero.
        rectified = known * (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length) + (1 - known)
        scaled = known * (rectified * (1 - power)) ** 0.5 / (state["exp_avg_sq"].sqrt() + setting["eps"])
        return state["exp_avg"] * (1 / (1 - setting["beta1"] ** t)) * (scaled + (1 - known))
