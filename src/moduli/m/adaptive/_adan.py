"""Adam with other means: differences, slow means, and a scale of the steps before.

* Adan: Nesterov momentum from differences of updates.
* AdEMAMix: Adam with a fast and a slow mean.
* ADOPT: Adam that converges for every memory of the second moment.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ..._search_ranges import UNIT_STEPS
from ...optim import BufferTransform, Chainable, Setting
from ...optim import ranges as check
from .._measures import rise
from ._adam import _Moments


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

    search_ranges = {"lr": UNIT_STEPS}

    elementwise = True
    counts = True
    aliases = {"betas": ("beta1", "beta2", "beta3")}
    tfms = {"m_tfm": ("exp_avg",), "v_tfm": ("exp_avg_diff",), "n_tfm": ("exp_avg_sq",)}
    buffers = {"exp_avg": "grad", "exp_avg_diff": "grad", "exp_avg_sq": "grad_sq"}
    ranges = {check.fraction: ("beta1", "beta2", "beta3"), check.non_negative: ("eps",)}

    projects = {"grad": ("previous",)}

    beta1: Setting = 0.98
    beta2: Setting = 0.92
    beta3: Setting = 0.99
    eps: Setting = 1e-8
    m_tfm: Chainable | None = None
    v_tfm: Chainable | None = None
    n_tfm: Chainable | None = None

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

    search_ranges = {"lr": UNIT_STEPS}

    elementwise = True
    counts = True
    buffers = {"exp_avg": "grad", "exp_avg_slow": "grad", "exp_avg_sq": "grad_sq"}
    static = ("warmup", "beta3", "beta3_start")
    ranges = {
        check.fraction: ("beta1", "beta2", "beta3", "beta3_start"),
        check.positive: ("beta3", "beta3_start"),
        check.non_negative: ("eps",),
        check.allow(check.at_least_one, None): ("warmup",),
    }

    beta1: Setting = 0.9
    beta2: Setting = 0.999
    beta3: float = 0.9999
    alpha: Setting = 5.0
    eps: Setting = 1e-8
    warmup: int | None = None
    beta3_start: float = 0.9

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


class ADOPT(_Moments):
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

    static = ("clip",)
    ranges = {check.positive: ("eps",)}

    beta2: Setting = 0.9999
    eps: Setting = 1e-6
    clip: bool = True

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
