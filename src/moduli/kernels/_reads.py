"""What a function reads besides its arguments, so that a change of it is noticed.

A traced function has become numbers: what it read from `self`, a configuration, a class, a module or a closure is part of
the graph. So the tracer watches which Python functions run, and for each of them this module looks up the names in its
code: in its globals and its closure, and in the objects that it was called with, or that a function returned to it, and that
existed before. The values found are compared at every call, by identity first. Where something can't be compared, `problem`
says so and the function runs plain.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import operator
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, repeat, zip_longest
from typing import Any

import numpy as np
import torch

from ._memory import pause_collection

_MISSING = NotImplemented  # no program keeps it
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), range, slice, np.generic, enum.Enum)
_VALUES = (*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type(...), np.dtype)
# The numbers of tensors can't enter a graph: the tracer refuses to read them. An operation of torch is what it is.
_IGNORED = (*_VALUES, torch.Tensor, torch.Generator, type(torch.ops.aten.add.Tensor), types.CodeType, type(_MISSING))
_LIBRARIES = frozenset({"torch", "numpy", "builtins", "moduli.kernels._trace"} | sys.stdlib_module_names)
# Their classes hold what a program puts into them.
_HOLDERS = frozenset({"collections", "_collections_abc", "os", "weakref", "configparser"})
# They name what they look up, or keep what they found, where it is not seen.
_LOOKUPS = (
    operator.attrgetter,
    operator.itemgetter,
    operator.methodcaller,
    type(functools.lru_cache(len)),
    weakref.ref,
)
_CONTAINERS = (dict, types.MappingProxyType, list, tuple, set, frozenset, deque)
# Callables that are no Python functions themselves, and what stands behind them.
_WRAPPERS = (types.MethodType, types.BuiltinFunctionType, functools.partial)
_PARTS = ("__func__", "__self__", "func", "args", "keywords")
# Of slots, and of attributes that a class written in C computes.
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_MOST = 4000


def _is_of_library(name: str | None) -> bool:
    return name is not None and (name in _LIBRARIES or name.partition(".")[0] in _LIBRARIES)


class Watcher:
    """Runs a function and keeps the Python frames that ran, with the objects they were called with."""

    def __init__(self) -> None:
        self.frames: list[tuple[types.CodeType, dict[str, Any], list[Any]]] = []

    def run(self, fn: Callable[[], Any]) -> Any:
        """Call it. A thread has one profiler, so there must be none yet.

        No cycles are collected meanwhile: finalizers and `gc.callbacks` of others would count as part of the function.
        """
        with pause_collection():
            sys.setprofile(self._see)
            try:
                return fn()
            finally:
                sys.setprofile(None)

    def _see(self, frame: types.FrameType, event: str, result: Any) -> None:
        if event == "call":
            name = frame.f_globals.get("__name__")
            if name in _HOLDERS or not _is_of_library(name):
                self.frames.append((frame.f_code, frame.f_globals, _spread(frame.f_locals.values())))
        elif event == "return" and not isinstance(result, _IGNORED):
            caller = frame.f_back
            if caller is not None and not _is_of_library(caller.f_globals.get("__name__")):
                self.frames.append((caller.f_code, {}, _spread([result])))


def _spread(values: Iterable[Any]) -> list[Any]:
    """The objects in which something may be looked up, with those in containers, which may have been made for the call."""
    found: dict[int, Any] = {}
    waiting = [*values]
    while waiting and len(found) <= _MOST:
        value = waiting.pop()
        if not isinstance(value, _IGNORED) and id(value) not in found:
            found[id(value)] = value
            if type(value) is tuple or type(value) is list:
                waiting += value
            elif type(value) is dict:
                waiting += value.values()
    return [*found.values()]


class Reads:
    """The values that a function read, and where they are: found by following names from objects to what they stand for."""

    def __init__(self, fn: Callable[..., Any], first: Watcher, second: Watcher) -> None:
        """From two runs: an object that both were given existed before, so it is not a result of what was read."""
        #: Why not all of it can be compared.
        self.problem: str | None = None
        #: By way of looking and id: the way, the object, and what is looked up in it, with words about it.
        self._places: dict[tuple[Any, int], tuple[Callable[..., Iterable[Any]], Any, dict[Any, str]]] = {}
        self._seen: dict[tuple[int, frozenset[str]], Any] = {}  # the objects are held, so that an id is a name
        self._functions: list[types.FunctionType] = []
        self._follow(fn, frozenset(("__call__",)), getattr(fn, "__name__", type(fn).__name__))
        known = {id(value) for _, _, given in first.frames for value in given}
        for code, space, given in second.frames:
            names, where = _names(code), code.co_qualname
            self._note(_look_in_mapping, space, [name for name in code.co_names if name in space], names, where)
            imported = [sys.modules[name] for name in code.co_names if name in sys.modules]
            for value in [*imported, *(value for value in given if id(value) in known)]:
                self._follow(value, names, where)
        self._follow_closures({code for code, _, _ in second.frames})
        self._seen.clear()
        self._before = self._look()

    def _look(self) -> list[Any]:
        found = chain.from_iterable([how(holder, keys) for how, holder, keys in self._places.values()])
        return [torch.get_default_dtype(), *found]

    def is_stale(self) -> bool:
        """Whether what was read is not as it was, or can't be compared."""
        return self.problem is not None or self.find_change() is not None

    def find_change(self) -> str | None:
        """What is not as it was, in words; None where everything is. Every call asks, by identity first."""
        now, before = self._look(), iter(self._before)
        if len(now) == len(self._before) and all(map(operator.is_, now, self._before)):
            return None
        if next(before) is not now[0]:
            return "the default dtype"
        for how, holder, keys in self._places.values():
            for words, value in zip_longest(keys.values(), how(holder, keys)):
                if not _equal(value, next(before, _MISSING)):
                    return words or f"a {type(holder).__name__}"
        return None

    def _note(
        self, how: Callable[..., Iterable[Any]], holder: Any, keys: Iterable[Any], names: frozenset[str], where: str
    ) -> None:
        """Have what is found under keys compared, and follow it."""
        looked = {key: f"{where}.{key}" for key in keys if key != "__builtins__"}
        if looked:
            found = [*how(holder, looked)]
            if not isinstance(holder, tuple | frozenset):
                self._places.setdefault((how, id(holder)), (how, holder, {}))[2].update(looked)
            for value in found:
                self._follow(value, names, where)

    def _follow(self, value: Any, names: frozenset[str], where: str) -> None:
        """Note what can be reached from a value by these names."""
        kind = type(value)
        if isinstance(value, _IGNORED) or (id(value), names) in self._seen or self.problem is not None:
            return
        self._seen[id(value), names] = value
        if len(self._seen) > _MOST:
            self.problem = f"{where} reads from more objects than can be watched"
        elif isinstance(value, types.FunctionType):
            self._functions.append(value)
        elif isinstance(value, types.ModuleType):
            if not _is_of_library(value.__name__):
                self._note(_look_in_dict, value, names & vars(value).keys(), names, value.__name__)
        elif isinstance(value, type):
            self._follow_class(value, names)
        elif isinstance(value, _WRAPPERS):
            for part in _PARTS:
                self._follow(getattr(value, part, _MISSING), names, where)
        elif isinstance(value, _CONTAINERS):
            self._follow_container(value, names, where)
        elif (hasattr(value, "__dict__") or hasattr(kind, "__slots__")) and not isinstance(value, _LOOKUPS):
            self._follow_instance(value, names)
        elif isinstance(value, _LOOKUPS) or not (callable(value) or hasattr(kind, "__get__")):
            self.problem = f"{where} reads a {kind.__name__}, and what changes in it can't be seen"

    def _follow_closures(self, codes: set[types.CodeType]) -> None:
        """The variables around the functions that ran and were found; others were made by one that ran."""
        for function in self._functions:  # it grows meanwhile
            if function.__code__ in codes:
                names, where = _names(function.__code__), function.__qualname__
                self._note(_look_at_attributes, function, ("__code__", "__defaults__", "__kwdefaults__"), names, where)
                for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                    with contextlib.suppress(ValueError):  # not assigned yet
                        self._note(_look_at_attributes, cell, ("cell_contents",), names, f"{where}.{name}")

    def _follow_container(self, value: Any, names: frozenset[str], where: str) -> None:
        keys = list(value) if isinstance(value, dict | types.MappingProxyType) else []
        # What is kept for each tensor is out of reach: a traced function is given stand-ins of them.
        if any(isinstance(key, torch.Tensor) for key in keys):
            return
        self._note(_look_at_all, value, (f"a {type(value).__name__}",), names, where)
        self._note(_look_in_mapping, value, keys, names, where)
        if hasattr(value, "__dict__"):
            self._follow_instance(value, names)

    def _follow_instance(self, value: Any, names: frozenset[str]) -> None:
        kind, state = type(value), getattr(value, "__dict__", None)
        slots = {name for base in kind.__mro__ for name, held in vars(base).items() if isinstance(held, _DESCRIPTORS)}
        if names & {"getattr", "vars", "__dict__", "attrgetter"}:
            names = names.union(slots, state or ())
        self._note(_look_at_attributes, value, names & slots, names, kind.__name__)
        if state is not None:
            # One that the class has may come to be hidden by one of the object.
            held = state.keys() | {name for base in kind.__mro__ for name in vars(base)}
            self._note(_look_in_dict, value, (names - slots) & held, names, kind.__name__)
        self._follow_class(kind, names)

    def _follow_class(self, kind: type, names: frozenset[str]) -> None:
        own = [base for base in kind.__mro__ if not _is_of_library(base.__module__)]
        known = {name for base in own for name in vars(base) if name == "__call__" or not name.startswith("__")}
        wanted = names & known
        for base in own:
            self._note(_look_in_dict, base, wanted, names, kind.__name__)
            wanted = wanted - vars(base).keys()


