"""The update compared with earlier ones."""

from __future__ import annotations

from collections import deque
from dataclasses import field
from typing import Any, Literal

import torch
from torch import Tensor

from ...optim import BufferTransform, TensorTransform
from ...optim import ranges as check


class Previous(BufferTransform):
    """The update of n steps ago; the present one while there is none.

    Args:
        n: How many steps.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, p = m.Previous(1), torch.zeros(1)
        >>> [optim.step_tensors(link, [torch.tensor([x])], [p])[0].item() for x in (1.0, 2.0, 3.0)]
        [1.0, 1.0, 2.0]
    """

    differentiable = True
    members = True

    ranges = {check.at_least_one: ("n",)}
    attributes = ("n",)

    n: int = field(default=1, kw_only=False)

    def begin(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["history"] = deque(maxlen=self.n + 1)

    def learn(self, tensor: Tensor, state: Any, setting: Any) -> None:
        state["history"].append(tensor.clone())

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        return state["history"][0].clone()


class _Last(TensorTransform):
    """A function of the current value and the one before, as update."""

    elementwise = True
    counts = True
    first = 0.0

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["previous"] = torch.full_like(tensor, self.first)
        state["before"] = torch.zeros_like(tensor)

    def observe(self, tensor: Tensor, grad: Tensor | None) -> Tensor:
        """Return the value that is compared with that of the step before."""
        return tensor

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["before"] = state["previous"].clone()
        state["previous"] = self.observe(tensor, grad).clone()

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        return self.combine(state["previous"], state["before"], setting)

    def combine(self, now: Tensor, before: Tensor, setting: Any) -> Tensor:
        """Return the update for two values of a tensor.

        Args:
            now: The value of this step.
            before: That of the last step.
            setting: The settings.
        """
        raise TypeError(f"{type(self).__name__} does not say how to combine")

    def reset_for_online(self) -> None:
        super().reset_for_online()
        self.state.clear()


class LastDifference(_Last):
    r"""$u \leftarrow u_t - u_{t-1}$, with $u_0 = 0$.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, p = m.LastDifference(), torch.zeros(1)
        >>> [optim.step_tensors(link, [torch.tensor([x])], [p])[0].item() for x in (1.0, 4.0)]
        [1.0, 3.0]
    """

    def combine(self, now: Tensor, before: Tensor, setting: Any) -> Tensor:
        return now - before


class LastGradDifference(LastDifference):
    r"""$u \leftarrow g_t - g_{t-1}$, with $g_0 = 0$.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> opt = mo.Optimizer([w], m.LastGradDifference(), m.LR(0.25))
        >>> for _ in range(2):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([0.7500])
    """

    uses_grad = True

    def observe(self, tensor: Tensor, grad: Tensor | None) -> Tensor:
        return tensor if grad is None else grad


class LastProduct(_Last):
    r"""$u \leftarrow u_t \odot u_{t-1}$, with $u_0 = 1$.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, p = m.LastProduct(), torch.zeros(1)
        >>> [optim.step_tensors(link, [torch.tensor([x])], [p])[0].item() for x in (2.0, 3.0)]
        [2.0, 6.0]
    """

    first = 1.0

    def combine(self, now: Tensor, before: Tensor, setting: Any) -> Tensor:
        return now * before


class LastRatio(_Last):
    r"""$u \leftarrow u_t / u_{t-1}$ or the inverse, with $u_0 = 1$.

    Args:
        numerator: "cur" for the present update over the last, "prev" for the inverse.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, p = m.LastRatio(), torch.zeros(1)
        >>> [optim.step_tensors(link, [torch.tensor([x])], [p])[0].item() for x in (2.0, 3.0)]
        [2.0, 1.5]
    """

    first = 1.0

    def __init__(self, *, numerator: Literal["cur", "prev"] = "cur") -> None:
        check.one_of("cur", "prev")(type(self).__name__, "numerator", numerator)
        super().__init__({"numerator": numerator})

    def combine(self, now: Tensor, before: Tensor, setting: Any) -> Tensor:
        return now / before if setting["numerator"] == "cur" else before / now


class LastAbsoluteRatio(_Last):
    r"""$u \leftarrow |u_t| / (|u_{t-1}| + \epsilon)$ or the inverse, with $u_0 = 1$.

    Args:
        numerator: "cur" for the present update over the last, "prev" for the inverse.
        eps: Added to the denominator.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> link, p = m.LastAbsoluteRatio(eps=0.0), torch.zeros(1)
        >>> [optim.step_tensors(link, [torch.tensor([x])], [p])[0].item() for x in (-2.0, 3.0)]
        [2.0, 1.5]
    """

    first = 1.0

    def __init__(self, *, numerator: Literal["cur", "prev"] = "cur", eps: Any = 1e-8) -> None:
        check.one_of("cur", "prev")(type(self).__name__, "numerator", numerator)
        super().__init__({"numerator": numerator, "eps": eps})

    def combine(self, now: Tensor, before: Tensor, setting: Any) -> Tensor:
        above, below = (now, before) if setting["numerator"] == "cur" else (before, now)
        return above.abs() / (below.abs() + setting["eps"])
