"""What a function reads besides its arguments, so that a change of it is noticed.

A traced function has become numbers: what it read from `self`, a configuration, a class, a module or a closure is part of
the graph. So the tracer watches which Python functions run, and for each of them this module looks up the names in its
code: in its globals and its closure, and in the objects that it was called with, or that a function returned to it, and that
existed before. The values found are compared at every call, by identity first. Where something can't be compared, `problem`
says so and the function runs plain.
"""

from __future__ import annotations

import enum
import functools
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, TypeVar

import numpy as np
import torch

from ._memory import pause_collection

R = TypeVar("R")

_MISSING = object()
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), range, slice, np.generic, enum.Enum)
_VALUES = (*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type(...), np.dtype)
# Their numbers can't enter a graph: the tracer refuses to read them. An operation of torch is what it is.
_TENSORS = (torch.Tensor, torch.Generator, type(torch.ops.aten.add.Tensor))
_LIBRARIES = frozenset({"torch", "numpy", "builtins", "moduli.kernels._trace"} | sys.stdlib_module_names)
# Their classes hold what a program puts into them.
_HOLDERS = frozenset({"collections", "_collections_abc", "os", "weakref", "configparser"})
# They name what they look up, or keep what they found, where it is not seen.
_LOOKUPS = (operator.attrgetter, operator.itemgetter, operator.methodcaller, type(functools.lru_cache(len)))
_MOST = 4000
_SMALL = 4096


def _is_of_library(name: str | None) -> bool:
    return name is not None and (name in _LIBRARIES or name.partition(".")[0] in _LIBRARIES)


class Watcher:
    """Runs a function and keeps the Python frames that ran, with the objects they were called with."""

    def __init__(self) -> None:
        self.frames: list[tuple[CodeType, dict[str, Any], list[Any]]] = []

    def run(self, fn: Callable[[], R]) -> R:
        """Call it. A thread has one profiler, so there must be none yet.

        No cycles are collected meanwhile: finalizers and `gc.callbacks` of others would count as part of the function.
        """
        with pause_collection():
            sys.setprofile(self._see)
            try:
                return fn()
            finally:
                sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, result: Any) -> None:
        if event == "call":
            name = frame.f_globals.get("__name__")
            if name in _HOLDERS or not _is_of_library(name):
                self.frames.append((frame.f_code, frame.f_globals, _spread(frame.f_locals.values())))
        elif event == "return" and not isinstance(result, (*_VALUES, *_TENSORS)):
            caller = frame.f_back
            if caller is not None and not _is_of_library(caller.f_globals.get("__name__")):
                self.frames.append((caller.f_code, {}, _spread([result])))


def _spread(values: Iterable[Any]) -> list[Any]:
    """The objects in which something may be looked up, with those in containers, which may have been made for the call."""
    found: dict[int, Any] = {}
    waiting = [*values]
    while waiting and len(found) <= _MOST:
        value = waiting.pop()
        if not isinstance(value, (*_VALUES, *_TENSORS)) and id(value) not in found:
            found[id(value)] = value
            if type(value) is tuple or type(value) is list:
                waiting += value
            elif type(value) is dict:
                waiting += value.values()
    return [*found.values()]


