"""Taking objects apart into the objects they refer to, and making new objects from other parts."""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moduli.device import Device
from moduli.nn import VirtualTensor

# Only this many items of a container are searched for parts of a model; if they contain none, the container holds data.
_MOST_ITEMS = 256

SCALARS = frozenset(
    (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type, Device)
)


class Anatomy(NamedTuple):
    """The parts of an object, and functions that make one from other parts; `finish` is None if that is not possible."""

    parts: list[Any]
    start: Callable[[], Any] | None
    finish: Callable[[Any, list[Any]], Any] | None
    # The items of a large container that are not in `parts`.
    rest: list[Any] | None = None


def may_refer(value: Any) -> bool:
    """Whether the class of a value can refer to anything."""
    kind: Any = type(value)
    return kind not in SCALARS and (choose_dissection(kind) is not None or kind is torch.ScriptObject)


def is_atomic(value: Any) -> bool:
    """Whether a value is immutable and refers to nothing: scalars, tuples of them, and functions without a closure."""
    kind = type(value)
    if kind in SCALARS:
        return True
    if kind is tuple:
        return SCALARS.issuperset(map(type, value))
    if kind is types.FunctionType:
        parts = (*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return not value.__dict__ and SCALARS.issuperset(map(type, parts))
    return kind is types.BuiltinMethodType and _dissect_builtin_method(value) is None


@functools.lru_cache(maxsize=4096)
def choose_dissection(kind: Any) -> Callable[[Any], Anatomy | None] | None:
    """Return the function that takes objects of a class apart; None if they refer to nothing."""
    for base, dissect in _DISSECTIONS.items():
        if issubclass(kind, base):
            return dissect
    slots = slot_names(kind)
    if not (slots or kind.__dictoffset__):
        return None
    return functools.partial(_dissect_object, slots, _find_maker(kind))


def _find_maker(kind: Any) -> Callable[[], Any] | None:
    """Return a function that makes an empty object of a class; None if attributes alone do not determine its objects."""
    bases: tuple[Any, ...] = (OrderedDict, dict, list, set, types.SimpleNamespace, object)
    base = next(each for each in bases if issubclass(kind, each))
    default = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is base.__reduce__
    copied = getattr(kind, "__copy__", None) is not getattr(base, "__copy__", None)
    if not default or copied or hasattr(kind, "__del__") or issubclass(kind, torch.optim.Optimizer):
        return None
    try:
        base.__new__(kind)
    except TypeError:
        return None
    return functools.partial(base.__new__, kind)


@functools.lru_cache(maxsize=4096)
def slot_names(kind: Any) -> tuple[str, ...]:
    """Return the names of the attributes in a class's `__slots__`, those of its bases included."""
    members = (each for base in kind.__mro__ if "__slots__" in vars(base) for each in vars(base).items())
    return tuple(name for name, member in members if type(member) is types.MemberDescriptorType)


def read_slots(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that are stored in `__slots__`."""
    kind: Any = type(value)
    return {name: getattr(value, name) for name in slot_names(kind) if hasattr(value, name)}


def _dissect_object(slots: tuple[str, ...], make: Callable[[], Any] | None, value: Any) -> Anatomy:
    state, slotted = getattr(value, "__dict__", {}), read_slots(value) if slots else {}
    names, slots, count = tuple(state), tuple(slotted), len(state)

    def finish(twin: Any, parts: list[Any]) -> Any:
        if names:
            twin.__dict__.update(zip(names, parts, strict=False))
        for name, part in zip(slots, parts[count:], strict=True):
            object.__setattr__(twin, name, part)
        return twin

    return Anatomy([*state.values(), *slotted.values()], make, None if make is None else finish)


def _dissect_container(value: Any) -> Anatomy | None:
    """Take a list, set, tuple or deque apart; attributes of a subclass are carried over."""
    kind = type(value)
    head = list(islice(value, _MOST_ITEMS))
    if SCALARS.issuperset(map(type, head)):
        return None
    rest = list(islice(value, _MOST_ITEMS, None)) if len(value) > _MOST_ITEMS else None
    attributes = dict(getattr(value, "__dict__", {}))
    if isinstance(value, tuple):
        return Anatomy(head, None, lambda _, parts: tuple.__new__(kind, parts), rest)
    if isinstance(value, frozenset):
        return Anatomy(head, None, lambda _, parts: kind(parts), rest)
    fill: Any = set.update if isinstance(value, set) else deque.extend if isinstance(value, deque) else list.extend
    make = _find_maker(kind) if attributes or kind not in (list, set, deque) else kind
    if kind is deque:
        make = functools.partial(deque, (), value.maxlen)

    def finish(twin: Any, parts: list[Any]) -> Any:
        fill(twin, parts)
        if attributes:
            twin.__dict__.update(attributes)
        return twin

    return Anatomy(head, make, None if make is None else finish, rest)


def _dissect_dict(value: Any) -> Anatomy | None:
    kind, count = type(value), len(value)
    heads = [list(islice(each, _MOST_ITEMS)) for each in (value, value.values())]
    if SCALARS.issuperset(map(type, heads[0])) and SCALARS.issuperset(map(type, heads[1])):
        return None
    attributes = dict(getattr(value, "__dict__", {}))
    factory = value.default_factory if isinstance(value, defaultdict) else None
    make = kind if kind in (dict, OrderedDict, defaultdict) else _find_maker(kind)

    def finish(twin: Any, parts: list[Any]) -> Any:
        head = min(count, _MOST_ITEMS)
        keys, values = parts[:head] + parts[2 * head : head + count], parts[head : 2 * head] + parts[head + count :]
        update = OrderedDict.update if isinstance(twin, OrderedDict) else dict.update
        update(twin, zip(keys, values, strict=True))
        if attributes:
            twin.__dict__.update(attributes)
        if factory is not None:
            twin.default_factory = factory
        return twin

    rest = None
    if count > _MOST_ITEMS:
        rest = [*islice(value, _MOST_ITEMS, None), *islice(value.values(), _MOST_ITEMS, None)]
    return Anatomy([*heads[0], *heads[1]], make, None if make is None else finish, rest)


def _dissect_method(value: Any) -> Anatomy:
    return Anatomy([value.__func__, value.__self__], None, lambda _, parts: types.MethodType(*parts))


def _dissect_builtin_method(value: Any) -> Anatomy | None:
    """Take a method of a built-in class apart, such as the `append` of a list."""
    owner, name = value.__self__, value.__name__
    if owner is None or isinstance(owner, types.ModuleType | type):
        return None
    return Anatomy([owner], None, lambda _, parts: getattr(parts[0], name))


def _dissect_partial(value: Any) -> Anatomy:
    kind, names, count = type(value), tuple(value.keywords), 1 + len(value.args)

    def finish(_: Any, parts: list[Any]) -> Any:
        return kind(*parts[:count], **dict(zip(names, parts[count:], strict=True)))

    return Anatomy([value.func, *value.args, *value.keywords.values()], None, finish)


def _dissect_function(value: Any) -> Anatomy | None:
    """Take a function apart: the contents of its closure, default arguments and attributes."""
    cells = value.__closure__ or ()
    filled = [place for place, cell in enumerate(cells) if _is_filled(cell)]
    defaults, keywords, attributes = value.__defaults__ or (), value.__kwdefaults__ or {}, value.__dict__
    parts = [*(cells[place].cell_contents for place in filled), *defaults, *keywords.values(), *attributes.values()]
    if not parts:
        return None
    code, scope, name, count = value.__code__, value.__globals__, value.__name__, len(cells)
    names, options, first = tuple(attributes), tuple(keywords), len(filled) + len(defaults)
    facts = {key: getattr(value, key) for key in ("__module__", "__qualname__", "__doc__", "__annotations__")}

    def start() -> Any:
        return types.FunctionType(code, scope, name, None, tuple(types.CellType() for _ in range(count)))

    def finish(twin: Any, parts: list[Any]) -> Any:
        for place, part in zip(filled, parts, strict=False):
            twin.__closure__[place].cell_contents = part
        twin.__defaults__ = tuple(parts[len(filled) : first]) or None
        twin.__kwdefaults__ = dict(zip(options, parts[first:], strict=False)) or None
        twin.__dict__.update(zip(names, parts[first + len(options) :], strict=True))
        for key, fact in facts.items():
            setattr(twin, key, fact)
        return twin

    return Anatomy(parts, start, finish)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises for an empty cell
    except ValueError:
        return False
    return True


def _dissect_cached_function(value: Any) -> Anatomy:
    """Take a function decorated by `functools.lru_cache` apart; a copy starts with an empty cache."""
    options = value.cache_parameters()
    return Anatomy([value.__wrapped__], None, lambda _, parts: functools.lru_cache(**options)(parts[0]))


def _dissect_reference(value: Any) -> Anatomy | None:
    referent = value()
    if referent is None:
        return None
    kind, callback = type(value), value.__callback__
    if kind is weakref.ref:
        return Anatomy([referent], None, lambda _, parts: weakref.ref(parts[0], callback))
    if kind is weakref.WeakMethod:
        return Anatomy([referent], None, lambda _, parts: weakref.WeakMethod(parts[0]))
    return Anatomy([referent], None, None)


def _dissect_proxy(value: Any) -> Anatomy | None:
    try:
        referent = value.__repr__.__self__
    except ReferenceError:
        return None
    return Anatomy([referent], None, lambda _, parts: weakref.proxy(parts[0]))


def _dissect_virtual(value: VirtualTensor) -> Anatomy:
    rebind = value.rebind
    # The materializer may refer to the model as well.
    return Anatomy([value.owner, value.materializer], None, lambda _, parts: rebind(*parts))


_DISSECTIONS: dict[Any, Callable[[Any], Anatomy | None] | None] = {
    # Not taken apart: modules are parts themselves, the others refer to nothing.
    (nn.Module, Tensor, type, enum.Enum, types.ModuleType, Device): None,
    VirtualTensor: _dissect_virtual,
    types.MethodType: _dissect_method,
    types.BuiltinMethodType: _dissect_builtin_method,
    types.MethodWrapperType: _dissect_builtin_method,
    types.FunctionType: _dissect_function,
    functools.partial: _dissect_partial,
    type(functools.lru_cache(len)): _dissect_cached_function,
    weakref.ref: _dissect_reference,
    (weakref.ProxyType, weakref.CallableProxyType): _dissect_proxy,
    dict: _dissect_dict,
    (list, tuple, set, frozenset, deque): _dissect_container,
}
