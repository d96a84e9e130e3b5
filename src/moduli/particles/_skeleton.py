"""Modules without values: what is carried over from a model to the results of operations on it.

Every module of a result is a `copy.copy` of the operand's: plain attributes are shared, whatever they are, while registries,
hook dictionaries and labels are the result's own. Where an attribute refers to the model itself (a bound method, a virtual
tensor, a small list, tuple or dict of its modules, parameters or buffers), the result's attribute refers to the result.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple, cast

from torch import nn

from moduli.layout import Reading, Structure, read
from moduli.nn import Module as LabellingModule
from moduli.nn import VirtualTensor

RECORD = "_particle"
PENDING = "_pending"
POLICY = "_buffer_policy"
"""The attribute in which a module keeps the policies of its buffers."""

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_BLANK = vars(nn.Module())
HOOKS = tuple(key for key, held in _BLANK.items() if isinstance(held, OrderedDict) and key not in _REGISTRIES)
_HOOKS_OF = itemgetter(*HOOKS)
# Plain attributes that every module has.
_COMMON = tuple(key for key in _BLANK if key not in (*HOOKS, *_REGISTRIES, "_non_persistent_buffers_set"))
# What is not carried over as a plain attribute. A compiled forward computes with the parameters it was compiled for.
_NOT_PLAIN = frozenset((*_BLANK, "_compiled_call_impl", "_replicate_for_data_parallel", PENDING)) - frozenset(_COMMON)
_CONTAINERS = (list, tuple, dict, OrderedDict)
_LINKING = frozenset((*_CONTAINERS, types.MethodType, VirtualTensor))
_SCALARS = frozenset((int, float, complex, bool, str, bytes, type(None)))
_FSDP = "torch.distributed.fsdp"
# Larger containers are shared without being looked into: they hold data, not layers.
_MOST_ITEMS = 256

State = dict[str, Any]
"""The plain attributes of one module, as they were at one moment."""


class ModelPlace(NamedTuple):
    """Stands for a module (0), parameter (1) or buffer (2) of the model itself, by its key."""

    kind: int
    key: Any


class _Bound(NamedTuple):
    """A method or a virtual tensor of a part of the model: how to make that of another."""

    make: Callable[[Any], Any]
    owner: ModelPlace


class _Linked(NamedTuple):
    """An attribute that refers to the model itself, with places instead."""

    value: Any


def capture(modules: Iterable[nn.Module], places: Mapping[int, ModelPlace] | Reading) -> list[State]:
    """The plain attributes of modules as they are now.

    Args:
        modules: The modules.
        places: What they may refer to, or the reading that tells.
    """
    states = []
    for module in modules:
        own = module.__dict__
        state = {key: own[key] for key in _choose_carried(tuple(own))}
        if any(_HOOKS_OF(own)):
            state.update((key, _drop_wrapper_hooks(own[key])) for key in HOOKS if own[key])
        for key, value in state.items():
            if type(value) in _LINKING and _may_refer(value):
                if isinstance(places, Reading):
                    parts: tuple[Sequence[Any], ...] = (places.modules, places.parameters, places.buffers)
                    places = {
                        id(e): ModelPlace(kind, key) for kind, part in enumerate(parts) for key, e in enumerate(part)
                    }
                linked = _link(value, places, 2)
                if key in HOOKS or key == "_labelled":
                    state[key] = _Linked(linked if linked is not value else value.copy())
                elif linked is not value:
                    state[key] = _Linked(linked)
        record = state.get(RECORD)
        if record is not None:
            state[RECORD] = dict(record.order)
        states.append(state)
    return states


def _may_refer(value: Any) -> bool:
    """Whether a method or container may refer to a part of the model: most hold numbers and names only."""
    if type(value) in (types.MethodType, VirtualTensor):
        return True
    return not _SCALARS.issuperset(map(type, value.values() if isinstance(value, dict) else value[:_MOST_ITEMS]))


@lru_cache(maxsize=4096)
def _choose_carried(keys: tuple[str, ...]) -> tuple[str, ...]:
    # Keys that are no plain strings are those of wrappers such as `fully_shard`, whose state is the operand's own.
    return tuple(key for key in keys if key not in _NOT_PLAIN and type(key) is str)


def _drop_wrapper_hooks(hooks: Any) -> Any:
    """Hooks without those of FSDP, which gather the parameters of the model that they were made for."""
    if _FSDP not in sys.modules:
        return hooks
    return OrderedDict(
        (key, hook) for key, hook in hooks.items() if not str(getattr(hook, "__module__", "")).startswith(_FSDP)
    )


def unwrap_kind(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a module without what `fully_shard` put around it: results of operations are not wrapped."""
    return _find_unwrapped(cast(Any, kind)) if _FSDP in sys.modules else kind


