"""A bound on the norm that is loosened at the start of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...optim import Across, TensorTransform
from .._checks import positive
from .._metrics import lengths, metric_of_all


class WarmupNormClip(TensorTransform):
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

    def __init__(self, steps: Any = 100, *, start_norm: Any = 1e-5, end_norm: Any = 1.0) -> None:
        positive("WarmupNormClip", steps=steps, start_norm=start_norm, end_norm=end_norm)
        super().__init__({"steps": steps, "start_norm": start_norm, "end_norm": end_norm})

    def measure(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor] | None,
        settings: Sequence[Mapping[str, Any]],
        members: int | None,
    ) -> dict[str, Any] | None:
        return {"norm": metric_of_all(tensors) if members is None else lengths(tensors)}

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        before, start, end = state["step"] - 1, setting["start_norm"], setting["end_norm"]
        rising = (before < setting["steps"]) * 1.0
        scale = (start + (end - start) * (before / setting["steps"])) / (setting["norm"] + 1e-6)
        clipped = rising * ((scale < 1) * 1.0)
        out: Tensor = tensor * (clipped * scale + (1 - clipped))
        return out
