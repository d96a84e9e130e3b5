"""Constants of compiled code: objects that `torch.compile` treats as one value instead of looking inside.

Label logic must not be traced: five hundred labels would cost milliseconds in every call. So the objects that carry labels
are registered as opaque values. The compiler guards an input by equality and nothing else, calls the registered members on
the real object while it traces, and keeps what they return as a constant.
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
    """A class decorator: instances are constants of compiled code.

    The public members of the class and the further ones named are evaluated at trace time.
    """

    def decorate(cls: C) -> C:
        cls.__fx_repr__ = _fx_repr
        register_constant_type(cls, (*(name for name in vars(cls) if not name.startswith("_")), *further))
        return cls

    return decorate


def _fx_repr(self: Any) -> tuple[str, dict[str, Any]]:
    """How a graph refers to the object: by what it holds, so that a graph cached on disk finds it in another process."""
    try:
        content = pickle.dumps(self)
    except (pickle.PicklingError, TypeError, AttributeError):  # labels may be anything: then only this process knows it
        content = f"{os.getpid()} {id(self)}".encode()
    digest = hashlib.sha256(content).hexdigest()
    _known[digest] = self
    return f"{_recall.__name__}({digest!r})", {_recall.__name__: _recall}


_known: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def _recall(digest: str) -> Any:
    return _known[digest]


def refuse_compilation(namespace: dict[str, Any], *classes: type[Any]) -> None:
    """Keep labelled code out of compiled graphs where torch can't hold labels as constants, and have torch say why.

    A program that is compiled runs this code as it is, between its graphs; `fullgraph=True` is refused with the reason.

    Args:
        namespace: The names of the room; its functions are kept from tracing.
        classes: Classes whose methods are, too.
    """
    if can_hold_constants():
        return
    members = [*namespace.values(), *(value for cls in classes for value in vars(cls).values())]
    members = [getattr(member, "fget", None) or getattr(member, "__func__", member) for member in members]
    functions = [member for member in members if isinstance(member, types.FunctionType)]
    keep_from_tracing(*functions, reason="torch.compile of labelled tensors needs torch 2.13; compute on t.data there")
