"""Schedule-free averaging in place of momentum and a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...optim import TensorTransform
from .._checks import fraction, non_negative, positive

__all__ = ["ScheduleFree"]


class ScheduleFree(TensorTransform):
    r"""Steps with a sequence z, evaluates between it and its average x, so that no schedule is needed.

    The parameters are $y = (1-\beta) z + \beta x$. A step makes $z \leftarrow z - u$ and $x \leftarrow (1-c_t) x + c_t z$ with
    $c_t = (1+r)/(t+r)$. Put it last, after `LR`. Training evaluates at y; the result is the average x: see `averaged`.

    Args:
        momentum: Where between z and x the gradient is taken, $\beta$; above zero.
        r: The power of t that weighs the average; 0 weighs all steps the same.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([4.0]))
        >>> link = m.ScheduleFree()
        >>> opt = mo.Optimizer([w], m.LR(0.5), link)
        >>> for _ in range(200):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> with link.averaged([w]):
        ...     print(abs(w.item()) < 0.05)
        True

    References:
        A. Defazio et al., "The road less scheduled", NeurIPS 2024.
    """

    elementwise = True
    counts = True

    def __init__(self, momentum: Any = 0.9, *, r: Any = 0.0) -> None:
        fraction("ScheduleFree", momentum=momentum)
        positive("ScheduleFree", momentum=momentum)
        non_negative("ScheduleFree", r=r)
        super().__init__({"momentum": momentum, "r": r})

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["z"] = param.clone()

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        state["z"].sub_(tensor)

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        beta, t, r = setting["momentum"], state["step"], setting["r"]
        c, z = (1 + r) / (t + r), state["z"]
        # beta x = y - (1 - beta) z of before the step, so that x need not be kept.
        average = (param - (z + tensor) * (1 - beta)) * (1 - c)
        out: Tensor = param - z * (1 - beta + beta * c) - average
        return out

    def averages(self, params: Iterable[Tensor]) -> list[Tensor]:
        """The average x of these parameters; a parameter that has not been stepped is its own average."""
        out = []
        for param in params:
            state, beta = self.state.get(param), self.settings[param]["momentum"]
            here = param.detach()
            if not state:
                out.append(here.clone())
                continue
            z = torch.view_as_complex(state["z"]) if here.is_complex() and not state["z"].is_complex() else state["z"]
            out.append((here - (1 - beta) * z) / beta)
        return out

    @contextmanager
    def averaged(self, params: Iterable[Tensor]) -> Iterator[None]:
        """A block in which these parameters are their averages, to evaluate or save; training goes on after it."""
        given = list(params)
        before = [param.detach().clone() for param in given]
        with torch.no_grad():
            for param, value in zip(given, self.averages(given), strict=True):
                param.copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for param, value in zip(given, before, strict=True):
                    param.copy_(value)
