"""Adagrad: steps relative to all updates so far."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable
from .._checks import non_negative
from .._transforms import BufferTransform


class Adagrad(BufferTransform):
    r"""Divides the update by the root of the sum of its squares so far.

    $G_t = G_{t-1} + u_t^2,\quad u \leftarrow \frac{\alpha}{1 + (t-1)\,\delta}\,\frac{u_t}{\sqrt{G_t} + \epsilon}$

    Args:
        lr_decay: The decay $\delta$ of the step.
        initial_accumulator_value: The sum at the start.
        eps: Added to the denominator.
        alpha: A factor; a step size is better given by a link of its own, `LR`.
        inner: Links that transform the update before it is divided, after its square was learnt.
        accumulator_tfm: Links that transform a copy of the sum before its root is taken.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 8.0]))
        >>> _ = mo.Optimizer([w], m.Adagrad(), m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.7500, 7.7500])

    References:
        J. Duchi, E. Hazan, Y. Singer, "Adaptive subgradient methods for online learning and stochastic optimization",
        JMLR 2011.
    """

    elementwise = True
    counts = True
    tfms = {"accumulator_tfm": ("accumulator",)}
    ranges = {non_negative: ("lr_decay", "initial_accumulator_value", "eps")}

    def __init__(
        self,
        *,
        lr_decay: Any = 0.0,
        initial_accumulator_value: Any = 0.0,
        eps: Any = 1e-10,
        alpha: Any = 1.0,
        inner: Chainable | None = None,
        accumulator_tfm: Chainable | None = None,
    ) -> None:
        super().__init__(locals())
        self.add_projected_keys("grad_sq", "accumulator")

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["accumulator"] = torch.zeros_like(tensor) + setting["initial_accumulator_value"]

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["accumulator"].addcmul_(tensor, tensor)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        size = setting["alpha"] / (1 + (state["step"] - 1) * setting["lr_decay"])
        return tensor * size / (state["accumulator"].sqrt() + setting["eps"])