@lru_cache(maxsize=4096)
def _find_unwrapped(kind: Any) -> Any:
    wrapper = getattr(sys.modules[_FSDP], "FSDPModule", None)
    if wrapper is None or not issubclass(kind, wrapper):
        return kind
    adopted = kind.__dict__.get("_adopted")
    if adopted is not None:
        from ._adopt import make_adopted_class

        return make_adopted_class(unwrap_kind(adopted))
    return next(base for base in kind.__mro__ if not issubclass(base, wrapper))


def _link(value: Any, places: Mapping[int, ModelPlace], depth: int) -> Any:
    """A value with places instead of parts of the model; the value itself if it refers to none."""
    place = places.get(id(value))
    if place is not None:
        return place
    kind = type(value)
    if kind is types.MethodType:
        owner = places.get(id(value.__self__))
        return value if owner is None else _Bound(partial(types.MethodType, value.__func__), owner)
    if kind is VirtualTensor:
        owner = places.get(id(value.owner))
        return value if owner is None else _Bound(value.rebind, owner)
    if kind not in _CONTAINERS or not depth or len(value) > _MOST_ITEMS:
        return value
    items = list(value.values()) if isinstance(value, dict) else value
    linked = [_link(each, places, depth - 1) for each in items]
    if all(new is old for new, old in zip(linked, items, strict=True)):
        return value
    return kind(zip(value, linked, strict=True)) if isinstance(value, dict) else kind(linked)


def refers_to(modules: Iterable[nn.Module], places: Mapping[int, ModelPlace]) -> bool:
    """Whether a plain attribute of some modules refers to one of the objects with these ids."""
    values = (value for module in modules for key, value in module.__dict__.items() if key not in _REGISTRIES)
    return any(type(value) in _LINKING and _link(value, places, 2) is not value for value in values)


def list_places(value: Any) -> set[ModelPlace]:
    """Return the parts of the model that an attribute of a captured state refers to."""
    kind = type(value)
    if kind is _Linked:
        return list_places(value.value)
    if kind is ModelPlace:
        return {value}
    if kind is _Bound:
        return {value.owner}
    if kind not in _CONTAINERS:
        return set()
    return set().union(*map(list_places, value.values() if isinstance(value, dict) else value))


def restore(state: State, tables: Sequence[Any]) -> State:
    """Attributes for a new module; `tables` has its modules, parameters and buffers by key."""
    made: State = {key: OrderedDict() for key in HOOKS}
    made |= state
    if _Linked in map(type, state.values()):
        made |= {key: _resolve(held.value, tables) for key, held in state.items() if type(held) is _Linked}
    if RECORD in state:
        del made[RECORD]
    if "_labelled" in state and type(state["_labelled"]) is not _Linked:
        made["_labelled"] = {}
    return made


def select_plain_attributes(state: State) -> tuple[State, list[str]]:
    """The attributes that can be had without building anything, and the names of the others."""
    plain = state.copy()
    for key in _UNSEEN & state.keys():
        del plain[key]
    linked = [key for key, held in plain.items() if type(held) is _Linked]
    for key in linked:
        del plain[key]
    return plain, [key for key in linked if key not in HOOKS]


_UNSEEN = frozenset((RECORD, "_labelled"))