def _equal(now: Any, value: Any) -> bool:
    """Whether two objects are the same plain value; what is not a plain value is the same by identity only."""
    if now is value or type(now) is not type(value) or not isinstance(now, _VALUES):
        return now is value
    # By its text a float is told from one of the other sign, and a NaN is itself.
    return repr(now) == repr(value) if isinstance(now, float) else bool(now == value)


def _names(code: types.CodeType) -> frozenset[str]:
    """The names and strings in the code: what it may look up in an object."""
    return frozenset(code.co_names).union(each for each in code.co_consts if isinstance(each, str))


# Ways to look: each gives what a holder has under keys.


def _look_in_dict(holder: Any, keys: Iterable[Any]) -> Iterable[Any]:
    """Attributes of an object or a class itself: no property runs, and no base is asked."""
    return map(holder.__dict__.get, keys, repeat(_MISSING))


def _look_at_attributes(holder: Any, keys: Iterable[Any]) -> Iterable[Any]:
    return map(getattr, repeat(holder), keys, repeat(_MISSING))


def _look_in_mapping(mapping: Any, keys: Iterable[Any]) -> Iterable[Any]:
    return map(mapping.get, keys, repeat(_MISSING))


def _look_at_all(held: Any, keys: Iterable[Any]) -> Iterable[Any]:
    return (len(held), *held)
