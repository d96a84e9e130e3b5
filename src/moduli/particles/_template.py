"""What a module tree looks like, read off the live modules, and how to make another one like it.

A `Template` is everything about a model but the values of its parameters: classes, plain attributes, the names of
parameters, buffers and children, and which of them are the same object. Two kinds of models are told apart. In a
*simple* one every attribute is a number, a text, a function or the like, so a new model can be put together from the
template alone, at any time later. In a *rich* one some attribute could change in place or refer back to the model (a
list of layers, a hook, a bound method): it is copied at once, by `copy.deepcopy`, with parameters and buffers exchanged.

A `Memory` is the template of one live model together with what is needed to see that it still holds. It is made of
names, ids, sizes and immutable values only: it refers to no module and no tensor, so it keeps nothing alive.
"""

from __future__ import annotations

import copy
import enum
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moduli.device import Device
from moduli.layout import Layout, layout_and_tensors

__all__ = [
    "HOOKS",
    "LAZY",
    "POLICY",
    "RECORD",
    "Memory",
    "Node",
    "Template",
    "Walk",
    "read",
    "recognised",
    "distinct_buffers",
    "fill",
    "renewed",
    "walk",
]

RECORD = "_particle"
LAZY = "_lazy"
POLICY = "_buffer_policy"

_BLANK = nn.Module().__dict__
_REGISTRIES = ("_parameters", "_buffers", "_modules")
HOOKS = {key: type(held) for key, held in _BLANK.items() if isinstance(held, dict) and key not in _REGISTRIES}
_HOOK_KEYS = tuple(HOOKS)
_GET_HOOKS = itemgetter(*_HOOK_KEYS)
# A compiled forward computes with the parameters of the model it was compiled for; caches belong to one model.
_PASSING = ("_compiled_call_impl",)
# Rebuilt for each model, or private to it, instead of being copied as attributes.
_OWN = {*_REGISTRIES, *HOOKS, "_non_persistent_buffers_set", *_PASSING, RECORD, LAZY}
_ATOMS = {
    *(type(None), bool, int, float, complex, str, bytes, range, type, types.FunctionType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, Device),
}
_PROTOCOL = ("__deepcopy__", "__copy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__new__")
_SIZES = attrgetter("dtype", "shape", "device")
_TRUSTED = ("torch.nn.modules.", "moduli.")
_ORDINARY = (torch.float32, torch.float64)
_END, _BUFFERS, _CHILDREN = 0, 1, 2
_NONE = id(None)


class Walk(NamedTuple):
    """What a breadth-first walk over live modules found; a module or tensor occurs once for each of its names."""

    names: list[object]
    modules: list[Any]
    parameters: list[Any]
    buffers: list[Any]


class Node(NamedTuple):
    """One module of a template. Numbers are places in the lists of a template; -1 is an empty place."""

    kind: type[nn.Module]
    path: str
    attributes: dict[str, Any]
    parameters: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, int], ...]
    transient: frozenset[str]
    children: tuple[tuple[str, int], ...]
    order: tuple[str, ...]


class Template(NamedTuple):
    """A model without values."""

    layout: Layout
    nodes: tuple[Node, ...]
    buffer_names: tuple[str, ...]
    policies: tuple[str, ...]
    rich: bool
    quick: bool

    def shell(self, made: nn.Module, parameters: Sequence[Any], buffers: Sequence[Any]) -> list[nn.Module]:
        """Put a model together in `made`, an empty object of the root's class; returns its modules, node by node."""
        modules = [made, *(object.__new__(node.kind) for node in self.nodes[1:])]
        for node, module in zip(self.nodes, modules, strict=True):
            state = module.__dict__
            state.update(node.attributes)
            if "_labelled" in state:
                state["_labelled"] = dict(state["_labelled"])
            for key, kind in HOOKS.items():
                state[key] = kind()
            state["_parameters"] = {name: parameters[i] if i >= 0 else None for name, i in node.parameters}
            state["_buffers"] = {name: buffers[i] if i >= 0 else None for name, i in node.buffers}
            state["_non_persistent_buffers_set"] = set(node.transient)
            state["_modules"] = {name: modules[i] if i >= 0 else None for name, i in node.children}
        return modules

    def copied(self, root: nn.Module, live: Walk, old: Sequence[Tensor], new: Sequence[Any], buffers: Any) -> Any:
        """A deep copy of a live model with other parameters and buffers."""
        memo: dict[int, Any] = {id(before): after for before, after in zip(old, new, strict=True)}
        distinct = distinct_buffers(live)
        memo.update((id(before), after) for before, after in zip(distinct, buffers, strict=True))
        for module in live.modules:
            for held in () if module is None else module.__dict__.values():
                # Hooks of pruning and the like leave a computed tensor behind, which they compute anew before each call.
                if isinstance(held, Tensor) and not held.is_leaf:
                    memo.setdefault(id(held), held.detach().clone())
        made = copy.deepcopy(root, memo)
        found = walk(made)
        for expected, held in zip((memo.get(id(p)) for p in live.parameters), found.parameters, strict=True):
            if expected is not held and (expected is not None or held is not None):
                raise TypeError(
                    f"{type(root).__name__} cannot be rebuilt with other parameters: a module in it copies itself in a "
                    "way of its own; replace that module, or use torch.func.functional_call"
                )
        return made