def _resolve(value: Any, tables: Sequence[Any]) -> Any:
    kind = type(value)
    if kind is ModelPlace:
        return tables[value.kind][value.key]
    if kind is _Bound:
        return value.make(_resolve(value.owner, tables))
    if kind not in _CONTAINERS:
        return value
    if isinstance(value, dict):
        return kind((key, _resolve(each, tables)) for key, each in value.items())
    return kind(_resolve(each, tables) for each in value)


def assemble(
    modules: dict[int, nn.Module],
    structure: Structure,
    states: Sequence[State],
    parameters: Sequence[Any],
    buffers: Sequence[Any],
) -> None:
    """Make modules of a model.

    Args:
        modules: The root, an empty object, if there is one already; all that are made are added, by place.
        structure: What the model looks like.
        states: The plain attributes of every module.
        parameters: One per entry of the layout.
        buffers: One per buffer of the layout.
    """
    # Nothing is visible in the root before it is in all others, so that other threads may look at it meanwhile.
    places = range(len(states) - 1, -1, -1)
    entries, restoring = structure.modules, facts_of(structure).restoring
    for place in places:
        if place not in modules:
            modules[place] = object.__new__(unwrap_kind(entries[place].kind))
    tables = modules, parameters, buffers
    # An empty place is -1.
    held, kept = [*parameters, None], [*buffers, None]
    for place in places:
        entry = entries[place]
        made = restore(states[place], tables)
        made["_parameters"] = {name: held[i] for name, i in entry.parameters} if entry.parameters else {}
        made["_buffers"] = {name: kept[i] for name, i in entry.buffers} if entry.buffers else {}
        made["_non_persistent_buffers_set"] = set(entry.transient)
        children = entry.children
        made["_modules"] = {name: modules[i] if i >= 0 else None for name, i in children} if children else {}
        if place in restoring:
            twin: Any = object.__new__(unwrap_kind(entry.kind))
            twin.__setstate__(made)
            made = twin.__dict__
        modules[place].__dict__.update(made)


def copy_unwrapped(module: nn.Module) -> Any:
    """A copy of a model, its tensors copied, its plain attributes shared, without what `fully_shard` put around it.

    FSDP2 does not let wrapped models be copied: the copy has the same DTensors under the same names, and can be loaded into
    a wrapped model.

    Example:
        >>> from moduli.particles import copy_unwrapped
        >>> net = nn.Linear(2, 1)
        >>> twin = copy_unwrapped(net)
        >>> twin.weight is net.weight, twin.weight.equal(net.weight)
        (False, True)
    """
    reading = read(module)
    parameters = [nn.Parameter(held.detach().clone(), held.requires_grad) for held in reading.parameters]
    buffers = [held.detach().clone() for held in reading.buffers]
    states, made = capture(reading.modules, reading), dict[int, nn.Module]()
    assemble(made, reading.structure, states, parameters, buffers)
    return made[0]


class Facts(NamedTuple):
    """What is known of all models of one structure: the places of modules that need more than others.

    Attributes:
        restoring: Their copies need the `__setstate__` of their class, as recurrent layers of torch do.
        labelling: They may own labelled tensors.
        particles: They are particles inside the particle.
    """

    restoring: frozenset[int]
    labelling: tuple[int, ...]
    particles: tuple[int, ...]


def facts_of(structure: Structure) -> Facts:
    """The facts of a structure, worked out once."""
    known: Facts | None = structure.notes.get("particles")
    if known is None:
        kinds = [entry.kind for entry in structure.modules]
        known = structure.notes["particles"] = Facts(
            frozenset(place for place, kind in enumerate(kinds) if _restores_itself(kind)),
            tuple(place for place, kind in enumerate(kinds) if issubclass(kind, LabellingModule)),
            tuple(place for place, kind in enumerate(kinds) if place and hasattr(kind, "_particle_kernel")),
        )
    return known


def _restores_itself(kind: type) -> bool:
    return any(
        "__setstate__" in base.__dict__ and not f"{base.__module__}.".startswith("moduli.")
        for base in kind.__mro__
        if base is not nn.Module
    )
