"""How a call of a module reaches the action registered for its argument, with hooks and compilation honoured.

Torch runs hooks around whatever `self.forward` is, so for classes with registered actions `forward` asks whether it is
running on behalf of a call, and if so runs the action. Called directly, as `super().forward(x)` or from inside an
action, it is the method that was written. Classes without actions are left exactly as they are.
"""

import functools
import threading
from typing import Any, Final

from torch import nn
from torch.compiler import is_compiling

from ._functional import Action, has_actions, resolve

__all__ = ["install"]


class _Call(threading.local):
    """The module whose call is under way in this thread and has not reached `forward` yet."""

    module: nn.Module | None = None


_call: Final = _Call()
_MARK: Final = "_moduli_forward"

# While a compiler traces, there is one thread and it cannot look into thread-local state.
_traced_call: Final[list[nn.Module | None]] = [None]


def install(cls: type) -> None:
    """Let calls of a class, and of the classes derived from it, reach their registered actions."""
    if not has_actions(cls):
        return
    for klass in (cls, *_descendants(cls)):
        forward = klass.__dict__.get("forward")
        if callable(forward) and not hasattr(forward, _MARK):
            type.__setattr__(klass, "forward", _dispatching(forward))
        elif not hasattr(klass.forward, _MARK):  # type: ignore[attr-defined]
            # Inherited from a class that has no actions itself, so its method must stay as it is.
            type.__setattr__(klass, "forward", _dispatching(_inherited(klass)))
        if klass._call_impl is not _call_impl:  # type: ignore[attr-defined]
            type.__setattr__(klass, "_call_impl", _call_impl)


def _descendants(cls: type) -> list[type]:
    found: dict[type, None] = {}
    for child in cls.__subclasses__():
        found[child] = None
        found.update(dict.fromkeys(_descendants(child)))
    return list(found)


def _inherited(cls: type) -> Action:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(cls, self).forward(*args, **kwargs)  # type: ignore[misc]

    return forward


def _dispatching(forward: Action) -> Action:
    @functools.wraps(forward)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _reached(self) and args:
            action = resolve(type(self), type(args[0]))
            if action is not None:
                return action(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    setattr(dispatch, _MARK, forward)
    return dispatch


def _reached(module: nn.Module) -> bool:
    """Whether this is the `forward` of a call of the module, once per call."""
    if is_compiling():
        if _traced_call[0] is module:
            _traced_call[0] = None
            return True
        return False
    if _call.module is module:
        _call.module = None
        return True
    return False


def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
    if is_compiling():
        _traced_call[0] = self
        return nn.Module._call_impl(self, *args, **kwargs)
    outer = _call.module
    _call.module = self
    try:
        return nn.Module._call_impl(self, *args, **kwargs)
    finally:
        _call.module = outer
