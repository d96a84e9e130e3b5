"""Adam and its nearest relatives.

* Adam: first and second moments with bias correction.
* Adamax: Adam with the infinity norm.
* NAdam: Adam with Nesterov's momentum.
* RAdam: Adam without a warmup.
* AdaBelief: steps scaled by the deviation of updates from their running mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._search_ranges import UNIT_STEPS
from ...optim import BufferTransform, Chainable, Setting
from ...optim import ranges as check


class Adam(BufferTransform):
    r"""Divides a running mean of the update by the root of a running mean of its square.

    $m_t = \beta_1 m_{t-1} + (1-\beta_1) u_t,\quad v_t = \beta_2 v_{t-1} + (1-\beta_2) u_t^2,\quad
    u \leftarrow \alpha\,\frac{m_t / (1-\beta_1^t)}{\sqrt{v_t / (1-\beta_2^t)} + \epsilon}$

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        eps: Added to the denominator after bias correction, as torch does.
        alpha: A factor; a step size is better given by a link of its own, `LR`.
        amsgrad: Use the largest second moment so far.
        debias: Correct for the moments starting at zero.
        exp_avg_tfm: Links that transform a copy of the mean before it is used, `Sign()` or `Orthogonalize()` say.
        exp_avg_sq_tfm: Links that transform a copy of the second moment before its root is taken.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
        >>> _ = mo.Optimizer([w], m.Adam(), m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([ 0.7500, -0.7500])

    References:
        D. P. Kingma, J. Ba, "Adam: a method for stochastic optimization", ICLR 2015, Algorithm 1.
        S. J. Reddi, S. Kale, S. Kumar, "On the convergence of Adam and beyond", ICLR 2018 (AMSGrad).
    """

    search_ranges = {"lr": UNIT_STEPS}

    elementwise = True
    counts = True
    static = ("amsgrad", "debias")
    aliases = {"betas": ("beta1", "beta2")}
    tfms = {"exp_avg_tfm": ("exp_avg",), "exp_avg_sq_tfm": ("max_exp_avg_sq", "exp_avg_sq")}
    buffers = {"exp_avg": "grad"}

    projects = {
        "grad_sq": (
            "exp_avg_sq",
            "max_exp_avg_sq",
        )
    }

    beta1: Setting = 0.9
    beta2: Setting = 0.999
    eps: Setting = 1e-8
    alpha: Setting = 1.0
    amsgrad: bool = False
    debias: bool = True
    exp_avg_tfm: Chainable | None = None
    exp_avg_sq_tfm: Chainable | None = None

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["exp_avg_sq"] = torch.zeros_like(tensor)
        if setting["amsgrad"]:
            state["max_exp_avg_sq"] = torch.zeros_like(tensor)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        beta1, beta2 = setting["beta1"], setting["beta2"]
        state["exp_avg"].lerp_(tensor, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(tensor, tensor * (1 - beta2))
        if setting["amsgrad"]:
            state["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], state["exp_avg_sq"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        second = state["max_exp_avg_sq"] if setting["amsgrad"] else state["exp_avg_sq"]
        size, grow = correct_bias(setting["alpha"], state["step"], setting)
        return state["exp_avg"] * size / (second.sqrt() * grow + setting["eps"])


def correct_bias(size: Any, t: Any, setting: Any) -> tuple[Any, Any]:
    """Return the factors of a mean, besides its size, and of the root of a mean square, that started at zero t steps ago.

    Args:
        size: The size of the step.
        t: The number of steps.
        setting: The settings: debias, beta1 and beta2.
    """
    if not setting["debias"]:
        return size, 1.0
    return size / (1 - setting["beta1"] ** t), (1 - setting["beta2"] ** t) ** -0.5


class _Moments(BufferTransform):
    """A pointwise link with running means of updates and of their squares, or the like."""

    search_ranges = {"lr": UNIT_STEPS}

    elementwise = True
    counts = True
    buffers = {"exp_avg": "grad", "exp_avg_sq": "grad_sq"}
    aliases = {"betas": ("beta1", "beta2")}
    ranges = {check.fraction: ("beta1", "beta2"), check.non_negative: ("eps",)}

    beta1: Setting = 0.9
    beta2: Setting = 0.999
    eps: Setting = 1e-8

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        beta2 = setting["beta2"]
        state["exp_avg"].lerp_(tensor, 1 - setting["beta1"])
        state["exp_avg_sq"].mul_(beta2).addcmul_(tensor, tensor * (1 - beta2))


class Adamax(_Moments):
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

    buffers = {"exp_avg": "grad", "exp_inf": None}

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["exp_avg"].lerp_(tensor, 1 - setting["beta1"])
        state["exp_inf"] = torch.maximum(state["exp_inf"] * setting["beta2"], tensor.abs() + setting["eps"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        size = 1 / (1 - setting["beta1"] ** state["step"])
        # If all updates were zero, zero over zero is zero.
        below = torch.where(state["exp_inf"] > 0, state["exp_inf"], 1.0)
        return state["exp_avg"] * size / below


class NAdam(_Moments):
    r"""Adam whose mean looks one step ahead, with a momentum that rises to $\beta_1$.

    $\mu_t = \beta_1\left(1 - \tfrac12 0.96^{t\psi}\right)$; $m_t$ and $v_t$ as in `Adam`, and
    $u \leftarrow \left(\frac{(1-\mu_t)\,u_t}{1-\prod_{i\le t}\mu_i} + \frac{\mu_{t+1}\,m_t}{1-\prod_{i\le t+1}\mu_i}\right)
    \Big/ \left(\sqrt{v_t/(1-\beta_2^t)} + \epsilon\right)$

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        eps: Added to the denominator after bias correction.
        momentum_decay: How fast the momentum rises, $\psi$.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> opt = mo.Optimizer([w], m.NAdam(), m.LR(0.01))
        >>> for _ in range(300):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> abs(w.item()) < 0.1
        True

    References:
        T. Dozat, "Incorporating Nesterov momentum into Adam", ICLR workshop 2016.
    """

    numbers = ("mu_product",)
    ranges = {check.non_negative: ("momentum_decay",)}

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    momentum_decay: float = 4e-3

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["mu_product"] = 1.0

    def advance(self, state: Any, setting: Any) -> None:
        state["mu_product"] = state["mu_product"] * _momentum(state["step"], setting)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        t, product = state["step"], state["mu_product"]
        here, ahead = _momentum(t, setting), _momentum(t + 1, setting)
        mixed = tensor * ((1 - here) / (1 - product)) + state["exp_avg"] * (ahead / (1 - product * ahead))
        grow = (1 - setting["beta2"] ** t) ** -0.5
        return mixed / (state["exp_avg_sq"].sqrt() * grow + setting["eps"])


def _momentum(t: Any, setting: Any) -> Any:
    return setting["beta1"] * (1 - 0.5 * 0.96 ** (t * setting["momentum_decay"]))


class RAdam(_Moments):
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

    ranges = {check.positive: ("eps",)}

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        t, beta2 = state["step"], setting["beta2"]
        power = beta2**t
        limit = 2 / (1 - beta2) - 1
        length = limit - 2 * t * power / (1 - power)
        is_known = (length > 5) * 1.0
        # Before the variance is known the root would be of a negative number: it is that of one, times zero.
        rectified = is_known * (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length) + (
            1 - is_known
        )
        scaled = is_known * (rectified * (1 - power)) ** 0.5 / (state["exp_avg_sq"].sqrt() + setting["eps"])
        return state["exp_avg"] * (1 / (1 - setting["beta1"] ** t)) * (scaled + (1 - is_known))


class AdaBelief(_Moments):
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

    buffers = {"exp_avg": "grad", "exp_avg_var": "grad_sq"}

    eps: Setting = 1e-16

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
