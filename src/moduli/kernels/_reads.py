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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
        walk = _Walk()
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
        self.problem = walk.problem
        self._dtype = torch.get_default_dtype()
        self._places = [(how, holder, names) for (how, _), (holder, names) in walk.places.items()]
        self._before = self._look()

    def _look(self) -> list[Any]:
        found: list[Any] = []
        for how, holder, names in self._places:
            found += how(holder, names)
        return found

    def is_stale(self) -> bool:
        """Whether what was read is not as it was, or can't be compared."""
        return self.problem is not None or self.find_change() is not None

    def find_change(self) -> str | None:
        """What is not as it was, in words; None where everything is. Every call asks, by identity first."""
        if torch.get_default_dtype() is not self._dtype:
            return "the default dtype"
        now = self._look()
        if len(now) == len(self._before) and all(map(operator.is_, now, self._before)):
            return None
        before = iter(self._before)
        for how, holder, names in self._places:
            words = list(names.values())
            for i, value in enumerate(how(holder, names)):
                if not _equal(value, next(before, _MISSING)):
                    return words[min(i, len(words) - 1)]
        return None


def _equal(now: Any, value: Any) -> bool:
    """Whether two objects are the same plain value; what is not a plain value is the same by identity only."""
    if now is value or type(now) is not type(value) or not isinstance(now, _VALUES):
        return now is value
    # By its text a float is told from one of the other sign, and a NaN is itself.
    return repr(now) == repr(value) if isinstance(now, float) else bool(now == value)


# Ways to look: each gives what a holder has under names, which are keys here and words about them as values.


def _look_in_dict(holder: Any, names: Mapping[str, str]) -> Sequence[Any]:
    """Attributes of an object or a class itself: no property runs, and no base is asked."""
    own = holder.__dict__
    return [own.get(name, _MISSING) for name in names]


def _look_in_slots(holder: Any, names: Mapping[str, str]) -> Sequence[Any]:
    return [getattr(holder, name, _MISSING) for name in names]


def _look_in_mapping(mapping: Mapping[Any, Any], keys: Mapping[Any, str]) -> Sequence[Any]:
    return [mapping.get(key, _MISSING) for key in keys]


