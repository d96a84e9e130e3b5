"""Constants of compiled code: objects that `torch.compile` treats as one opaque value.

Label logic must not be traced: five hundred labels would cost milliseconds in every call. So the classes of labels are
registered as opaque types. The compiler guards such an input by equality only, calls the registered members on the real object
during tracing, and stores their results as constants.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import types
import weakref
from typing import Any, TypeVar

from .._torch import can_hold_constants, keep_from_tracing, register_constant_type

C = TypeVar("C", bound=type[Any])


def constant(*further: str) -> Any:
    """Return a class decorator that makes instances constants of compiled code.

    The public members of the class and the further ones named are evaluated at trace time.
    """

    def decorate(cls: C) -> C:
        cls.__fx_repr__ = _fx_repr
        register_constant_type(cls, (*(name for name in vars(cls) if not name.startswith("_")), *further))
        return cls

    return decorate


def _fx_repr(self: Any) -> tuple[str, dict[str, Any]]:
    """Return the expression by which a graph refers to the object: its content, which a graph cached on disk can find again."""
    try:
        content = pickle.dumps(self)
    except (pickle.PicklingError, TypeError, AttributeError):  # such labels can only be found in this process
        content = f"{os.getpid()} {id(self)}".encode()
    digest = hashlib.sha256(content).hexdigest()
    _known[digest] = self
    return f"{_recall.__name__}({digest!r})", {_recall.__name__: _recall}


_known: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def _recall(digest: str) -> Any:
    return _known[digest]


def refuse_compilation(namespace: dict[str, Any], *classes: type[Any]) -> None:
    """Exclude labelled code from compiled graphs if this version of torch does not support labels as constants.

    A compiled program runs this code uncompiled, between its graphs; `fullgraph=True` raises with the reason.

    Args:
        namespace: The names of the package, whose functions are excluded from tracing.
        classes: Classes whose methods are excluded, too.
    """
    if can_hold_constants():
        return
    members = [*namespace.values(), *(value for cls in classes for value in vars(cls).values())]
    members = [getattr(member, "fget", None) or getattr(member, "__func__", member) for member in members]
    functions = [member for member in members if isinstance(member, types.FunctionType)]
    keep_from_tracing(*functions, reason="torch.compile of labelled tensors needs torch 2.13; compute on t.data there")