class Reads:
    """The values that a function read, and where they are."""

    def __init__(self, fn: Callable[..., Any], first: Watcher, second: Watcher) -> None:
        """From two runs: an object that both were given existed before, so it is not a result of what was read."""
        self.problem: str | None = None
        self.attributes: list[tuple[Any, str]] = []
        self.items: list[tuple[Mapping[Any, Any], Any]] = []
        self.slots: list[tuple[Any, str]] = []
        self.cells: list[Any] = []
        self.sequences: list[Any] = []
        self.arrays: list[np.ndarray[Any, Any]] = []
        walk = _Walk(self)
        walk.follow(fn, frozenset(("__call__",)), getattr(fn, "__name__", type(fn).__name__))
        known = {id(value) for _, _, given in first.frames for value in given}
        seen: set[tuple[int, ...]] = set()
        for code, space, given in second.frames:
            objects = [value for value in given if id(value) in known]
            key = (id(code), *map(id, objects))
            if key not in seen:
                seen.add(key)
                walk.frame(code, space, objects)
        walk.closures({code for code, _, _ in second.frames})
        self._before = self._read()

    def _read(self) -> list[list[Any]]:
        """Everything that is compared, in the order of the lists. Every call reads it, so it is written to be quick."""
        return [
            [torch.get_default_dtype()],
            [holder.__dict__.get(name, _MISSING) for holder, name in self.attributes],
            [mapping.get(key, _MISSING) for mapping, key in self.items],
            [getattr(holder, name, _MISSING) for holder, name in self.slots],
            [_content(cell) for cell in self.cells],
            [tuple(held) for held in self.sequences],
            [array.tobytes() for array in self.arrays],
        ]

    def is_stale(self) -> bool:
        """Whether what was read is not as it was, or can't be compared."""
        return self.problem is not None or self.find_change() is not None

    def find_change(self) -> str | None:
        """What is not as it was, in words; None where everything is."""
        for k, (values, before) in enumerate(zip(self._read(), self._before, strict=True)):
            if all(map(operator.is_, values, before)):
                continue
            for i, (now, value) in enumerate(zip(values, before, strict=True)):
                if now is not value and not _equal(now, value):
                    return self._name(k, i)
        return None

    def _name(self, kind: int, i: int) -> str:
        if kind in (1, 3):
            holder, name = (self.attributes if kind == 1 else self.slots)[i]
            return f"{(holder if isinstance(holder, type) else type(holder)).__name__}.{name}"
        if kind == 2:
            return f"{self.items[i][1]!r}"
        if kind == 5:
            return f"a {type(self.sequences[i]).__name__}"
        return {0: "the default dtype", 4: "a variable of the closure"}.get(kind, "an array")


def _equal(now: Any, value: Any) -> bool:
    """Whether two objects are the same plain value; what is not a plain value is the same by identity only."""
    if type(now) is tuple and type(value) is tuple:  # what a container held
        if len(now) != len(value):
            return False
        same = map(operator.is_, now, value)
        return all(same) or all(a is b or _equal(a, b) for a, b in zip(now, value, strict=True))
    if type(now) is not type(value) or not isinstance(now, _VALUES):
        return False
    # By its text a float is told from one of the other sign, and a NaN is itself.
    return repr(now) == repr(value) if isinstance(now, float) else bool(now == value)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


