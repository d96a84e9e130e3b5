"""The C functions shared by all kernels, with their types: reading tensors from lists, comparing names, reductions."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from .._torch import find_tensor_reader
from ._compiler import Library, build
from ._emit_c import HALF, HEADERS

CODES = {torch.float64: 0, torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
KINDS = {"sum": 0, "dot": 1, "squares": 2, "absolutes": 3, "amax": 4, "largest": 5, "norm": 6}
#: The errors of torch's reader for tensors that it can't describe.
READ_ERRORS = (RuntimeError, BufferError, TypeError)

_ADDRESS, _INTEGER = ctypes.c_void_p, ctypes.c_int64
Lists = Sequence[tuple[torch.Tensor, ...]]


class Runtime:
    """The shared library. Functions that read Python objects are called with the GIL held."""

    CHUNK = 16384

    def __init__(self, library: Library) -> None:
        self.library = library
        self.reduce: Any = library.handle.moduli_reduce
        self.reduce.argtypes = [*([ctypes.c_int32] * 3), _INTEGER, *([_ADDRESS] * 4), ctypes.c_double, _ADDRESS]
        self.reduce.argtypes += [ctypes.c_int32]
        self.reduce.restype = ctypes.c_double
        self.huge: Any = library.handle.moduli_huge
        self.huge.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        self.huge.restype = None
        holding = ctypes.PyDLL(str(library.path))
        self.read: Any = holding.moduli_read
        self.read.argtypes = [ctypes.py_object, _INTEGER, *([_ADDRESS] * 6)]
        self.read.restype = _INTEGER
        self.bind: Any = holding.moduli_bind
        self.bind.argtypes = [ctypes.py_object, *([_ADDRESS] * 4)]
        self.bind.restype = _INTEGER
        self.same: Any = holding.moduli_same
        self.same.argtypes = [_INTEGER, *([_ADDRESS] * 5)]
        self.same.restype = _INTEGER
        functions = find_tensor_reader()
        classes = [id(torch.Tensor), id(torch.nn.Parameter)]
        self._reader = None if functions is None else array("Q", [*functions, *classes])
        self.python = 0 if self._reader is None else self._reader.buffer_info()[0]

    def facts(self, lists: Lists) -> array[int] | None:
        """Return the layouts of these tensors, for `compare`; None if the reader can't take them."""
        axes = sum(tensor.dim() for tensors in lists for tensor in tensors)
        count = sum(map(len, lists))
        facts = array("q", bytes(8 * max(1, 2 * count + 2 * axes)))
        blank = array("Q", bytes(8 * max(1, count)))
        status = self._call(lists, array("q", map(len, lists)), None, facts.buffer_info()[0], blank, blank)
        return facts if status == 0 else None

    def compare(
        self, lists: Lists, lengths: array[int], facts: array[int], before: array[int]
    ) -> tuple[int, array[int]]:
        """Return -1 if a tensor differs, else a bit for each list that moved; and the current addresses.

        Args:
            lists: The lists.
            lengths: Their lengths.
            facts: The layouts to compare with.
            before: The addresses to compare with.
        """
        now = array("Q", bytes(8 * len(before)))
        return self._call(lists, lengths, facts.buffer_info()[0], None, now, before), now

    def _call(self, lists: Sequence[Any], lengths: array[int], known: Any, facts: Any, *places: array[int]) -> int:
        if not self.python:
            return -1
        arguments, addresses = tuple(lists), [place.buffer_info()[0] for place in (lengths, *places)]
        try:
            return int(self.read(arguments, len(arguments), addresses[0], self.python, known, facts, *addresses[1:]))
        except READ_ERRORS:
            return -1


def load_runtime() -> Runtime:
    """Return the shared library, built or from the cache."""
    source = Path(__file__).with_name("_runtime.c").read_text(encoding="utf-8")
    exported = ["moduli_read", "moduli_bind", "moduli_same", "moduli_huge", "moduli_reduce"]
    return Runtime(build(HEADERS + HALF + source, exported))


def look_up(holder: Any, name: str, none: Any) -> Any:
    """Return an entry of a dictionary, or an attribute of another object; `none` if there is none.

    Args:
        holder: The dictionary, or the object.
        name: The key, or attribute.
        none: The value for a missing one.
    """
    if isinstance(holder, dict | MappingProxyType):
        return holder.get(name, none)
    try:
        return getattr(holder, name, none)
    except ValueError:  # an unassigned variable of an enclosing function
        return none


class Names:
    """Names and the objects that they referred to, to be compared in one call.

    Args:
        runtime: The compiled reader, if there is one.
        places: For each name its holder (a dictionary, or an object whose attribute it is), the name and the object; the
            marker `none` if there was none.
        none: The marker.
    """

    def __init__(self, runtime: Runtime | None, places: Sequence[tuple[Any, str, Any]], none: Any) -> None:
        self._places = list(places)
        self._none = none
        hidden = any(isinstance(holder, MappingProxyType) for holder, _, _ in places)
        self._runtime = runtime if runtime is not None and runtime.python and not hidden else None
        attributes = [type(holder) is not dict for holder, _, _ in places]
        self._kinds = array("q", attributes or [False])
        columns = [[place[k] for place in places] for k in range(3)]
        self._arrays = [array("Q", [0 if each is none else id(each) for each in column] or [0]) for column in columns]
        addresses = [each.buffer_info()[0] for each in (*self._arrays, self._kinds)]
        self._arguments = (len(places), 0 if runtime is None else runtime.python, *addresses)

    def get_comparison(self) -> tuple[Callable[..., int], tuple[int, ...]]:
        """Return a function with its arguments that returns the position of a name with another object, or -1."""
        return (self._compare, ()) if self._runtime is None else (self._runtime.same, self._arguments)

    def _compare(self) -> int:
        return next((i for i, place in enumerate(self._places) if self.look(i) is not place[2]), -1)

    def look(self, i: int) -> Any:
        """Return the current object of a name."""
        holder, name, _ = self._places[i]
        return look_up(holder, name, self._none)

    def update(self, i: int, value: Any) -> None:
        """Compare with this object, which is equal to the one before, from now on."""
        holder, name, _ = self._places[i]
        self._places[i] = (holder, name, value)  # referenced, so that its address is not reused
        self._arrays[2][i] = id(value)


class WarmTable(ctypes.Structure):
    """`m_warm` of the C file: the data that the lists of a warm call are compared with."""

    _fields_ = (
        *((name, _INTEGER) for name in ("count", "n")),
        *((name, _ADDRESS) for name in ("lengths", "known", "before", "extents", "written")),
        ("ranges", _INTEGER),
        *((name, _ADDRESS) for name in ("begin", "end")),
        ("columns", _INTEGER),
        *((name, _ADDRESS) for name in ("fixed", "source")),
    )
