"""The state of torch under which a value was computed: what must agree before it may be reused.

Everything here reads torch's own state; nothing is kept. Some states (function transforms, tracing, dispatch modes)
make a tensor mean something else than its storage, and then nothing is reused at all.
"""

from typing import Final, TypeAlias

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

__all__ = ["Ambient", "Transparent", "ambient"]

Ambient: TypeAlias = tuple[object, ...]

_transform: Final = torch._C._functorch.peek_interpreter_stack
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_function_modes: Final = torch._C._len_torch_function_stack
_tracing: Final = torch._C._get_tracing_state
_saved_tensor_hooks: Final = torch._C._autograd._top_saved_tensors_default_hooks
_autocast: Final = torch._C._is_any_autocast_enabled
_grad: Final = torch.is_grad_enabled
_dtype: Final = torch.get_default_dtype


class Transparent(TorchFunctionMode):
    """A mode that only watches, so that a value computed under it is the value computed without it."""


def ambient() -> Ambient | None:
    """What a value computed now depends on besides its sources, or None where nothing may be reused."""
    if (
        _transform() is not None
        or _dispatch_modes()
        or _tracing() is not None
        or _saved_tensor_hooks(True) is not None
        or forward_ad._current_level >= 0
    ):
        return None
    if not _function_modes() and not _autocast():
        return (_grad(), _dtype())
    devices = []
    for mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        if isinstance(mode, DeviceContext):
            devices.append(mode.device)
        elif not isinstance(mode, Transparent):
            return None
    more = (*devices, *_casting())
    return (_grad(), _dtype(), more) if more else (_grad(), _dtype())


def _casting() -> tuple[object, ...]:
    return tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_DEVICES if torch.is_autocast_enabled(kind)
    )


_AUTOCAST_DEVICES: Final = ("cpu", "cuda", "mps", "xpu")
