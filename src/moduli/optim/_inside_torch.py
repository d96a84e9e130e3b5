"""Shorter ways that torch keeps to itself, and its public ones where a version of torch lacks them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["backward", "watched"]

try:
    from torch._C import _are_functorch_transforms_active as _transforming
    from torch.autograd.graph import _engine_run_backward as _run
except ImportError:  # pragma: no cover - another torch
    _run = None  # type: ignore[assignment]

_hooks: tuple[Any, Any] | None
try:
    from torch._C._autograd import _profiler_enabled as _profiling
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    _hooks = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
except ImportError:  # pragma: no cover - another torch
    _hooks = None

_ones: dict[torch.dtype, Tensor] = {}


def backward(loss: Tensor) -> None:
    """`loss.backward()`; for a loss on the CPU without what torch does to arguments it might have been given."""
    dtype = loss.dtype
    usual = type(loss) is Tensor and (dtype is torch.float32 or dtype is torch.float64) and loss.is_cpu
    if not usual or _run is None or _transforming():
        torch.autograd.backward(loss)
        return
    one = _ones.get(dtype)
    if one is None or one._version:  # a hook may have changed it in place
        one = _ones[dtype] = torch.ones((), dtype=dtype)
    _run((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anyone would notice if `step` did not go through torch's wrapper: a hook or a profiler."""
    if _hooks is None:  # pragma: no cover - another torch
        return True
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own or _hooks[0] or _hooks[1] or _profiling())
