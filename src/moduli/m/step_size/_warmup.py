"""A multiplier that rises at the start of training."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...optim import TensorTransform
from .._checks import non_negative, positive


class Warmup(TensorTransform):
    r"""Multiplies the update by a number that rises linearly and then stays.

    $u \leftarrow \left(a + (b-a)\,\min\left(\frac{t-1}{n}, 1\right)\right) u$

    Args:
        steps: How many steps the rise takes, n.
        start_lr: The multiplier a of the first step.
        end_lr: The multiplier b after n steps.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.0]))
        >>> opt = mo.Optimizer([w], m.Warmup(2, start_lr=0.0))
        >>> for _ in range(4):
        ...     _ = opt.step(mo.closure(lambda: -w.sum()))
        ...     print(w.item())
        0.0
        0.5
        1.5
        2.5
    """

    elementwise = True
    counts = True

    def __init__(self, steps: Any = 100, *, start_lr: Any = 1e-5, end_lr: Any = 1.0) -> None:
        positive("Warmup", steps=steps)
        non_negative("Warmup", start_lr=start_lr, end_lr=end_lr)
        super().__init__({"steps": steps, "start_lr": start_lr, "end_lr": end_lr})

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        before, start, end = state["step"] - 1, setting["start_lr"], setting["end_lr"]
        rising = (before < setting["steps"]) * 1.0
        out: Tensor = tensor * (rising * (start + (end - start) * (before / setting["steps"])) + (1 - rising) * end)
        return out
