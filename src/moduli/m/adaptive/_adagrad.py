"""Steps relative to the squares of updates.

* Adagrad: steps relative to all updates so far.
* Adagrad with one number in place of one per element.
* Adadelta: steps in the units of the parameters.
* RMSprop: steps relative to the recent size of the update.
* AEGD: gradient descent with an energy for each weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..._search_ranges import UNIT_STEPS, SearchRange
from ...optim import BufferTransform, Chainable, ListTransform, Setting, SettingsList, States, Tensors
from ...optim import ranges as check
from .._measures import divide, dot


class Adagrad(BufferTransform):
    r"""Divides the update by the root of the sum of its squares so far.

    $G_t = G_{t-1} + u_t^2,\quad u \leftarrow \frac{\alpha}{1 + (t-1)\,\delta}\,\frac{u_t}{\sqrt{G_t} + \epsilon}$

    Args:
        lr_decay: The decay $\delta$ of the step.
        initial_accumulator_value: The sum at the start.
        eps: Added to the denominator.
        alpha: A factor; a step size is better given by a link of its own, `LR`.
        inner: Links that transform the update before it is divided, after its square was added.
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
    ranges = {check.non_negative: ("lr_decay", "initial_accumulator_value", "eps")}

    projects = {"grad_sq": ("accumulator",)}

    lr_decay: Setting = 0.0
    initial_accumulator_value: Setting = 0.0
    eps: Setting = 1e-10
    alpha: Setting = 1.0
    inner: Chainable | None = None
    accumulator_tfm: Chainable | None = None

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["accumulator"] = torch.zeros_like(tensor) + setting["initial_accumulator_value"]

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["accumulator"].addcmul_(tensor, tensor)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        size = setting["alpha"] / (1 + (state["step"] - 1) * setting["lr_decay"])
        return tensor * size / (state["accumulator"].sqrt() + setting["eps"])


class AdagradNorm(ListTransform):
    r"""Divides the update by the root of the sum of its squared norms.

    $b \leftarrow b + \|u\|^2,\quad u \leftarrow u / (\sqrt b + \epsilon)$

    Args:
        lr_decay: Decay of the step.
        initial_accumulator_value: The sum at the start.
        eps: Added to the denominator.
        beta: Memory of a mean in place of the sum; None: a sum.
        beta_debias: Correct for the mean starting at zero.
        layerwise: A sum for each tensor; False: one over all parameters.
        use_sqrt: Divide by the root; False: by the sum itself.
        alpha: A factor.
        inner: Links that transform the update before it is divided, after its norm was added.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> _ = mo.Optimizer([w], m.AdagradNorm(), m.LR(0.5)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([2.7000, 3.6000])

    References:
        R. Ward, X. Wu, L. Bottou, "AdaGrad stepsizes: sharp convergence over nonconvex landscapes", ICML 2019.
    """

    members = "batched"

    shared_settings = ("layerwise",)
    differentiable = True
    counts = True
    ranges = {
        check.non_negative: ("lr_decay", "initial_accumulator_value", "eps"),
        check.allow(check.fraction, None): ("beta",),
    }

    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    beta: float | None = None
    beta_debias: bool = True
    layerwise: bool = True
    use_sqrt: bool = True
    alpha: float = 1.0
    inner: Chainable | None = None

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["accumulator"] = setting["initial_accumulator_value"]

    def learn_all(self, tensors: Tensors, states: States, settings: SettingsList) -> None:
        whole = None if settings[0]["layerwise"] else dot(tensors, tensors)
        for tensor, state, setting in zip(tensors, states, settings, strict=True):
            size = dot([tensor], [tensor]) if whole is None else whole
            beta = setting["beta"]
            if beta is None:
                state["accumulator"] = state["accumulator"] + size
            else:
                state["accumulator"] = beta * state["accumulator"] + (1 - beta) * size

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        b, beta = state["accumulator"], setting["beta"]
        if beta is not None and setting["beta_debias"]:
            b = b / (1 - beta ** state["step"])
        size = setting["alpha"] / (1 + (state["step"] - 1) * setting["lr_decay"])
        below = (b**0.5 if setting["use_sqrt"] else b) + setting["eps"]
        return tensor * divide(size, below, 0.0)


