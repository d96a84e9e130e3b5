"""How a call of a module reaches the action registered for its argument, with hooks and compilation honoured.

Torch runs hooks around whatever `self.forward` is, so for classes with registered actions `forward` asks whether it is
running on behalf of a call, and if so runs the action. Called directly, as `super().forward(x)` or from inside an
action, it is the method that was written. Classes without actions are left exactly as they are.
"""

import functools
import threading
from typing import Any, Final

from torch import nn
from torch.compiler import is_dynamo_compiling

from .._torch import has_global_module_hooks
from ._functional import Action, has_actions, resolve

_MARK: Final = "_moduli_forward"

# The module whose call is under way and has not reached `forward` yet, by thread. Nearly always empty: only calls with
# hooks around them need it.
_pending: Final[dict[int, nn.Module]] = {}


def install(cls: type) -> None:
    """Let calls of a class, and of the classes derived from it, reach their registered actions."""
    if not has_actions(cls):
        return
    for klass in (cls, *_descendants(cls)):
        forward = klass.__dict__.get("forward")
        if callable(forward) and not hasattr(forward, _MARK):
            type.__setattr__(klass, "forward", _make_dispatching(forward))
        elif not hasattr(klass.forward, _MARK):  # type: ignore[attr-defined]
            # Inherited from a class that has no actions itself, so its method must stay as it is.
            type.__setattr__(klass, "forward", _make_dispatching(_make_inherited(klass)))
        if klass._call_impl is not _call_impl:  # type: ignore[attr-defined]
            type.__setattr__(klass, "_call_impl", _call_impl)


def _descendants(cls: type) -> list[type]:
    found: dict[type, None] = {}
    child: type
    for child in cls.__subclasses__():
        found[child] = None
        found.update(dict.fromkeys(_descendants(child)))
    return list(found)


def _make_inherited(cls: Any) -> Action:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(cls, self).forward(*args, **kwargs)

    return forward


def _make_dispatching(forward: Action) -> Action:
    @functools.wraps(forward)
    def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _pending and args and _pending.get(_thread()) is self:
            del _pending[_thread()]
            action = resolve(type(self), type(args[0]))
            if action is not None:
                return action(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    setattr(dispatch, _MARK, forward)
    return dispatch


def _thread() -> int:
    # A compiler traces in one thread and cannot look which one it is.
    return 0 if is_dynamo_compiling() else threading.get_ident()


def _call_impl(self: Any, *args: Any, **kwargs: Any) -> Any:
    if args and not (
        self._forward_hooks
        or self._forward_pre_hooks
        or self._backward_hooks
        or self._backward_pre_hooks
        or has_global_module_hooks()
    ):
        # Nothing to run around it, so the way through torch and back is not needed.
        action = resolve(type(self), type(args[0]))
        if action is not None:
            return action(self, *args, **kwargs)
        forward = self.forward
        written = getattr(forward, _MARK, None)
        return forward(*args, **kwargs) if written is None else written(self, *args, **kwargs)
    thread = _thread()
    outer = _pending.get(thread)
    _pending[thread] = self
    try:
        return nn.Module._call_impl(self, *args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        if outer is None:
            _pending.pop(thread, None)
        else:
            _pending[thread] = outer
