"""Polyak's momentum."""

from __future__ import annotations

from typing import Any, Literal

from ._ema import EMA


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

    def __init__(
        self,
        momentum: Any = 0.9,
        *,
        dampening: Any = 0.0,
        debias: bool = False,
        lerp: bool = False,
        ema_init: Literal["zeros", "update"] = "update",
    ) -> None:
        super().__init__(momentum, dampening=dampening, debias=debias, lerp=lerp, ema_init=ema_init)