class Memory:
    """The template of a live model, and what tells that it still holds."""

    __slots__ = ("checks", "ids", "limit", "names", "pick", "refs", "sizes", "template", "ties", "types")

    template: Template
    names: list[object]
    ids: list[int]
    types: list[type]
    ties: list[int]
    sizes: list[object]
    limit: int
    pick: Callable[[list[Any]], list[Tensor]]
    checks: list[tuple[int, int, Callable[[Any], Any], Any]]
    refs: list[weakref.ref[nn.Module]]


def walk(root: nn.Module, limit: int = 1 << 60) -> Walk:
    """Go over a live tree. A tree of more than `limit` places is cut short, which makes its names differ."""
    names: list[object] = []
    parameters: list[Any] = []
    buffers: list[Any] = []
    queue: list[Any] = [root]
    for module in queue:
        if module is None:
            continue
        state = module.__dict__
        if "_parameters" not in state or type(state["_parameters"]) is not dict:
            own, kept, children = ({**getattr(module, key)} for key in _REGISTRIES)
            state = module.__dict__
        else:
            own, kept, children = state["_parameters"], state["_buffers"], state["_modules"]
        if own:
            names += own
            parameters += own.values()
        if kept:
            names.append(_BUFFERS)
            names += kept
            names.append(frozenset(module._non_persistent_buffers_set))
            buffers += kept.values()
        if children:
            names.append(_CHILDREN)
            names += children
            queue += children.values()
            if len(queue) > limit:
                break
        names.append(_END)
    return Walk(names, queue, parameters, buffers)


def distinct_buffers(live: Walk) -> list[Tensor]:
    """Every buffer once, in the order of the walk."""
    return list({id(buffer): buffer for buffer in live.buffers if buffer is not None}.values())


def recognised(memory: Memory, live: Walk, attributes: bool) -> list[Tensor] | None:
    """The live parameters in the order of the layout if the model is as remembered, otherwise None.

    Args:
        memory: What is remembered.
        live: The model now.
        attributes: Whether plain attributes and hooks matter, or only structure.
    """
    if live.names != memory.names or list(map(type, live.modules)) != memory.types:
        return None
    if list(map(id, live.modules)) != memory.ids or _firsts(live.parameters) != memory.ties:
        return None
    tensors = memory.pick(live.parameters)
    try:
        if list(map(_SIZES, tensors)) != memory.sizes:
            return None
        if attributes:
            modules = live.modules
            for place, size, get, values in memory.checks:
                state = modules[place].__dict__
                if _count(state) != size or any(_GET_HOOKS(state)) or get(state) != values:
                    return None
    except (KeyError, RuntimeError, ValueError, TypeError):
        # An attribute is gone or became an array, whose comparison is no truth value; a parameter became lazy.
        return None
    return tensors


def read(root: nn.Module) -> tuple[Memory, Walk, list[Tensor]]:
    """Read a model in full."""
    layout, tensors = layout_and_tensors(root)
    live = walk(root)
    entry = {id(tensor): place for place, tensor in enumerate(tensors)}
    buffer = {id(tensor): place for place, tensor in enumerate(distinct_buffers(live))}
    paths: dict[int, str] = {id(root): ""}
    places: list[int] = []
    for module in live.modules:
        if module is None:
            continue
        path = paths[id(module)]
        for name, child in module._modules.items():
            if child is not None:
                paths.setdefault(id(child), f"{path}.{name}" if path else name)
    index: dict[int, int] = {}
    for place, module in enumerate(live.modules):
        if module is not None and id(module) not in index:
            index[id(module)] = len(index)
            places.append(place)
    rich = False
    nodes: list[Node] = []
    checks: list[tuple[int, int, Callable[[Any], Any], Any]] = []
    buffer_names = [""] * len(buffer)
    for place in places:
        module = live.modules[place]
        state = module.__dict__
        path = paths[id(module)]
        attributes = {key: held for key, held in state.items() if key not in _OWN}
        if "_labelled" in attributes:
            attributes["_labelled"] = dict(attributes["_labelled"])
        rich = rich or not _simple(module, attributes)
        for name, held in module._buffers.items():
            if held is not None and not buffer_names[buffer[id(held)]]:
                buffer_names[buffer[id(held)]] = f"{path}.{name}" if path else name
        nodes.append(
            Node(
                type(module),
                path,
                attributes,
                tuple((n, -1 if p is None else entry[id(p)]) for n, p in module._parameters.items()),
                tuple((n, -1 if b is None else buffer[id(b)]) for n, b in module._buffers.items()),
                frozenset(module._non_persistent_buffers_set),
                tuple((n, -1 if m is None else index[id(m)]) for n, m in module._modules.items()),
                _order(module),
            )
        )
        keys = tuple(attributes)
        get = itemgetter(*keys) if keys else (lambda state: ())
        checks.append((place, _count(state), get, get(attributes) if keys else ()))
    memory = Memory()
    policies = _policies(nodes, buffer_names)
    # One vector of ordinary numbers, and nothing to copy but attributes.
    quick = not rich and not buffer_names and len(layout.groups) == 1 and layout.groups[0].dtype in _ORDINARY
    memory.template = Template(layout, tuple(nodes), tuple(buffer_names), policies, rich, quick)
    memory.checks = checks
    memory.refs = [weakref.ref(live.modules[place]) for place in places]
    fill(memory, live, tensors)
    return memory, live, tensors


