"""Prodigy: Adam that estimates its step size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Across
from .._checks import above_one, allow_none, fraction, non_negative, positive
from .._lists import dot, norm
from .._scalars import divide, larger, smaller
from .._transforms import BufferTransform, Settings, States, Tensors
from ._adam import correct_bias
from ._axes import work


class Prodigy(BufferTransform):
    r"""Adam times an estimate d of the distance to the solution, which only grows.

    With $\beta_3 = \sqrt{\beta_2}$ by default, $m = \beta_1 m + (1-\beta_1)\, d\, u,\quad v = \beta_2 v + (1-\beta_2)\, d^2 u^2$,
    $r = \beta_3 r + (1-\beta_3)\, d^2 \langle u, x_0 - x\rangle,\quad s = \beta_3 s + (1-\beta_3)\, d^2 u$,
    $u \leftarrow d\, (m / (\sqrt v + d\,\epsilon) + \lambda x)$, and then
    $d \leftarrow \max(d,\ r / \|s\|_1)$. No step size is needed: put `LR(1.0)`, with a schedule if any, after it.

    Args:
        beta1: Memory of the mean.
        beta2: Memory of the mean square.
        beta3: Memory of the estimate; None: the root of beta2.
        eps: Added to the denominator.
        d0: The first estimate: small, and below the true distance.
        d_coef: A factor of the estimate.
        growth_rate: How much the estimate may grow in a step.
        debias: Correct for the moments starting at zero (the authors leave it out).
        weight_decay: Decoupled weight decay $\lambda$, times the estimate as the steps are.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([5.0]))
        >>> opt = mo.Optimizer([w], m.Prodigy(), m.LR(1.0))
        >>> for _ in range(200):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> abs(w.item()) < 0.5
        True

    References:
        K. Mishchenko, A. Defazio, "Prodigy: an expeditiously adaptive parameter-free learner", ICML 2024, Algorithm 4.
    """

    members = "batched"
    across = Across.SUMS

    shared_settings = ("d0", "d_coef", "growth_rate", "beta3")
    counts = True
    aliases = {"betas": ("beta1", "beta2")}
    ranges = {
        fraction: ("beta1", "beta2"),
        allow_none(fraction): ("beta3",),
        non_negative: ("eps", "weight_decay"),
        positive: ("d0", "d_coef"),
        above_one: ("growth_rate",),
    }

    def __init__(
        self,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        beta3: float | None = None,
        eps: float = 1e-8,
        d0: float = 1e-6,
        d_coef: float = 1.0,
        growth_rate: float = float("inf"),
        debias: bool = False,
        weight_decay: Any = 0.0,
    ) -> None:
        super().__init__(locals())

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["start"] = param.clone()
        tensor = work(tensor)  # the square of a small estimate is nothing in half precision
        state["exp_avg"] = torch.zeros_like(tensor)
        state["exp_avg_sq"] = torch.zeros_like(tensor.abs())
        state["s"] = torch.zeros_like(tensor)

    def multi_tensor_update(
        self,
        tensors: Tensors,
        params: Tensors,
        grads: Tensors | None,
        loss: Tensor | None,
        states: States,
        settings: Settings,
    ) -> None:
        tensors = [work(tensor) for tensor in tensors]
        memory, setting = self.global_state, settings[0]
        d: Any = memory.get("next_d", setting["d0"])
        memory["d"] = d
        beta3 = setting["beta2"] ** 0.5 if setting["beta3"] is None else setting["beta3"]
        away = [work(state["start"] - param) for state, param in zip(states, params, strict=True)]
        r = beta3 * memory.get("r", 0.0) + (1 - beta3) * d * d * dot(tensors, away)
        for tensor, state, row in zip(tensors, states, settings, strict=True):
            state["exp_avg"].mul_(row["beta1"]).add_(tensor * (d * (1 - row["beta1"])))
            square = tensor.abs().square() if tensor.is_complex() else tensor * tensor
            state["exp_avg_sq"].mul_(row["beta2"]).add_(square * (d * d * (1 - row["beta2"])))
            state["s"].mul_(beta3).add_(tensor * (d * d * (1 - beta3)))
        total = norm([state["s"] for state in states], 1)
        memory["r"] = r
        found = divide(setting["d_coef"] * r, total, 0.0)
        memory["next_d"] = larger(d, smaller(found, d * setting["growth_rate"]))

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        d = self.global_state["d"]
        size, grow = correct_bias(d, state["step"], setting)
        out = state["exp_avg"] * size / (state["exp_avg_sq"].sqrt() * grow + d * setting["eps"])
        out = out + work(param) * (size * setting["weight_decay"])
        return out.to(tensor.dtype)
