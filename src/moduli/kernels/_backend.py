"""Which forms may run here: the setting, the compiled kernels of this process, and the one warning."""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Callable, Container
from typing import Any, TypeVar

import torch

from . import _compiler
from ._compiler import Library, Unavailable, build
from ._runtime import Runtime, load_runtime

T = TypeVar("T")

_MODES = ("auto", "c", "triton", "foreach", "plain")
#: The number of elements that justifies a thread.
GRAIN = 16384


_lock = threading.RLock()
_kernels: dict[str, Kernel | str] = {}
_shared: Runtime | str | None = None
_warned: set[str] = set()
_forked = False


class KernelError(RuntimeError):
    """`MODULI_KERNELS=c` (or `triton`) asks for compiled kernels and this one can't be compiled; the message says why.

    Example:
        >>> issubclass(KernelError, RuntimeError)
        True
    """


class Kernel:
    """A compiled function: its entry point, its source text and the library it lives in."""

    __slots__ = ("library", "run", "source")

    def __init__(self, source: str, library: Library) -> None:
        self.source = source
        self.library = library
        self.run: Any = library.handle.moduli_run
        address, integer = ctypes.c_void_p, ctypes.c_int64
        self.run.argtypes = [integer, address, address, address, address, ctypes.c_int32]
        self.run.restype = None


SETTING = "MODULI_KERNELS"
# Every call of a kernel looks up whether it is set. If it is not, `os.environ` raises and catches an error, which takes ten times
# as long as a lookup in the dictionary below it.
VARIABLES: Container[Any] = getattr(os.environ, "_data", os.environ)
SETTING_KEY: Any = SETTING if VARIABLES is os.environ else os.environ.encodekey(SETTING)


def mode() -> str:
    """Return the value of `MODULI_KERNELS`: auto (compile where possible), c or triton (or raise), foreach, plain."""
    if SETTING_KEY not in VARIABLES:
        return "auto"
    value = os.environ[SETTING]
    value = "foreach" if value == "eager" else value  # its old name
    if value not in _MODES:
        raise ValueError(f"MODULI_KERNELS is {value!r}; set it to one of {', '.join(_MODES)}, or unset it")
    return value


def threads(elements: int) -> int:
    """Return the number of threads for a pass over so many elements."""
    if _forked:
        return 1
    return min(torch.get_num_threads(), max(1, elements // GRAIN))


def _after_fork() -> None:
    global _forked, _lock
    # OpenMP's threads do not exist in a forked child, and GNU's runtime waits for them for ever.
    _forked = True
    # Another thread of the parent may have held the lock, to compile; it does not exist here to release it.
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def runtime() -> Runtime | str:
    """Return the shared library, or the reason why there is none."""
    global _shared
    if _shared is None:
        with _lock:
            if _shared is None:
                _shared = _try(load_runtime)
    return _shared


def kernel(source: str) -> Kernel | str:
    """Return the compiled kernel of this source, or the reason why there is none. A failure is not tried again."""
    with _lock:
        built = _kernels.get(source)
        if built is None:
            shared = runtime()
            built = shared if isinstance(shared, str) else _try(lambda: Kernel(source, build(source, ["moduli_run"])))
            _kernels[source] = built
        return built


def _try(make: Callable[[], T]) -> T | str:
    try:
        return make()
    except Unavailable as problem:
        warn_once("a compiler", str(problem))
        return str(problem)


def list_built() -> list[Kernel]:
    """Return the kernels of this process."""
    with _lock:
        return [kernel for kernel in _kernels.values() if isinstance(kernel, Kernel)]


def warn_once(what: str, problem: str) -> None:
    """Warn that a feature is missing, unless it was done before or the user asked for an error."""
    if what in _warned or mode() in ("c", "triton"):
        return
    _warned.add(what)
    warnings.warn(
        f"moduli.kernels runs without {what}, with the same results but slower: {problem}",
        RuntimeWarning,
        stacklevel=2,
    )


def reset() -> None:
    """Clear compiled kernels and failures, so that the next call tries again (after installing a compiler, say).

    Example:
        >>> from moduli import kernels
        >>> kernels.reset()
    """
    global _shared
    with _lock:
        _kernels.clear()
        _shared = None
        _warned.clear()
        _compiler.reset()
