"""NAdam: Adam with Nesterov's momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Across
from .._checks import fraction, non_negative
from .._transforms import BufferTransform
from ._axes import work


class NAdam(BufferTransform):
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

    members = "batched"
    across = Across.NOTHING
    differentiable = True

    counts = True
    aliases = {"betas": ("beta1", "beta2")}
    ranges = {fraction: ("beta1", "beta2"), non_negative: ("eps", "momentum_decay")}

    def __init__(
        self, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, momentum_decay: float = 4e-3
    ) -> None:
        super().__init__(locals())
        self.add_projected_keys("grad", "exp_avg")
        self.add_projected_keys("grad_sq", "exp_avg_sq")

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        tensor = work(tensor)
        state["exp_avg"] = torch.zeros_like(tensor)
        state["exp_avg_sq"] = torch.zeros_like(tensor.abs())
        state["mu_product"] = 1.0

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        tensor, beta2 = work(tensor), setting["beta2"]
        state["mu_product"] = state["mu_product"] * _momentum(state["step"], setting)
        state["exp_avg"].lerp_(tensor, 1 - setting["beta1"])
        state["exp_avg_sq"].mul_(beta2).add_(tensor.abs().square() * (1 - beta2))

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        t, product = state["step"], state["mu_product"]
        here, ahead = _momentum(t, setting), _momentum(t + 1, setting)
        mixed = work(tensor) * ((1 - here) / (1 - product)) + state["exp_avg"] * (ahead / (1 - product * ahead))
        grow = (1 - setting["beta2"] ** t) ** -0.5
        out: Tensor = mixed / (state["exp_avg_sq"].sqrt() * grow + setting["eps"])
        return out.to(tensor.dtype)


def _momentum(t: Any, setting: Any) -> Any:
    return setting["beta1"] * (1 - 0.5 * 0.96 ** (t * setting["momentum_decay"]))
