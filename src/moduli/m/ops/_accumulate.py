"""Running sums, extremes and second moments of the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...optim import BufferTransform, Setting, UpdateTransform
from ...optim import ranges as check


class _Accumulate(BufferTransform):
    r"""$a_t = (1-\text{decay})\,a_{t-1} \circ u_t$ for an operation; emits a."""

    elementwise = True
    counts = True
    start = 0.0
    ranges = {check.probability: ("decay",)}

    decay: Setting = 0.0

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["accumulated"] = torch.full_like(tensor, self.start)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["accumulated"] = self.join(state["accumulated"], tensor, 1 - setting["decay"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return state["accumulated"].clone()

    def join(self, old: Tensor, new: Tensor, keep: Any) -> Tensor:
        """Return the accumulated value after a new update.

        Args:
            old: The accumulated value.
            new: The update.
            keep: How much of the value is kept.
        """
        raise TypeError(f"{type(self).__name__} does not say how to accumulate")


class AccumulateSum(_Accumulate):
    r"""The running sum of updates, $a_t = (1-d)\,a_{t-1} + u_t$.

    Args:
        decay: How much of the sum is forgotten at each step, d.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, p = m.AccumulateSum(), torch.zeros(1)
        >>> [optim.step_tensors(link, [torch.ones(1)], [p])[0].item() for _ in range(3)]
        [1.0, 2.0, 3.0]
    """

    def join(self, old: Tensor, new: Tensor, keep: Any) -> Tensor:
        return old * keep + new


class AccumulateMean(_Accumulate):
    r"""The mean of all updates so far (with decay, a weighted mean in which older ones count less).

    Args:
        decay: How much of the sum is forgotten at each step.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, p = m.AccumulateMean(), torch.zeros(1)
        >>> [optim.step_tensors(link, [torch.tensor([x])], [p])[0].item() for x in (1.0, 3.0)]
        [1.0, 2.0]
    """

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["accumulated"] = torch.zeros_like(tensor)
        state["weight"] = torch.zeros_like(tensor)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        keep = 1 - setting["decay"]
        state["accumulated"] = state["accumulated"] * keep + tensor
        state["weight"] = state["weight"] * keep + 1

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return state["accumulated"] / state["weight"]


class AccumulateProduct(_Accumulate):
    r"""The running product of updates, $a_t = (1-d)\,a_{t-1}\,u_t$, from 1.

    Args:
        decay: How much the product shrinks at each step, d.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, p = m.AccumulateProduct(), torch.zeros(1)
        >>> [optim.step_tensors(link, [torch.full((1,), 2.0)], [p])[0].item() for _ in range(3)]
        [2.0, 4.0, 8.0]
    """

    start = 1.0

    def join(self, old: Tensor, new: Tensor, keep: Any) -> Tensor:
        return old * keep * new


def _shrink(old: Tensor, start: float, keep: Any) -> Tensor:
    # Infinity is not multiplied, not even if the result is unused: its derivative would be NaN.
    begun = old != start
    return torch.where(begun, torch.where(begun, old, torch.zeros_like(old)) * keep, old)


class AccumulateMaximum(_Accumulate):
    r"""The running maximum of updates, $a_t = \max((1-d)\,a_{t-1}, u_t)$; the first update begins it.

    Args:
        decay: How much the maximum shrinks at each step, d.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, p = m.AccumulateMaximum(), torch.zeros(1)
        >>> [optim.step_tensors(link, [torch.tensor([x])], [p])[0].item() for x in (-2.0, -1.0, -3.0)]
        [-2.0, -1.0, -1.0]
    """

    start = float("-inf")

    def join(self, old: Tensor, new: Tensor, keep: Any) -> Tensor:
        return torch.maximum(_shrink(old, self.start, keep), new)


class AccumulateMinimum(_Accumulate):
    r"""The running minimum of updates, $a_t = \min((1-d)\,a_{t-1}, u_t)$; the first update begins it.

    Args:
        decay: How much the minimum shrinks at each step, d.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, p = m.AccumulateMinimum(), torch.zeros(1)
        >>> [optim.step_tensors(link, [torch.tensor([x])], [p])[0].item() for x in (2.0, 1.0, 3.0)]
        [2.0, 1.0, 1.0]
    """

    start = float("inf")

    def join(self, old: Tensor, new: Tensor, keep: Any) -> Tensor:
        return torch.minimum(_shrink(old, self.start, keep), new)


class EMASquared(BufferTransform):
    r"""A running mean of powers of the update, $v_t = \beta v_{t-1} + (1-\beta)|u_t|^p$; emits v.

    Args:
        beta: The memory.
        amsgrad: Emit the largest v so far.
        pow: The power p.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.EMASquared(beta=0.5), [torch.tensor([2.0])])
        [tensor([2.])]
    """

    elementwise = True
    counts = True
    static = ("amsgrad", "pow", "debiased")
    ranges = {check.probability: ("beta",)}
    centered = False
    root = False
    buffers = {"exp_avg_sq": "grad_sq"}

    projects = {"grad_sq": ("max_exp_avg_sq",), "grad": ("exp_avg",)}

    beta: Setting = 0.999
    amsgrad: bool = False
    pow: float = 2
    debiased: bool = False

    def check_setting(self, key: str, value: Any) -> None:
        """Raise ValueError for `debiased` with a momentum of one: the mean is divided by 1 - beta^t, which is zero."""
        super().check_setting(key, value)
        if key == "beta" and self.defaults["debiased"]:
            check.fraction(type(self).__name__, key, value)

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect(given)
        self.check_setting("beta", given["beta"])

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        if self.centered:
            state["exp_avg"] = torch.zeros_like(tensor)
        if setting["amsgrad"]:
            state["max_exp_avg_sq"] = torch.zeros_like(tensor)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        beta = setting["beta"]
        # Not lerp_: of a mean that has overflowed it is inf - inf.
        state["exp_avg_sq"].mul_(beta).add_(tensor.abs() ** setting["pow"] * (1 - beta))
        if self.centered:
            state["exp_avg"].lerp_(tensor, 1 - beta)
        if setting["amsgrad"]:
            state["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], self._moment(state, setting))

    def _moment(self, state: Any, setting: Any) -> Tensor:
        moment: Tensor = state["exp_avg_sq"]
        if self.centered:
            moment = (moment - state["exp_avg"].abs() ** setting["pow"]).clamp(min=0.0)
        return moment

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        out: Tensor = state["max_exp_avg_sq"] if setting["amsgrad"] else self._moment(state, setting)
        if setting["debiased"]:
            out = out / (1 - setting["beta"] ** state["step"])
        return out ** (1 / setting["pow"]) if self.root else out.clone()


class SqrtEMASquared(EMASquared):
    r"""The root of `EMASquared`, $v_t^{1/p}$.

    Args:
        beta: The memory.
        amsgrad: Use the largest v so far.
        pow: The power p.
        debiased: Correct for v starting at zero.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.SqrtEMASquared(debiased=True), [torch.tensor([2.0])])
        [tensor([2.])]
    """

    root = True


class CenteredEMASquared(EMASquared):
    r"""A running variance of the update, $v_t - |m_t|^p$ with m the running mean; emits it.

    Args:
        beta: The memory.
        amsgrad: Emit the largest so far.
        pow: The power p.
        debiased: Correct for v starting at zero.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.CenteredEMASquared(beta=0.5), [torch.tensor([2.0])])
        [tensor([1.])]
    """

    centered = True

    beta: Setting = 0.99


class CenteredSqrtEMASquared(CenteredEMASquared):
    r"""The root of `CenteredEMASquared`.

    Args:
        beta: The memory.
        amsgrad: Use the largest so far.
        pow: The power p.
        debiased: Correct for v starting at zero.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.CenteredSqrtEMASquared(beta=0.5), [torch.tensor([2.0])])
        [tensor([1.])]
    """

    root = True


class Debias(UpdateTransform):
    r"""Corrects moments that started at zero, $u \leftarrow \alpha\,u\,\frac{(1-\beta_2^t)^{1/p}}{1-\beta_1^t}$.

    Args:
        beta1: Memory of the mean; None for no such factor.
        beta2: Memory of the mean square; None for no such factor.
        alpha: A factor.
        pow: The power p.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Debias(beta1=0.5), [torch.tensor([1.0])])
        [tensor([2.])]
    """

    elementwise = True
    counts = True
    static = ("pow",)

    beta1: Any = None
    beta2: Any = None
    alpha: Setting = 1.0
    pow: float = 2

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        factor = setting["alpha"]
        if setting["beta2"] is not None:
            factor = factor * (1 - setting["beta2"] ** state["step"]) ** (1 / setting["pow"])
        if setting["beta1"] is not None:
            factor = factor / (1 - setting["beta1"] ** state["step"])
        return tensor * factor


class Debias2(UpdateTransform):
    r"""Corrects the root of a second moment that started at zero, $u \leftarrow u / (1-\beta^t)^{1/p}$.

    Args:
        beta: The memory.
        pow: The power p.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.Debias2(beta=0.75), [torch.tensor([1.0])])
        [tensor([2.])]
    """

    elementwise = True
    counts = True
    static = ("pow",)
    ranges = {check.fraction: ("beta",)}

    beta: Setting = 0.999
    pow: float = 2

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor / (1 - setting["beta"] ** state["step"]) ** (1 / setting["pow"])
