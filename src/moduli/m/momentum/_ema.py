"""Momentum: running means and sums of the update."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...optim import TensorTransform
from .._checks import choice, fraction


class EMA(TensorTransform):
    r"""Replaces the update by a running mean of it.

    With $u' = (1-d)\,u$, where d is the dampening,
    $m_t = \beta m_{t-1} + (1-\beta) u'_t$ (`lerp=True`) or $m_t = \beta m_{t-1} + u'_t$ (`lerp=False`), and
    $u \leftarrow m_t$, or $m_t / (1-\beta^t)$ with `debias`. With `nesterov` it looks one step ahead:
    $u \leftarrow (1-\beta) u_t + \beta m_t$, respectively $u_t + \beta m_t$.

    `HeavyBall` and `NAG` are this link with other defaults.

    Args:
        momentum: The memory $\beta$.
        dampening: The part of each update that is left out.
        debias: Correct for the mean starting at zero.
        lerp: A mean; False for a sum with decaying weights.
        ema_init: Start from "zeros", or from the first "update" (which then is not dampened, as in torch).
        nesterov: Look one step ahead.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> opt = mo.Optimizer([w], m.EMA(0.5), m.LR(0.25))
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.4375])

    References:
        B. T. Polyak, "Some methods of speeding up the convergence of iteration methods", 1964.
        I. Sutskever, J. Martens, G. Dahl, G. Hinton, "On the importance of initialization and momentum in deep
        learning", ICML 2013.
    """

    elementwise = True
    counts = True

    def __init__(
        self,
        momentum: Any = 0.9,
        *,
        dampening: Any = 0.0,
        debias: bool = False,
        lerp: bool = True,
        ema_init: Literal["zeros", "update"] = "zeros",
        nesterov: bool = False,
    ) -> None:
        name = type(self).__name__
        fraction(name, momentum=momentum, dampening=dampening)
        choice(name, "ema_init", ema_init, ("zeros", "update"))
        if debias and lerp and ema_init == "update":
            raise ValueError(f"{name}: a mean that starts at the first update has no bias; give debias or ema_init")
        super().__init__(
            {
                "momentum": momentum,
                "dampening": dampening,
                "debias": debias,
                "lerp": lerp,
                "ema_init": ema_init,
                "nesterov": nesterov,
            }
        )
        self.add_projected_keys("grad", "exp_avg")

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        # A mean that starts from the update stays there in its first step; a sum starts at zero and takes it as it is.
        at_update = setting["lerp"] and setting["ema_init"] == "update"
        state["exp_avg"] = tensor.clone() if at_update else torch.zeros_like(tensor)

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        beta, kept = setting["momentum"], 1 - setting["dampening"]
        if setting["ema_init"] == "update":
            first = 0.0 ** (state["step"] - 1)
            kept = first + (1 - first) * kept
        if setting["lerp"]:
            state["exp_avg"].lerp_(tensor * kept, 1 - beta)
        else:
            state["exp_avg"].mul_(beta).add_(tensor * kept)

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        beta = setting["momentum"]
        out: Tensor = state["exp_avg"].clone()
        if setting["debias"]:
            out = out / (1 - beta ** state["step"])
        if setting["nesterov"]:
            out = tensor.lerp(out, beta) if setting["lerp"] else tensor + out * beta
        return out
