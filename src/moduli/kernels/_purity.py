"""The values that a traced function reads besides its arguments, and the check that they have not changed.

A graph has these values as constants. So a function that is to be fused is **pure**: it reads its arguments, plain
attributes of `self` (numbers, strings, bools, None, dtypes, tuples of those), and names of its module or of the function around
it that refer to modules, functions (under the same rule), classes or constants. `self` is replaced by a `SelfRecorder` while the
function is traced; names are looked up in its code. The values are compared at every call; anything else (a dictionary of
settings, an object) is a `problem`, and the function runs unfused.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from .._torch import find_namespace
from . import _backend
from ._runtime import Names, Runtime, look_up

_MISSING = NotImplemented  # no program stores it under a name
_CONSTANTS: tuple[type, ...] = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), range, slice, np.generic, np.dtype, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, type(NotImplemented)),
)
# The values of tensors can't enter a graph: the tracer raises if they are read.
_OPERATIONS = (torch.Tensor, torch.Generator, types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc)
_LIBRARIES = frozenset({"torch", "numpy", "math", "cmath", "operator", "builtins", "itertools", "functools", "typing"})
_HIDES = frozenset({"globals", "locals", "vars", "eval", "exec"})


def is_of_library(name: str | None) -> bool:
    """Return whether a module is one of those whose functions read nothing that a program changes."""
    return name is not None and name.partition(".")[0] in _LIBRARIES


class Purity:
    """The values that a function read besides its arguments, their names, and why not all of them can be compared."""

    def __init__(self) -> None:
        #: Why the function is not pure; None if it is.
        self.problem: str | None = None
        #: By holder (a dictionary, or an object whose attribute it is) and name: the value, and a description.
        self._places: dict[tuple[int, str], tuple[Any, Any, str]] = {}
        self._seen: dict[int, Any] = {}
        self._dtype = torch.get_default_dtype()
        self._names: Names | None = None

    def is_stale(self) -> bool:
        """Return whether a value has changed, or can't be compared."""
        return self.problem is not None or self.find_change() is not None

    def find_change(self) -> str | None:
        """Return a description of a value that has changed; None if none has. Called at every call."""
        find_changed, arguments = self.get_comparison()
        names = self._names
        while names is not None and (i := find_changed(*arguments)) >= 0:
            _, value, words = list(self._places.values())[i]
            now = names.look(i)
            if not _equal(now, value):
                return words
            names.update(i, now)
        return None if torch.get_default_dtype() is self._dtype else "the default dtype"

    def get_comparison(self) -> tuple[Callable[..., int], tuple[int, ...]]:
        """Return a function with its arguments that returns -1 if all values are the same objects."""
        if self._names is None:
            shared = _backend.runtime()
            places = [(holder, name, value) for (_, name), (holder, value, _) in self._places.items()]
            self._names = Names(shared if isinstance(shared, Runtime) else None, places, _MISSING)
        return self._names.get_comparison()

    def note(self, holder: Any, name: str, words: str, names: frozenset[str]) -> Any:
        """Return the value of a name; check it, and compare it at later calls.

        Args:
            holder: A dictionary, or an object.
            name: The key, or attribute.
            words: A description of it.
            names: The names that the code may look up in the value.
        """
        noted = self._places.get((id(holder), name))
        if noted is not None:
            return noted[1]
        value = look_up(holder, name, _MISSING)
        self._places[id(holder), name] = (holder, value, words)
        self.check(value, words, names)
        return value

    def check(self, value: Any, words: str, names: frozenset[str]) -> None:
        """Set `problem` if a value may not be read.

        Args:
            value: The value.
            words: A description of it.
            names: The names that the code may look up in it.
        """
        if isinstance(value, _CONSTANTS + _OPERATIONS) or self.problem is not None:
            return
        if isinstance(value, tuple | frozenset):
            for item in value:
                self.check(item, words, names)
        elif isinstance(value, types.ModuleType | type):
            self._check_namespace(value, names)
        elif isinstance(value, types.FunctionType):
            self.check_function(value)
        elif isinstance(value, staticmethod | classmethod):
            self.check(value.__func__, words, names)
        elif isinstance(value, property):
            for part in (value.fget, value.fset):
                self.check(part, words, names)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, *value.keywords.values()):
                self.check(part, words, names)
        elif not self._is_operation(value):
            self.problem = f"{words} is a {type(value).__name__}, and what changes in it is not compared"

    @staticmethod
    def _is_operation(value: Any) -> bool:
        """Return whether a value is a function written in C or an operation of torch, which read nothing else."""
        if isinstance(value, types.BuiltinFunctionType):
            return value.__self__ is None or isinstance(value.__self__, types.ModuleType | type)
        return type(value).__module__.partition(".")[0] in ("torch", "typing") and callable(value)

    def _check_namespace(self, space: Any, names: frozenset[str]) -> None:
        """Note the names that the code may look up in a module or a class."""
        if isinstance(space, types.ModuleType):
            if not is_of_library(space.__name__):
                for name in names & vars(space).keys():
                    self.note(vars(space), name, f"{space.__name__}.{name}", names)
            return
        for kind in space.__mro__:
            if not is_of_library(kind.__module__):
                wanted = {name for name in vars(kind) if name in names or name in ("__init__", "__new__", "__call__")}
                for name in wanted:
                    self.note(get_namespace(kind), name, f"{kind.__name__}.{name}", names)

    def check_function(self, function: types.FunctionType) -> None:
        """Note the names in the code of a function, and of the functions in it."""
        if id(function) in self._seen or is_of_library(function.__module__):
            return
        self._seen[id(function)] = function
        where, names = function.__qualname__, list_names(function.__code__)
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._places[id(function), name] = (function, getattr(function, name), f"{where}.{name}")
        for value in (function.__defaults__ or (), *(function.__kwdefaults__ or {}).values()):
            self.check(value, f"a default of {where}", names)
        space = function.__globals__
        for name in sorted(list_globals(function.__code__)):
            if name in space:
                self.note(space, name, f"{where}.{name}", names)
            elif name in _HIDES and hasattr(builtins, name) and self.problem is None:
                self.problem = f"{where} uses {name}, and what it reads by it is not known"
        for name in names & sys.modules.keys():  # modules that it may import
            self._check_namespace(sys.modules[name], names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.note(cell, "cell_contents", f"{where}.{name}", names)


class _SelfRecorderType(type):
    def __getattr__(cls, name: str) -> Any:
        raise AttributeError(
            f"a function that is to be fused reads type(self).{name}; write self.{name}, so that a change is noticed"
        )


class SelfRecorder(metaclass=_SelfRecorderType):
    """A proxy that is passed as `self` while a method is traced; it notes the attributes that are read from the object.

    Args:
        target: The object.
        purity: The notes.
        given: Attributes that are replaced while it is traced.

    Example:
        >>> from moduli.kernels import SelfRecorder
        >>> from moduli.kernels._purity import Purity
        >>> class Scale:
        ...     rate = 2.0
        ...     def apply(self, x):
        ...         return x * self.rate
        >>> noted = Purity()
        >>> SelfRecorder(Scale(), noted).apply(3.0), noted.find_change()
        (6.0, None)
        >>> Scale.rate = 5.0
        >>> noted.find_change()
        'Scale.rate'
    """

    def __init__(self, target: Any, purity: Purity, given: Mapping[str, Any] | None = None) -> None:
        own = object.__getattribute__(self, "__dict__")
        own["target"], own["purity"], own["given"] = target, purity, dict(given or {})

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        target, purity, replaced = own["target"], own["purity"], own["given"]
        kind = type(target)
        if name == "__class__":
            return kind
        if name in replaced:
            return replaced[name]
        words = f"{kind.__name__}.{name}"
        attribute: Any = _MISSING
        for base in kind.__mro__:
            if not is_of_library(base.__module__):  # an attribute added to the class later would hide that of its base
                attribute = purity.note(get_namespace(base), name, words, frozenset())
            elif name in vars(base):
                attribute = vars(base)[name]
            if attribute is not _MISSING:
                break
        if isinstance(attribute, property):
            return attribute.fget(self)  # type: ignore[misc]
        if isinstance(attribute, types.MemberDescriptorType):
            return purity.note(target, name, words, frozenset())
        value = (
            _MISSING
            if getattr(target, "__dict__", None) is None
            else purity.note(vars(target), name, words, frozenset())
        )
        if value is not _MISSING:
            return value
        if attribute is _MISSING:
            getter = getattr(kind, "__getattr__", None)
            return getattr(target, name) if getter is None else types.MethodType(getter, self)(name)
        if isinstance(attribute, staticmethod | classmethod):
            return attribute.__get__(None, kind)
        return types.MethodType(attribute, self) if isinstance(attribute, types.FunctionType) else attribute

    def __setattr__(self, name: str, value: Any) -> None:
        own = object.__getattribute__(self, "__dict__")
        own["given"][name] = value
        if own["purity"].problem is None:
            own["purity"].problem = f"it writes {type(own['target']).__name__}.{name}, which one pass can't repeat"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return SelfRecorder.__getattribute__(self, "__call__")(*args, **kwargs)


def make_pure(fn: Callable[..., Any], purity: Purity) -> Callable[..., Any]:
    """Return the function to trace: objects whose method it is are replaced by recorders."""
    if hasattr(fn, "record_with"):
        return fn.record_with(purity)  # type: ignore[no-any-return]
    if isinstance(fn, types.FunctionType):
        purity.check_function(fn)
        return fn
    if isinstance(fn, types.MethodType) and not isinstance(fn.__self__, type):
        purity.check(fn.__func__, getattr(fn, "__qualname__", "the function"), frozenset())
        return types.MethodType(fn.__func__, SelfRecorder(fn.__self__, purity))
    if any(isinstance(vars(base).get("__call__"), types.FunctionType) for base in type(fn).__mro__):
        return SelfRecorder(fn, purity)
    purity.check(fn, getattr(fn, "__name__", type(fn).__name__), frozenset())
    return fn


def _equal(now: Any, value: Any) -> bool:
    """Return whether two objects are the same plain value; other objects are never equal."""
    if type(now) is not type(value) or not isinstance(now, _CONSTANTS):
        return False
    # As text, 0.0 differs from -0.0, and NaN equals itself.
    return repr(now) == repr(value) if isinstance(now, float) else bool(now == value)


def get_namespace(kind: type) -> Any:
    """Return the dictionary of a class, or its read-only view if the dictionary is not accessible."""
    space = find_namespace(kind)
    return kind.__dict__ if space is None else space


@functools.lru_cache(maxsize=4096)
def list_globals(code: types.CodeType) -> frozenset[str]:
    """Return the names that the code, and functions inside it, look up in its module or among the builtins."""
    inner = [list_globals(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    loads = (each for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return frozenset(each.argval for each in loads).union(*inner)


@functools.lru_cache(maxsize=4096)
def list_names(code: types.CodeType) -> frozenset[str]:
    """Return the names and strings in the code and in functions inside it, which it may look up in a namespace."""
    inner = [list_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    texts = (each for each in code.co_consts if isinstance(each, str) and each.isidentifier())
    return frozenset(code.co_names).union(texts, *inner)
