"""A multiplier that rises at the start of training."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...optim import Across
from .._checks import non_negative, positive
from .._metrics import lengths, metric_of_all
from .._transforms import Settings, Tensors, UpdateTransform


class Warmup(UpdateTransform):
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
    ranges = {positive: ("steps",), non_negative: ("start_lr", "end_lr")}

    def __init__(self, steps: Any = 100, *, start_lr: Any = 1e-5, end_lr: Any = 1.0) -> None:
        super().__init__(locals())

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        before, start, end = state["step"] - 1, setting["start_lr"], setting["end_lr"]
        rising = (before < setting["steps"]) * 1.0
        return tensor * (rising * (start + (end - start) * (before / setting["steps"])) + (1 - rising) * end)


class WarmupNormClip(UpdateTransform):
    """Bounds the norm over all parameters by a number that rises linearly, and after that not at all.

    Args:
        steps: How many steps the rise takes.
        start_norm: The bound of the first step.
        end_norm: The bound it rises to.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([0.0]))
        >>> opt = mo.Optimizer([w], m.WarmupNormClip(2, start_norm=1.0, end_norm=3.0))
        >>> for _ in range(3):
        ...     _ = opt.step(mo.closure(lambda: (-8 * w).sum()))
        ...     print(round(w.item(), 3))
        1.0
        3.0
        11.0
    """

    across = Across.SUMS

    differentiable = True
    elementwise = True
    counts = True
    ranges = {positive: ("steps", "start_norm", "end_norm")}

    def __init__(self, steps: Any = 100, *, start_norm: Any = 1e-5, end_norm: Any = 1.0) -> None:
        super().__init__(locals())

    def measure(
        self, tensors: Tensors, params: Tensors, grads: Tensors | None, settings: Settings, members: int | None
    ) -> dict[str, Any] | None:
        return {"norm": metric_of_all(tensors) if members is None else lengths(tensors)}

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        before, start, end = state["step"] - 1, setting["start_norm"], setting["end_norm"]
        rising = (before < setting["steps"]) * 1.0
        scale = (start + (end - start) * (before / setting["steps"])) / (setting["norm"] + 1e-6)
        clipped = rising * ((scale < 1) * 1.0)
        return tensor * (clipped * scale + (1 - clipped))
