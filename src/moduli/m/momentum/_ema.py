"""Running means of updates.

* Momentum: a running mean of updates, Polyak's sum of them, and Nesterov's.
* GrokFast: slow components of the update amplified.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

import torch
from torch import Tensor

from ...optim import BufferTransform, Setting
from ...optim import ranges as check


class EMA(BufferTransform):
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
    ranges = {check.fraction: ("momentum", "dampening")}

    projects = {"grad": ("exp_avg",)}

    momentum: Setting = field(default=0.9, kw_only=False)
    dampening: Setting = 0.0
    debias: bool = False
    lerp: bool = True
    ema_init: Literal["zeros", "update"] = "zeros"
    nesterov: bool = False

    def collect(self, given: Mapping[str, Any]) -> None:
        if given["debias"] and given["lerp"] and given["ema_init"] == "update":
            raise ValueError(
                f"{type(self).__name__}: a mean that starts at the first update has no bias; give debias or ema_init"
            )
        super().collect(given)

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        # A mean that starts from the update equals it after the first step; a sum starts at zero and adds it unscaled.
        at_update = setting["lerp"] and setting["ema_init"] == "update"
        state["exp_avg"] = tensor.clone() if at_update else torch.zeros_like(tensor)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        beta, weight = setting["momentum"], 1 - setting["dampening"]
        if setting["ema_init"] == "update":
            first = 0.0 ** (state["step"] - 1)
            weight = first + (1 - first) * weight
        if setting["lerp"]:
            state["exp_avg"].lerp_(tensor * weight, 1 - beta)
        else:
            state["exp_avg"].mul_(beta).add_(tensor * weight)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        beta = setting["momentum"]
        out: Tensor = state["exp_avg"].clone()
        if setting["debias"]:
            out = out / (1 - beta ** state["step"])
        if setting["nesterov"]:
            out = tensor.lerp(out, beta) if setting["lerp"] else tensor + out * beta
        return out


class HeavyBall(EMA):
    r"""Adds up updates with decaying weights, $m_t = \beta m_{t-1} + u_t$, as `torch.optim.SGD(momentum=...)` does.

    The link `EMA(lerp=False, ema_init="update")`.

    Args:
        momentum: The memory $\beta$.
        dampening: The part of each update but the first that is left out.
        debias: Divide by $1-\beta^t$.
        lerp: A mean in place of the sum.
        ema_init: Start from "zeros" or from the first "update".

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> opt = mo.Optimizer([w], m.HeavyBall(0.5), m.LR(0.25))
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.])

    References:
        B. T. Polyak, "Some methods of speeding up the convergence of iteration methods", 1964.
    """

    lerp: bool = False
    ema_init: Literal["zeros", "update"] = "update"
    nesterov: bool = field(default=False, init=False)


class NAG(EMA):
    r"""Nesterov's momentum: $m_t = \beta m_{t-1} + (1-d) u_t$ and $u \leftarrow u_t + \beta m_t$.

    The same as `torch.optim.SGD(nesterov=True)`; the link `EMA(lerp=False, nesterov=True)`. With `lerp=True` it is the
    form that Muon uses, $m_t = \beta m_{t-1} + (1-\beta) u_t$ and $u \leftarrow (1-\beta) u_t + \beta m_t$.

    Args:
        momentum: The memory $\beta$.
        dampening: The part of each update that does not enter the memory.
        lerp: A mean in place of the sum.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> _ = mo.Optimizer([w], m.NAG(0.5), m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.2500])

    References:
        Y. Nesterov, "A method for solving the convex programming problem with convergence rate O(1/k^2)", 1983.
        I. Sutskever, J. Martens, G. Dahl, G. Hinton, "On the importance of initialization and momentum in deep
        learning", ICML 2013.
    """

    debias: bool = field(default=False, init=False)
    lerp: bool = False
    ema_init: Literal["zeros", "update"] = field(default="zeros", init=False)
    nesterov: bool = field(default=True, init=False)


class GrokFast(BufferTransform):
    r"""Adds a running mean of the update to it, so that slow components count for more.

    $h_t = \alpha h_{t-1} + (1-\alpha) u_t$ from $h_0 = u_1$, and $u \leftarrow u_t + \lambda h_t$. Put it first.

    Args:
        alpha: Memory of the mean.
        lamb: How much of the mean is added, $\lambda$.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.GrokFast(lamb=2.0), [torch.tensor([1.0])])
        [tensor([3.])]

    References:
        J. Lee, B. G. Kang, K. Kim, K. M. Lee, "Grokfast: accelerated grokking by amplifying slow gradients", 2024,
        Algorithm 2 (the EMA filter).
    """

    elementwise = True
    ranges = {check.fraction: ("alpha",)}

    projects = {"grad": ("exp_avg",)}

    alpha: Setting = 0.98
    lamb: Setting = 2.0

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["exp_avg"] = tensor.clone()

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["exp_avg"].lerp_(tensor, 1 - setting["alpha"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor + state["exp_avg"] * setting["lamb"]