def _names(code: CodeType) -> frozenset[str]:
    """The names and strings in the code: what it may look up in an object."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, tuple):
            found.update(item for item in constant if isinstance(item, str))
    return frozenset(found)


# Of slots, and of attributes that a class written in C computes.
_DESCRIPTORS = (MemberDescriptorType, GetSetDescriptorType)
_ANY = frozenset({"getattr", "vars", "__dict__", "attrgetter"})


class _Walk:
    """Follows names from objects to the values they stand for."""

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self.seen: dict[tuple[int, frozenset[str]], Any] = {}  # the objects are held, so that an id is a name
        self.told: set[tuple[Any, ...]] = set()
        self.functions: dict[CodeType, list[FunctionType]] = {}

    def frame(self, code: CodeType, space: dict[str, Any], objects: Iterable[Any]) -> None:
        """What one function looked up, given these objects."""
        names = _names(code)
        where = code.co_qualname
        for name in code.co_names:
            if name in space:
                self._item(space, name, names, f"{name} of {where}")
            elif name in sys.modules:  # it may import it
                self._item(sys.modules, name, names, f"{name} of {where}")
        for held in objects:
            self.follow(held, names, where)

    def closures(self, codes: set[CodeType]) -> None:
        """The variables around the functions that ran and were found; others were made by one that ran."""
        done: set[int] = set()
        while True:
            waiting = [f for code in codes for f in self.functions.get(code, ()) if id(f) not in done]
            if not waiting:
                return
            for function in waiting:
                done.add(id(function))
                names = _names(function.__code__)
                for name in ("__code__", "__defaults__", "__kwdefaults__"):
                    self.reads.slots.append((function, name))
                for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                    self.reads.cells.append(cell)
                    self.follow(_content(cell), names, f"{name} of {function.__qualname__}")
                self.follow(function.__defaults__, names, function.__qualname__)
                self.follow(function.__kwdefaults__, names, function.__qualname__)

    def follow(self, value: Any, names: frozenset[str], where: str) -> None:
        """Note what can be reached from a value by these names."""
        kind = type(value)
        if value is _MISSING or isinstance(value, (*_VALUES, *_TENSORS)):
            return
        if (id(value), names) in self.seen or self.reads.problem is not None:
            return
        self.seen[id(value), names] = value
        if len(self.seen) > _MOST:
            self.reads.problem = f"{where} reads from more objects than can be watched"
        elif isinstance(value, FunctionType):
            self.functions.setdefault(value.__code__, []).append(value)
        elif isinstance(value, MethodType):
            self.follow(value.__func__, names, where)
            self.follow(value.__self__, names, where)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.follow(part, names, where)
        elif isinstance(value, ModuleType):
            if not _is_of_library(value.__name__):
                for name in names & vars(value).keys():
                    self._item(vars(value), name, names, f"{value.__name__}.{name}")
        elif isinstance(value, type):
            self._class(value, names, where)
        elif isinstance(value, _LOOKUPS):
            self.reads.problem = f"{where} reads through a {kind.__name__}, and what it finds can't be seen"
        elif isinstance(value, weakref.ref):
            self.follow(value(), names, where)
        elif isinstance(value, dict | MappingProxyType):
            # What is kept for each tensor is out of reach: a traced function is given stand-ins of them.
            if not any(isinstance(key, torch.Tensor) for key in value):
                self._add_once(self.reads.sequences, value)
                for key in list(value):
                    self._item(value, key, names, f"{key!r} of {where}")
            if hasattr(value, "__dict__"):
                self._instance(value, names)
        elif isinstance(value, list | tuple | set | frozenset | deque):
            if not isinstance(value, tuple | frozenset):
                self._add_once(self.reads.sequences, value)
            for item in value:
                self.follow(item, names, where)
            if hasattr(value, "__dict__"):
                self._instance(value, names)
        elif isinstance(value, np.ndarray):
            if value.dtype.hasobject or value.nbytes > _SMALL:
                self.reads.problem = f"{where} reads an array of {value.nbytes} bytes"
            else:
                self._add_once(self.reads.arrays, value)
        elif hasattr(value, "__dict__") or hasattr(kind, "__slots__"):
            self._instance(value, names)
        elif not (callable(value) or hasattr(kind, "__get__")):
            self.reads.problem = f"{where} reads a {kind.__name__}, whose changes can't be seen"
        elif isinstance(value, BuiltinFunctionType):
            self.follow(value.__self__, names, where)

    def _add_once(self, entries: list[Any], entry: Any, *key: Any) -> None:
        told = key or (id(entry), "whole")
        if told not in self.told:
            self.told.add(told)
            entries.append(entry)

    def _item(self, mapping: Mapping[Any, Any], key: Any, names: frozenset[str], where: str) -> None:
        value = mapping.get(key, _MISSING)
        if key != "__builtins__":
            self._add_once(self.reads.items, (mapping, key), id(mapping), key)
        self.follow(value, names, where)

    def _instance(self, value: Any, names: frozenset[str]) -> None:
        kind = type(value)
        state = getattr(value, "__dict__", {})
        slots = {name for base in kind.__mro__ for name, held in vars(base).items() if isinstance(held, _DESCRIPTORS)}
        for name in state.keys() | slots if names & _ANY else names:
            if name in slots:
                held = getattr(value, name, _MISSING)
                self._add_once(self.reads.slots, (value, name), id(value), name)
                self.follow(held, names, f"{kind.__name__}.{name}")
                continue
            inherited = any(name in vars(base) for base in kind.__mro__)
            if name not in state and not inherited:
                continue
            if hasattr(value, "__dict__"):
                self._add_once(self.reads.attributes, (value, name), id(value), name)
            self.follow(state.get(name, _MISSING), names, f"{kind.__name__}.{name}")
        self._class(kind, names, kind.__name__)

    def _class(self, kind: type, names: frozenset[str], where: str) -> None:
        own = [base for base in kind.__mro__ if not _is_of_library(base.__module__)]
        for name in names:
            if (name.startswith("__") and name != "__call__") or not any(name in vars(base) for base in own):
                continue
            held = next(vars(base)[name] for base in own if name in vars(base))
            if getattr(kind, name, _MISSING) is held:  # one look at the class is one at all its bases
                self._add_once(self.reads.slots, (kind, name), id(kind), name)
                self.follow(held, names, f"{where}.{name}")
                continue
            for base in own:
                self._item(vars(base), name, names, f"{where}.{name}")
                if name in vars(base):
                    break
