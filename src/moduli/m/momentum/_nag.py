"""Nesterov's momentum."""

from __future__ import annotations

from typing import Any

from ._ema import EMA


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

    def __init__(self, momentum: Any = 0.9, *, dampening: Any = 0.0, lerp: bool = False) -> None:
        super().__init__(momentum, dampening=dampening, lerp=lerp, nesterov=True)
