"""Rprop: a step size for each weight, from signs alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...optim import TensorTransform
from .._checks import non_negative, positive


class _SignSteps(TensorTransform):
    """Step sizes that grow while a sign repeats and shrink when it flips."""

    elementwise = True

    def __init__(self, nplus: Any, nminus: Any, lb: Any, ub: Any, alpha: Any, **more: Any) -> None:
        name = type(self).__name__
        uses_grad = bool(more.get("use_grad", False))
        positive(name, nplus=nplus, nminus=nminus, alpha=alpha)
        non_negative(name, lb=lb, ub=ub)
        if isinstance(lb, int | float) and isinstance(ub, int | float) and lb > ub:
            raise ValueError(f"{name}: lb is {lb!r}, which is above ub, {ub!r}")
        super().__init__(
            {"nplus": nplus, "nminus": nminus, "lb": lb, "ub": ub, "alpha": alpha, **more}, uses_grad=uses_grad
        )

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["size"] = torch.zeros_like(tensor) + setting["alpha"]
        state["previous"] = torch.zeros_like(tensor)

    @staticmethod
    def _resize(tensor: Tensor, state: Any, setting: Any) -> Tensor:
        """Adapts the sizes; returns how signs compare: above zero the same, below flipped, zero neither."""
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

    def __init__(
        self,
        *,
        nplus: Any = 1.2,
        nminus: Any = 0.5,
        lb: Any = 1e-6,
        ub: Any = 50.0,
        backtrack: bool = True,
        alpha: Any = 1.0,
    ) -> None:
        super().__init__(nplus, nminus, lb, ub, alpha, backtrack=backtrack)

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        super().single_tensor_initialize(tensor, param, grad, loss, state, setting)
        if setting["backtrack"]:
            state["last"] = torch.zeros_like(tensor)

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        flipped = self._resize(tensor, state, setting) < 0
        state["previous"] = torch.where(flipped, torch.zeros_like(tensor), tensor)
        if setting["backtrack"]:
            move = tensor.sign() * state["size"]
            state["last"] = torch.where(flipped, -state["last"], move)

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        if setting["backtrack"]:
            undone: Tensor = state["last"].clone()
            return undone
        out: Tensor = state["previous"].sign() * state["size"]
        return out


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

    def __init__(
        self, *, nplus: Any = 1.2, nminus: Any = 0.5, lb: Any = 1e-6, ub: Any = 50.0, alpha: Any = 1.0
    ) -> None:
        super().__init__(nplus, nminus, lb, ub, alpha)

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        self._resize(tensor, state, setting)
        state["previous"] = tensor.clone()

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        out: Tensor = state["size"].clone()
        return out


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

    def __init__(
        self,
        *,
        nplus: Any = 1.2,
        nminus: Any = 0.5,
        lb: Any = 1e-6,
        ub: Any = 50.0,
        alpha: Any = 1.0,
        use_grad: bool = False,
    ) -> None:
        super().__init__(nplus, nminus, lb, ub, alpha, use_grad=use_grad)

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        seen = grad if setting["use_grad"] and grad is not None else tensor
        self._resize(seen, state, setting)
        state["previous"] = seen.clone()

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        out: Tensor = tensor * state["size"]
        return out
