"""The state of torch under which a value was computed: what must agree before it may be reused.

Everything here reads torch's own state; nothing is kept. Some states (function transforms, tracing, modes) make a tensor
mean something else than its storage, and then nothing is reused at all.
"""

from typing import Final, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from moduli._torch import (
    has_autocast,
    has_dispatch_mode,
    has_function_mode,
    has_mode_beside,
    has_saved_tensor_hooks,
    in_forward_ad,
    in_transform,
    is_tracing,
)

Ambient: TypeAlias = tuple[object, ...]


class Transparent(TorchFunctionMode):
    """A mode that only watches, so that a value computed under it is the value computed without it."""


def ambient() -> Ambient | None:
    """What a value computed now depends on besides its sources, or None where nothing may be reused."""
    if in_transform() or has_dispatch_mode() or has_saved_tensor_hooks() or in_forward_ad() or is_tracing():
        return None
    if not has_function_mode() and not has_autocast():
        return torch.is_grad_enabled(), torch.get_default_dtype()
    if has_mode_beside(Transparent):
        return None
    device = torch.get_default_device()
    casts = ((kind, torch.get_autocast_dtype(kind)) for kind in _AUTOCAST if torch.is_autocast_enabled(kind))
    return torch.is_grad_enabled(), torch.get_default_dtype(), *casts, *([] if device == _CPU else [device])


_CPU: Final = torch.device("cpu")
_AUTOCAST: Final = ("cpu", "cuda", "mps", "xpu")
