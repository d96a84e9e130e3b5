"""AEGD: gradient descent with an energy for each weight."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .._checks import positive
from .._transforms import BufferTransform


class AEGD(BufferTransform):
    r"""Descends the root of the loss with an energy for each weight that can only fall.

    $v_t = \frac{u_t}{2\sqrt{f_t + c}},\quad r_t = \frac{r_{t-1}}{1 + 2\eta v_t^2},\quad u \leftarrow 2 \eta\, r_t v_t$, from
    $r_0 = \sqrt{f_0 + c}$. It is stable for any step size; do not add `LR`.

    Args:
        lr: The step size $\eta$.
        c: Added to the loss, so that the sum is positive.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> _ = mo.Optimizer([w], m.AEGD(lr=0.5)).step(mo.closure(lambda: 3 * w.sum()))
        >>> w.data
        tensor([0.0400])

    References:
        H. Liu, X. Tian, "AEGD: adaptive gradient descent with energy", arXiv:2010.05109, Algorithm 1.
    """

    decides_on_host = True

    elementwise = True
    ranges = {positive: ("lr",)}

    def __init__(self, *, lr: Any = 0.1, c: Any = 1.0) -> None:
        super().__init__(locals(), uses_loss=True)

    def _root(self, tensor: Tensor, loss: Tensor | None, setting: Any) -> Tensor:
        """The root of the shifted loss; one for each member of a population."""
        found = cast(Tensor, loss)
        total = (found.reshape(-1, *([1] * (tensor.dim() - 1))) if found.dim() else found) + setting["c"]
        if not bool((total > 0).all()):
            raise ValueError(
                f"AEGD takes the root of the loss plus c, which is {float(total.min())}; give a c above minus the lowest loss"
            )
        return total.to(tensor.dtype).sqrt()

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["energy"] = torch.zeros_like(tensor) + self._root(tensor, loss, setting)

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        v = tensor / (2 * self._root(tensor, loss, setting))
        state["energy"].div_(1 + 2 * setting["lr"] * v * v)

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        v = tensor / (2 * self._root(tensor, loss, setting))
        return 2 * setting["lr"] * state["energy"] * v