def fill(memory: Memory, live: Walk, tensors: list[Tensor]) -> None:
    """Note what a live model must keep looking like for its template to hold."""
    memory.names = live.names
    memory.ids = list(map(id, live.modules))
    memory.types = list(map(type, live.modules))
    memory.ties = _firsts(live.parameters)
    memory.sizes = list(map(_SIZES, tensors))
    memory.limit = len(live.modules)
    firsts: dict[int, int] = {}
    for place, tensor in enumerate(live.parameters):
        firsts.setdefault(id(tensor), place)
    memory.pick = _picker([firsts[id(tensor)] for tensor in tensors], len(live.parameters))


def renewed(memory: Memory, template: Template, live: Walk, modules: list[nn.Module]) -> Memory:
    """The memory of a model that was just built from a template which another model's memory holds too."""
    fresh = Memory()
    fresh.template = template
    for key in ("names", "types", "ties", "sizes", "limit", "pick", "checks"):
        setattr(fresh, key, getattr(memory, key))
    fresh.ids = list(map(id, live.modules))
    fresh.refs = [weakref.ref(module) for module in modules]
    return fresh


def _policies(nodes: list[Node], names: list[str]) -> tuple[str, ...]:
    """What becomes of each buffer in a result: the last pattern that matches, of the module nearest to the root."""
    found = ["copy"] * len(names)
    declared = [(node.path, node.attributes[POLICY]) for node in nodes if node.attributes.get(POLICY)]
    for path, rules in reversed(declared):
        for place, name in enumerate(names):
            if not path or name.startswith(path + "."):
                local = name[len(path) + 1 :] if path else name
                for pattern, policy in rules:
                    if fnmatchcase(local, pattern):
                        found[place] = policy
    return tuple(found)


def _count(state: dict[str, Any]) -> int:
    """How many attributes there are, besides those that come and go by themselves."""
    return len(state) - (RECORD in state) - (_PASSING[0] in state)


def _firsts(tensors: list[Any]) -> list[int]:
    """For each place, the first place that holds the same tensor; empty places count as their own kind."""
    ids = list(map(id, tensors))
    if _NONE not in ids and len(set(ids)) == len(ids):
        return []
    firsts: dict[int, int] = {_NONE: -1}
    return [firsts.setdefault(key, place) for place, key in enumerate(ids)]


def _picker(places: list[int], count: int) -> Callable[[list[Any]], list[Tensor]]:
    if places == list(range(count)):
        return list
    if len(places) < 2:
        return lambda tensors: [tensors[place] for place in places]
    get = itemgetter(*places)
    return lambda tensors: list(get(tensors))


def _order(module: nn.Module) -> tuple[str, ...]:
    """Names of parameters and children in the order in which they were assigned, as far as it is known."""
    known = module.__dict__.get(RECORD)
    order = getattr(known, "order", None) or ()
    held = {**module._parameters, **module._modules}
    return tuple(dict.fromkeys([*(name for name in order if name in held), *held]))


def _simple(module: nn.Module, attributes: dict[str, Any]) -> bool:
    """Whether a module can be rebuilt from its attributes at any later time."""
    state = module.__dict__
    return (
        _plain_class(type(module))
        and all(type(state.get(key)) in (dict, OrderedDict) for key in _REGISTRIES)
        and all(key in state and not state[key] for key in _HOOK_KEYS)
        and all(_atomic(held) or key == "_labelled" for key, held in attributes.items())
        and all(type(p) is nn.Parameter and not p._backward_hooks for p in module._parameters.values() if p is not None)
    )


def _atomic(held: Any) -> bool:
    kind = type(held)
    if kind in _ATOMS or isinstance(held, enum.Enum | type):
        return True
    return kind in (tuple, frozenset) and all(map(_atomic, held))


_PLAIN: dict[type, bool] = {}


def _plain_class(kind: type) -> bool:
    """Whether a class leaves copying to `nn.Module`, apart from what torch's own classes and ours do about it."""
    known = _PLAIN.get(kind)
    if known is None:
        known = kind.__dictoffset__ != 0 and not any(
            name in base.__dict__
            for base in kind.__mro__
            if base is not object and base is not nn.Module and not f"{base.__module__}.".startswith(_TRUSTED)
            for name in (*_PROTOCOL, *(("__slots__",) if base.__dict__.get("__slots__") else ()))
        )
        if len(_PLAIN) < 4096:
            _PLAIN[kind] = known
    return known