def _look_in_cell(cell: Any, names: Mapping[str, str]) -> Sequence[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # not assigned yet
        return (_MISSING,)


def _look_at_function(function: FunctionType, names: Mapping[str, str]) -> Sequence[Any]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _look_at_all(held: Collection[Any], names: Mapping[str, str]) -> Sequence[Any]:
    return (len(held), *held)


def _names(code: CodeType) -> frozenset[str]:
    """The names and strings in the code: what it may look up in an object."""
    found = set(code.co_names)
    for constant in code.co_consts:
        found.update(
            each for each in (constant if isinstance(constant, tuple) else [constant]) if isinstance(each, str)
        )
    return frozenset(found)


# Of slots, and of attributes that a class written in C computes.
_DESCRIPTORS = (MemberDescriptorType, GetSetDescriptorType)
_ANY = frozenset({"getattr", "vars", "__dict__", "attrgetter"})


class _Walk:
    """Follows names from objects to the values they stand for."""

    def __init__(self) -> None:
        self.problem: str | None = None
        #: By way of looking and id: the object, and what is looked up in it.
        self.places: dict[tuple[Callable[..., Sequence[Any]], int], tuple[Any, dict[Any, str]]] = {}
        self.seen: dict[tuple[int, frozenset[str]], Any] = {}  # the objects are held, so that an id is a name
        self.functions: dict[CodeType, list[FunctionType]] = {}

    def frame(self, code: CodeType, space: dict[str, Any], objects: Iterable[Any]) -> None:
        """What one function looked up, given these objects."""
        names = _names(code)
        where = code.co_qualname
        for name in code.co_names:
            if name in space:
                self._note(_look_in_mapping, space, name, names, f"{name} of {where}")
            elif name in sys.modules:  # it may import it
                self._note(_look_in_mapping, sys.modules, name, names, f"{name} of {where}")
        for held in objects:
            self.follow(held, names, where)

    def closures(self, codes: set[CodeType]) -> None:
        """The variables around the functions that ran and were found; others were made by one that ran."""
        done: set[int] = set()
        while waiting := [f for code in codes for f in self.functions.get(code, ()) if id(f) not in done]:
            for function in waiting:
                done.add(id(function))
                names, where = _names(function.__code__), function.__qualname__
                self._note(_look_at_function, function, None, names, where)
                for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                    self._note(_look_in_cell, cell, name, names, f"{name} of {where}")

    def follow(self, value: Any, names: frozenset[str], where: str) -> None:
        """Note what can be reached from a value by these names."""
        kind = type(value)
        if value is _MISSING or isinstance(value, (*_VALUES, *_TENSORS, CodeType)):
            return
        if (id(value), names) in self.seen or self.problem is not None:
            return
        self.seen[id(value), names] = value
        if len(self.seen) > _MOST:
            self.problem = f"{where} reads from more objects than can be watched"
        elif isinstance(value, FunctionType):
            self.functions.setdefault(value.__code__, []).append(value)
        elif isinstance(value, _LOOKUPS):
            self.problem = f"{where} reads through a {kind.__name__}, and what it finds can't be seen"
        elif isinstance(value, ModuleType):
            for name in () if _is_of_library(value.__name__) else names & vars(value).keys():
                self._note(_look_in_dict, value, name, names, f"{value.__name__}.{name}")
        elif isinstance(value, type):
            self._class(value, names)
        elif (parts := _find_parts(value)) is not None:
            for part in parts:
                self.follow(part, names, where)
        elif isinstance(value, dict | MappingProxyType | list | tuple | set | frozenset | deque):
            self._container(value, names, where)
        elif hasattr(value, "__dict__") or hasattr(kind, "__slots__"):
            self._instance(value, names)
        elif not (callable(value) or hasattr(kind, "__get__")):
            self.problem = f"{where} reads a {kind.__name__}, whose changes can't be seen"

    def _note(
        self, how: Callable[..., Sequence[Any]], holder: Any, key: Any, names: frozenset[str], words: str
    ) -> None:
        """Have what is found under a key compared, and follow it."""
        looked = {key: words}
        if key != "__builtins__":
            self.places.setdefault((how, id(holder)), (holder, {}))[1].update(looked)
        for value in how(holder, looked):
            self.follow(value, names, words)

    def _container(self, value: Any, names: frozenset[str], where: str) -> None:
        keyed = isinstance(value, dict | MappingProxyType)
        # What is kept for each tensor is out of reach: a traced function is given stand-ins of them.
        if keyed and any(isinstance(key, torch.Tensor) for key in value):
            return
        if isinstance(value, tuple | frozenset):
            for item in value:
                self.follow(item, names, where)
        else:
            self._note(_look_at_all, value, None, names, f"a {type(value).__name__}")
        for key in list(value) if keyed else ():
            self._note(_look_in_mapping, value, key, names, f"{key!r} of {where}")
        if hasattr(value, "__dict__"):
            self._instance(value, names)

    def _instance(self, value: Any, names: frozenset[str]) -> None:
        kind = type(value)
        state = getattr(value, "__dict__", {})
        slots = {name for base in kind.__mro__ for name, held in vars(base).items() if isinstance(held, _DESCRIPTORS)}
        for name in state.keys() | slots if names & _ANY else names:
            if name in slots:
                self._note(_look_in_slots, value, name, names, f"{kind.__name__}.{name}")
            elif name in state or (hasattr(value, "__dict__") and any(name in vars(base) for base in kind.__mro__)):
                self._note(_look_in_dict, value, name, names, f"{kind.__name__}.{name}")
        self._class(kind, names)

    def _class(self, kind: type, names: frozenset[str]) -> None:
        own = [base for base in kind.__mro__ if not _is_of_library(base.__module__)]
        for name in names:
            if (name.startswith("__") and name != "__call__") or not any(name in vars(base) for base in own):
                continue
            held = next(vars(base)[name] for base in own if name in vars(base))
            if getattr(kind, name, _MISSING) is held:  # one look at the class is one at all its bases
                self._note(_look_in_slots, kind, name, names, f"{kind.__name__}.{name}")
                continue
            for base in own:
                self._note(_look_in_dict, base, name, names, f"{kind.__name__}.{name}")
                if name in vars(base):
                    break


def _find_parts(value: Any) -> tuple[Any, ...] | None:
    """What stands behind a callable or a reference that is not a Python function itself."""
    if isinstance(value, MethodType):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, weakref.ref):
        return (value(),)
    return (value.__self__,) if isinstance(value, BuiltinFunctionType) else None
