"""RMSprop: steps relative to the recent size of the update."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...optim import Chainable
from .._checks import choice, fraction, non_negative
from .._transforms import BufferTransform


class RMSprop(BufferTransform):
    r"""Divides the update by the root of a running mean of its square.

    $v_t = \rho v_{t-1} + (1-\rho) u_t^2,\quad u \leftarrow \frac{u_t}{\sqrt{v_t} + \epsilon}$; `centered` subtracts the
    square of a running mean from $v_t$, so that it is a variance.

    Args:
        smoothing: The memory $\rho$.
        eps: Added to the denominator.
        centered: Divide by a standard deviation.
        debias: Correct for the means starting at zero.
        amsgrad: Use the largest second moment so far.
        init: Start from "zeros", or from the first "update".
        inner: Links that transform the update before it is divided, after its square was learnt.
        exp_avg_sq_tfm: Links that transform a copy of the second moment before its root is taken.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 8.0]))
        >>> _ = mo.Optimizer([w], m.RMSprop(debias=True), m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.7500, 7.7500])

    References:
        T. Tieleman, G. Hinton, "Lecture 6.5: RMSprop", Neural Networks for Machine Learning, 2012.
        A. Graves, "Generating sequences with recurrent neural networks", 2013 (centered).
    """

    elementwise = True
    counts = True
    tfms = {"exp_avg_sq_tfm": ("max_exp_avg_sq", "exp_avg_sq")}
    ranges = {fraction: ("smoothing",), non_negative: ("eps",)}

    def __init__(
        self,
        *,
        smoothing: Any = 0.99,
        eps: Any = 1e-8,
        centered: bool = False,
        debias: bool = False,
        amsgrad: bool = False,
        init: Literal["zeros", "update"] = "zeros",
        inner: Chainable | None = None,
        exp_avg_sq_tfm: Chainable | None = None,
    ) -> None:
        choice("RMSprop", "init", init, ("zeros", "update"))
        if debias and init == "update":
            raise ValueError("RMSprop: a mean that starts at the first update has no bias; give debias or init")
        super().__init__(locals())
        self.add_projected_keys("grad", "exp_avg")
        self.add_projected_keys("grad_sq", "exp_avg_sq", "max_exp_avg_sq")

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        at_update = setting["init"] == "update"
        state["exp_avg_sq"] = tensor.square() if at_update else torch.zeros_like(tensor)
        if setting["centered"]:
            # From the update too, the first variance would be nothing but rounding.
            state["exp_avg"] = torch.zeros_like(tensor)
        if setting["amsgrad"]:
            state["max_exp_avg_sq"] = torch.zeros_like(tensor)

    def _variance(self, state: Any, setting: Any) -> Tensor:
        second: Tensor = state["exp_avg_sq"]
        if setting["centered"]:
            correction = 1.0
            if setting["debias"]:
                correction = 1 / (1 - setting["smoothing"] ** state["step"])
            second = second - state["exp_avg"] * state["exp_avg"] * correction
        return second

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        rho = setting["smoothing"]
        state["exp_avg_sq"].mul_(rho).addcmul_(tensor, tensor * (1 - rho))
        if setting["centered"]:
            state["exp_avg"].lerp_(tensor, 1 - rho)
        if setting["amsgrad"]:
            state["max_exp_avg_sq"].copy_(torch.maximum(state["max_exp_avg_sq"], self._variance(state, setting)))

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        second = state["max_exp_avg_sq"] if setting["amsgrad"] else self._variance(state, setting)
        grow = 1.0
        if setting["debias"]:
            grow = (1 - setting["smoothing"] ** state["step"]) ** -0.5
        # Rounding can leave a variance a little below zero.
        return tensor / (second.clamp(min=0).sqrt() * grow + setting["eps"])
