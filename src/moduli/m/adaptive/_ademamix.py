"""AdEMAMix: Adam with a fast and a slow mean."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from .._checks import allow_none, check_at_least_one, fraction, non_negative, positive
from .._scalars import rise
from .._transforms import BufferTransform


class AdEMAMix(BufferTransform):
    r"""Adam whose numerator is a fast mean plus $\alpha$ times a very slow one.

    $m_1$ and $v$ as in `Adam`, $m_2 \leftarrow \beta_3 m_2 + (1-\beta_3) u_t$,
    $u \leftarrow \frac{m_1/(1-\beta_1^t) + \alpha\, m_2}{\sqrt{v/(1-\beta_2^t)} + \epsilon}$.
    Both schedulers of the paper run over `warmup` steps T: $\alpha(t) = \min(t/T, 1)\,\alpha$, and $\beta_3(t)$ rises from
    `beta3_start` so that its half-life grows linearly, equation (4).

    Args:
        beta1: Memory of the fast mean.
        beta2: Memory of the mean square.
        beta3: Memory of the slow mean, in the end.
        alpha: How much of the slow mean enters, in the end; 5 to 10.
        eps: Added to the denominator after bias correction.
        warmup: Steps T of both schedulers; None uses `alpha` and `beta3` from the start.
        beta3_start: Memory of the slow mean at the start of its schedule.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -8.0]))
        >>> _ = mo.Optimizer([w], m.AdEMAMix(alpha=0.0), m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([ 0.7500, -7.7500])

    References:
        M. Pagliardini, P. Ablin, D. Grangier, "The AdEMAMix optimizer: better, faster, older", ICLR 2025, Algorithm 1.
    """

    elementwise = True
    counts = True
    buffers = {"exp_avg": "grad", "exp_avg_slow": "grad", "exp_avg_sq": "grad_sq"}
    static = ("warmup", "beta3", "beta3_start")
    ranges = {
        fraction: ("beta1", "beta2", "beta3", "beta3_start"),
        positive: ("beta3", "beta3_start"),
        non_negative: ("eps",),
        allow_none(check_at_least_one): ("warmup",),
    }

    def __init__(
        self,
        *,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        beta3: float = 0.9999,
        alpha: Any = 5.0,
        eps: Any = 1e-8,
        warmup: int | None = None,
        beta3_start: float = 0.9,
    ) -> None:
        super().__init__(locals())

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        beta2, beta3 = setting["beta2"], setting["beta3"]
        if setting["warmup"] is not None:
            # Equation (4): 1/ln(beta) is interpolated linearly between the start and the end.
            done = rise(state["step"], setting["warmup"])
            start, end = 1 / math.log(setting["beta3_start"]), 1 / math.log(beta3)
            beta3 = math.e ** (1 / (start + (end - start) * done))
        state["exp_avg"].lerp_(tensor, 1 - setting["beta1"])
        state["exp_avg_slow"].lerp_(tensor, 1 - beta3)
        state["exp_avg_sq"].mul_(beta2).addcmul_(tensor, tensor * (1 - beta2))

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        t, alpha = state["step"], setting["alpha"]
        if setting["warmup"] is not None:
            alpha = alpha * rise(t, setting["warmup"])
        grow = (1 - setting["beta2"] ** t) ** -0.5
        mixed = state["exp_avg"] * (1 / (1 - setting["beta1"] ** t)) + state["exp_avg_slow"] * alpha
        return mixed / (state["exp_avg_sq"].sqrt() * grow + setting["eps"])
