"""Adam: first and second moments with bias correction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable
from .._transforms import BufferTransform


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

    elementwise = True
    counts = True
    static = ("amsgrad", "debias")
    aliases = {"betas": ("beta1", "beta2")}
    tfms = {"exp_avg_tfm": ("exp_avg",), "exp_avg_sq_tfm": ("max_exp_avg_sq", "exp_avg_sq")}
    buffers = {"exp_avg": "grad"}

    def __init__(
        self,
        *,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        eps: Any = 1e-8,
        alpha: Any = 1.0,
        amsgrad: bool = False,
        debias: bool = True,
        exp_avg_tfm: Chainable | None = None,
        exp_avg_sq_tfm: Chainable | None = None,
    ) -> None:
        super().__init__(locals())
        self.add_projected_keys("grad_sq", "exp_avg_sq", "max_exp_avg_sq")

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        # The square of 1e-4 is zero in float16, and dividing by it would throw the parameter out of the window.
        squares = torch.float32 if tensor.dtype is torch.float16 else tensor.dtype
        state["exp_avg_sq"] = torch.zeros_like(tensor, dtype=squares)
        if setting["amsgrad"]:
            state["max_exp_avg_sq"] = torch.zeros_like(tensor, dtype=squares)

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
    """Factors of a mean, beside its size, and of the root of a mean square, that started at zero t steps ago."""
    if not setting["debias"]:
        return size, 1.0
    return size / (1 - setting["beta1"] ** t), (1 - setting["beta2"] ** t) ** -0.5
