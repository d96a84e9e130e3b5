"""Steps from the signs of updates.

* Rprop: a step size for each weight, from signs alone; and its parts as links.
* Lion: the sign of a momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..._search_ranges import SIGN_STEPS
from ...optim import BufferTransform, Setting
from ...optim import ranges as check


class _SignSteps(BufferTransform):
    """Step sizes that grow while a sign repeats and shrink when it flips."""

    elementwise = True
    ranges = {check.positive: ("nplus", "nminus", "alpha"), check.non_negative: ("lb", "ub")}

    nplus: Setting = 1.2
    nminus: Setting = 0.5
    lb: Setting = 1e-6
    ub: Setting = 50.0
    alpha: Setting = 1.0

    def collect(self, given: Mapping[str, Any]) -> None:
        super().collect({**given, "uses_grad": given.get("use_grad", False)})
        lb, ub = given["lb"], given["ub"]
        if isinstance(lb, int | float) and isinstance(ub, int | float) and lb > ub:
            raise ValueError(f"{type(self).__name__}: lb is {lb!r}, which is above ub, {ub!r}")

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["size"] = torch.zeros_like(tensor) + setting["alpha"]
        state["previous"] = torch.zeros_like(tensor)

    @staticmethod
    def _resize(tensor: Tensor, state: Any, setting: Any) -> Tensor:
        """Adapt the sizes; return the product of signs: positive for the same, negative for flipped, zero for neither."""
        product: Tensor = tensor * state["previous"]
        size = state["size"]
        size = torch.where(
            product > 0, size * setting["nplus"], torch.where(product < 0, size * setting["nminus"], size)
        )
        state["size"] = size.clamp(min=setting["lb"]).clamp(max=setting["ub"])
        return product


class Rprop(_SignSteps):
    r"""Resilient propagation: each weight moves by a step of its own, in the direction of the sign of its update.

    The step grows by $\eta^+$ while the sign repeats and shrinks by $\eta^-$ when it flips, within bounds. After a flip
    the last step is taken back (`backtrack=True`) or the weight waits (False, as in torch), and the next comparison is
    neutral.

    Args:
        nplus: The growth $\eta^+$.
        nminus: The shrinkage $\eta^-$.
        lb: The smallest step.
        ub: The largest step.
        backtrack: Whether to take the last step back when the sign flips.
        alpha: The first step.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([4.0]))
        >>> opt = mo.Optimizer([w], m.Rprop())
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([1.8000])

    References:
        M. Riedmiller, H. Braun, "A direct adaptive method for faster backpropagation learning: the RPROP algorithm",
        ICNN 1993.
    """

    backtrack: bool = True

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        super().begin(tensor, state, setting)
        if setting["backtrack"]:
            state["last"] = torch.zeros_like(tensor)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        flipped = self._resize(tensor, state, setting) < 0
        state["previous"] = torch.where(flipped, torch.zeros_like(tensor), tensor)
        if setting["backtrack"]:
            move = tensor.sign() * state["size"]
            state["last"] = torch.where(flipped, -state["last"], move)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        if setting["backtrack"]:
            return state["last"].clone()
        return state["previous"].sign() * state["size"]


class SignConsistencyLRs(_SignSteps):
    """Replaces the update by Rprop's step sizes, to be used as a factor.

    Args:
        nplus: The growth while a sign repeats.
        nminus: The shrinkage when it flips.
        lb: The smallest step.
        ub: The largest step.
        alpha: The first step.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.SignConsistencyLRs(), torch.zeros(2)
        >>> for u in (torch.tensor([1.0, 1.0]), torch.tensor([2.0, -1.0])):
        ...     out = optim.step_tensors(link, [u], params=[w])
        >>> out
        [tensor([1.2000, 0.5000])]

    References:
        M. Riedmiller, H. Braun, "A direct adaptive method for faster backpropagation learning: the RPROP algorithm",
        ICNN 1993.
    """

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        self._resize(tensor, state, setting)
        state["previous"] = tensor.clone()

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return state["size"].clone()


class ScaleLRBySignChange(_SignSteps):
    """Multiplies the update by Rprop's step sizes.

    Args:
        nplus: The growth while a sign repeats.
        nminus: The shrinkage when it flips.
        lb: The smallest factor.
        ub: The largest factor.
        alpha: The first factor.
        use_grad: Compare signs of the gradient in place of the update's.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.ScaleLRBySignChange(), torch.zeros(2)
        >>> for u in (torch.tensor([1.0, 1.0]), torch.tensor([2.0, -1.0])):
        ...     out = optim.step_tensors(link, [u], params=[w])
        >>> out
        [tensor([ 2.4000, -0.5000])]

    References:
        M. Riedmiller, H. Braun, "A direct adaptive method for faster backpropagation learning: the RPROP algorithm",
        ICNN 1993.
    """

    use_grad: bool = False

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        seen = grad if setting["use_grad"] and grad is not None else tensor
        self._resize(seen, state, setting)
        state["previous"] = seen.clone()

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return tensor * state["size"]


class BacktrackOnSignChange(BufferTransform):
    """Takes the last step of a weight back where the sign of its update flips.

    It is the part of `Rprop` that is not about sizes; the comparison after a flip is neutral, as there.

    Args:
        use_grad: Compare signs of gradients in place of those of updates.
        backtrack: False: the weight waits instead.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.BacktrackOnSignChange(), torch.zeros(1)
        >>> [optim.step_tensors(link, [torch.tensor([u])], params=[w])[0].item() for u in (2.0, -1.0, -1.0)]
        [2.0, -2.0, -1.0]

    References:
        M. Riedmiller, H. Braun, "A direct adaptive method for faster backpropagation learning: the RPROP algorithm", 1993.
    """

    shared_settings = ("use_grad",)
    elementwise = True
    buffers = {"previous": "grad", "last": "grad", "flipped": None}

    uses_grad = True

    use_grad: bool = False
    backtrack: bool = True

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        seen = cast(Tensor, grad) if setting["use_grad"] else tensor
        flipped = seen * state["previous"] < 0
        zero = torch.zeros_like(tensor)
        # The last step if it is to be undone, otherwise this step.
        state["last"] = torch.where(flipped, -state["last"], tensor)
        state["flipped"] = torch.where(flipped, torch.ones_like(tensor), zero)
        state["previous"] = torch.where(flipped, zero, seen)

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        back = state["last"] if setting["backtrack"] else torch.zeros_like(tensor)
        return torch.where(state["flipped"] > 0, back, tensor)


class SignConsistencyMask(BufferTransform):
    r"""Replaces the update by the mask $[u_t u_{t-1} > 0]$: one where its sign has stayed; zero at first.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, w = m.SignConsistencyMask(), torch.zeros(2)
        >>> for u in ([1.0, 1.0], [2.0, -2.0]):
        ...     out = optim.step_tensors(link, [torch.tensor(u)], params=[w])
        >>> out
        [tensor([1., 0.])]
    """

    elementwise = True
    buffers = {"previous": "grad", "mask": None}

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        same = tensor * state["previous"] > 0
        state["mask"] = torch.where(same, torch.ones_like(tensor), torch.zeros_like(tensor))
        state["previous"] = tensor.clone()

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return state["mask"].clone()


class Lion(BufferTransform):
    r"""The sign of the update mixed with a slower running mean of it.

    $c_t = \beta_1 m_{t-1} + (1-\beta_1) u_t,\quad m_t = \beta_2 m_{t-1} + (1-\beta_2) u_t,\quad
    u \leftarrow \operatorname{sign}(c_t)$

    Args:
        beta1: How much of the mean enters the step.
        beta2: Memory of the mean; above zero.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -8.0]))
        >>> _ = mo.Optimizer([w], m.Lion(), m.LR(0.25)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([ 0.7500, -7.7500])

    References:
        X. Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023.
    """

    search_ranges = {"lr": SIGN_STEPS}

    elementwise = True
    aliases = {"betas": ("beta1", "beta2")}
    buffers = {"exp_avg": "grad"}
    ranges = {check.fraction: ("beta1", "beta2"), check.positive: ("beta2",)}

    beta1: Setting = 0.9
    beta2: Setting = 0.99

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["exp_avg"].lerp_(tensor, 1 - setting["beta2"])

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        # The mean has already moved; u - m_t = beta2 (u - m_{t-1}), so the old one need not be stored.
        back = setting["beta1"] / setting["beta2"]
        mixed: Tensor = tensor - (tensor - state["exp_avg"]) * back
        return mixed.sign()
