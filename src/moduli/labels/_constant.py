"""Constants of compiled code: objects that `torch.compile` treats as one value instead of looking inside.

Label logic must not be traced: five hundred labels would cost milliseconds in every call. So the objects that carry labels
are registered as opaque values. The compiler guards an input by equality and nothing else, calls the registered members on
the real object while it traces, and keeps what they return as a constant.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import weakref
from typing import Any, TypeVar

from .._torch import register_constant_type

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