class Adadelta(BufferTransform):
    r"""Scales the update by the ratio of two root mean squares: of the steps so far and of the updates so far.

    $v_t = \rho v_{t-1} + (1-\rho) u_t^2,\quad \Delta_t = \sqrt{\frac{d_{t-1}+\epsilon}{v_t+\epsilon}}\,u_t,\quad
    d_t = \rho d_{t-1} + (1-\rho)\Delta_t^2,\quad u \leftarrow \Delta_t$

    Args:
        rho: Memory of both means; above zero.
        eps: Added to both means.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> _ = mo.Optimizer([w], m.Adadelta(eps=1e-2)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.6877])

    References:
        M. D. Zeiler, "ADADELTA: an adaptive learning rate method", 2012, Algorithm 1.
    """

    search_ranges = {"rho": SearchRange(0.5, 0.999, "one_minus")}

    elementwise = True
    buffers = {"square_avg": "grad_sq", "acc_delta": "grad_sq"}
    ranges = {check.fraction: ("rho",), check.positive: ("rho", "eps")}

    rho: Setting = 0.9
    eps: Setting = 1e-6

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        rho, eps = setting["rho"], setting["eps"]
        state["square_avg"].mul_(rho).addcmul_(tensor, tensor * (1 - rho))
        ratio = _square_ratio(tensor, state["square_avg"] + eps)
        state["acc_delta"] = state["acc_delta"] * rho + (state["acc_delta"] + eps) * ratio * (1 - rho)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        rho, eps = setting["rho"], setting["eps"]
        below = state["square_avg"] + eps
        ratio = _square_ratio(tensor, below)
        # d_t = rho d + (1 - rho)(d + eps) ratio, solved for the d before this step, which then need not be stored.
        before = (state["acc_delta"] - ratio * (eps * (1 - rho))) / (ratio * (1 - rho) + rho)
        return tensor * ((before.clamp(min=0) + eps) / below).sqrt()


def _square_ratio(tensor: Tensor, below: Tensor) -> Tensor:
    """Return tensor^2 / below; 0, not NaN, where the square has overflowed in both."""
    quotient = tensor / below.sqrt()
    return quotient * quotient


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
        inner: Links that transform the update before it is divided, after its square was added.
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

    search_ranges = {"lr": UNIT_STEPS}

    elementwise = True
    counts = True
    tfms = {"exp_avg_sq_tfm": ("max_exp_avg_sq", "exp_avg_sq")}
    ranges = {check.fraction: ("smoothing",), check.non_negative: ("eps",)}

    projects = {
        "grad": ("exp_avg",),
        "grad_sq": (
            "exp_avg_sq",
            "max_exp_avg_sq",
        ),
    }

    smoothing: Setting = 0.99
    eps: Setting = 1e-8
    centered: bool = False
    debias: bool = False
    amsgrad: bool = False
    init: Literal["zeros", "update"] = "zeros"
    inner: Chainable | None = None
    exp_avg_sq_tfm: Chainable | None = None

    def collect(self, given: Mapping[str, Any]) -> None:
        if given["debias"] and given["init"] == "update":
            raise ValueError("RMSprop: a mean that starts at the first update has no bias; give debias or init")
        super().collect(given)

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        at_update = setting["init"] == "update"
        state["exp_avg_sq"] = tensor.square() if at_update else torch.zeros_like(tensor)
        if setting["centered"]:
            # If the mean started from the update too, the first variance would be rounding only.
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
    ranges = {check.step_size: ("lr",)}

    uses_loss = True

    lr: Setting = 0.1
    c: Setting = 1.0

    def _root(self, tensor: Tensor, loss: Tensor | None, setting: Any) -> Tensor:
        """Return the root of the shifted loss; one for each member of a population."""
        value = cast(Tensor, loss)
        total = (value.reshape(-1, *([1] * (tensor.dim() - 1))) if value.dim() else value) + setting["c"]
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
