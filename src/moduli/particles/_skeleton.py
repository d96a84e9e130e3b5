"""Capturing the plain attributes of a model's modules, and assembling new modules from them.

Every module of a result is like a `copy.copy` of the operand's: plain attributes are shared, while registries,
hook dictionaries and labels are copied. If an attribute refers to the model itself, the result's attribute
refers to the result (see `_references`).
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from operator import call, is_, itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from moduli.layout import Reading, Structure, compute_weight, find_computed, read

from ._anatomy import is_atomic, may_refer, read_slots, slot_names
from ._facts import facts_of, unwrap_kind
from ._references import ModelPlace, References, list_places, resolve

RECORD = "_particle"
PENDING = "_pending"
POLICY = "_buffer_policy"
"""The attribute of a module with the policies of its buffers."""
SLOTS = "__slots__"
"""The key in a state of the attributes that are stored in `__slots__`."""

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_BLANK = vars(nn.Module())
HOOKS = tuple(key for key, value in _BLANK.items() if isinstance(value, OrderedDict) and key not in _REGISTRIES)
_HOOKS_OF = itemgetter(*HOOKS)
# Plain attributes that every module has.
_COMMON = tuple(key for key in _BLANK if key not in (*HOOKS, *_REGISTRIES, "_non_persistent_buffers_set"))
# Attributes that are not copied as plain ones. A compiled forward computes with the parameters it was compiled for.
_NOT_PLAIN = frozenset((*_BLANK, "_compiled_call_impl", "_replicate_for_data_parallel", PENDING)) - frozenset(_COMMON)
_FSDP = "torch.distributed.fsdp"
State = dict[str, Any]
"""The plain attributes of one module, captured at one moment."""


class _Linked(NamedTuple):
    """An attribute that refers to the model: a place or plan, or a dict of hooks that may be places or plans."""

    value: Any


def capture(
    modules: Iterable[nn.Module], places: Mapping[int, ModelPlace] | Reading, strict: bool = True
) -> list[State]:
    """Return the present plain attributes of modules.

    Args:
        modules: The modules.
        places: The parts of the model that they may refer to, or the reading that has them.
        strict: Whether references to the model that a copy cannot have raise; otherwise they are unmodified.

    Raises:
        StructureError: If an attribute refers to the model in such a way.
    """
    states: list[State] = []
    links = _Links(places, strict)
    chosen: list[_Carried] | None = []
    for module in modules:
        own = module.__dict__
        kind: Any = type(module)
        carried = _choose_carried(kind, tuple(own))
        state: State = dict(zip(carried.names, carried.pick(own), strict=True))
        hooked = any(_HOOKS_OF(own))
        if hooked or carried.slotted or not all(map(is_atomic, state.values())):
            links.add(state, module, hooked)
            chosen = None
        if chosen is not None:
            chosen.append(carried)
        if carried.labels:
            state["_labelled"] = dict(own["_labelled"])
        if carried.record:
            state[RECORD] = dict(own[RECORD].order)
        states.append(state)
    return states if not chosen or any(each.others for each in chosen) else AtomicStates(states, chosen)


def capture_model(reading: Reading, before: Sequence[State] = (), strict: bool = True) -> list[State]:
    """Return the present plain attributes of the modules of a model; captured ones are reused if they are still the same.

    Args:
        reading: The model.
        before: Attributes that were captured before.
        strict: Whether references to the model that a copy cannot have raise; otherwise they are unmodified.
    """
    notes = reading.structure.notes
    for states in (before, notes.get("attributes")):
        if isinstance(states, AtomicStates) and states.hold_for(reading.modules):
            return states
    states = capture(reading.modules, reading, strict)
    if isinstance(states, AtomicStates):
        notes["attributes"] = states  # most models of one class have the same
    return states


class AtomicStates(list[State]):
    """Captured attributes that are immutable and refer to nothing, so that changes are detected by identity.

    Args:
        states: The attributes of every module.
        carried: The names of those attributes, for every module.
    """

    __slots__ = ("_counts", "_orders", "_picks", "_values", "copies", "plain")

    def __init__(self, states: list[State], carried: list[_Carried]) -> None:
        super().__init__(states)
        #: Complete `__dict__`s of modules, with empty registries and hooks.
        self.copies = [{**_BLANK, **{key: each[key] for key in each if key != RECORD}} for each in states]
        #: The attributes of the root that are available without building it.
        self.plain = {key: states[0][key] for key in carried[0].names}
        self._picks = [each.pick for each in carried]
        self._values = [state[name] for state, each in zip(states, carried, strict=True) for name in each.names]
        self._counts = [len(_BLANK) - len(_COMMON) + len(state) for state in states]
        self._orders = [(place, list(state[RECORD])) for place, state in enumerate(states) if RECORD in state]

    def hold_for(self, modules: Iterable[nn.Module]) -> bool:
        """Whether modules of the same structure have these attributes now, and no hooks."""
        states = list(map(vars, modules))
        if list(map(len, states)) != self._counts:
            return False
        try:
            if not all(map(is_, chain.from_iterable(map(call, self._picks, states)), self._values)):
                return False
            for place, order in self._orders:
                if list(states[place][RECORD].order) != order:
                    return False
        except KeyError:
            return False
        return not any(chain.from_iterable(map(_HOOKS_OF, states)))


class _Links:
    """Finds the attributes and hooks of modules that refer to the model; the parts are listed only when needed."""

    def __init__(self, places: Mapping[int, ModelPlace] | Reading, strict: bool) -> None:
        self._places = places
        self._strict = strict

    @cached_property
    def _references(self) -> References:
        return References(_find_places(self._places), self._strict)

    def add(self, state: State, module: nn.Module, hooked: bool) -> None:
        """Complete the captured attributes of a module with `__slots__` and hooks, and link those that refer to the model.

        Args:
            state: The captured attributes, which are changed.
            module: The module.
            hooked: Whether it has hooks.
        """
        own, kind = module.__dict__, cast(Any, type(module))
        if slot_names(kind):
            state[SLOTS] = read_slots(module)
        hooks = {key: _drop_wrapper_hooks(own[key]) for key in HOOKS if own[key]} if hooked else {}
        for name in find_computed(hooks.get(_PRE_HOOKS, {})):
            state.pop(name, None)
        for key in [key for key, value in state.items() if may_refer(value)]:
            linked = self._references.link(state[key], f"the attribute {key!r} of {kind.__name__}")
            if linked is not state[key]:
                state[key] = _Linked(linked)
        for key, functions in hooks.items():
            owner = f"a hook in {key!r} of {kind.__name__}"
            state[key] = _Linked({each: self._references.link(hook, owner) for each, hook in functions.items()})


def _find_places(places: Mapping[int, ModelPlace] | Reading) -> Mapping[int, ModelPlace]:
    """Return the parts of a model by `id`."""
    if not isinstance(places, Reading):
        return places
    parts: tuple[Sequence[Any], ...] = (places.modules, places.parameters, places.buffers)
    return {id(e): ModelPlace(kind, key) for kind, part in enumerate(parts) for key, e in enumerate(part)}


class _Carried(NamedTuple):
    """The attributes of a module that are captured: plain ones, and whether there are slots, labels and a record."""

    names: tuple[str, ...]
    pick: Any
    slotted: bool
    labels: bool
    record: bool
    # Whether there are attributes that not every module has and that are not captured.
    others: bool


@lru_cache(maxsize=4096)
def _choose_carried(kind: Any, keys: tuple[str, ...]) -> _Carried:
    # Keys of a subclass of `str` belong to wrappers such as `fully_shard`, whose state is not copied.
    special = ("_labelled", RECORD)
    names = tuple(key for key in keys if key not in _NOT_PLAIN and key not in special and type(key) is str)
    # An `itemgetter` of one name returns no tuple.
    pick = itemgetter(*names) if len(names) > 1 else lambda own: tuple(own[name] for name in names)
    others = not _BLANK.keys() | {*names, *special} >= set(keys)
    return _Carried(names, pick, bool(slot_names(kind)), "_labelled" in keys, RECORD in keys, others)


def _drop_wrapper_hooks(hooks: Any) -> Any:
    """Return hooks without those of FSDP, which gather the parameters of the wrapped model."""
    if _FSDP not in sys.modules:
        return hooks
    return OrderedDict(
        (key, hook) for key, hook in hooks.items() if not str(getattr(hook, "__module__", "")).startswith(_FSDP)
    )


def refers_to(modules: Iterable[nn.Module], places: Mapping[int, ModelPlace]) -> bool:
    """Whether a plain attribute of some modules refers to one of the objects with these ids."""
    references = References(places, strict=False)
    values = (value for module in modules for key, value in module.__dict__.items() if key not in _REGISTRIES)
    return bool(places) and any(may_refer(value) and references.link(value, "") is not value for value in values)


def list_referred(states: Iterable[State]) -> set[ModelPlace]:
    """Return the parts of the model that attributes of captured states refer to."""
    linked = (value.value for state in states for value in state.values() if type(value) is _Linked)
    return set[ModelPlace]().union(*map(list_places, linked))


def restore(state: State, tables: Sequence[Any]) -> State:
    """Return the attributes for a new module.

    Args:
        state: Captured attributes.
        tables: The modules, parameters and buffers of the model by key, and a dict of the objects made so far.
    """
    attributes: State = {key: OrderedDict() for key in HOOKS}
    attributes.update(state)
    if _Linked in map(type, state.values()):
        for key, value in state.items():
            if type(value) is _Linked:
                attributes[key] = restore_hooks(value, tables) if key in HOOKS else resolve(value.value, tables)
    if not _UNSEEN.isdisjoint(state):
        for key in (RECORD, SLOTS):
            attributes.pop(key, None)
        if "_labelled" in state:
            attributes["_labelled"] = dict(state["_labelled"])
    return attributes


def _copy_atomic(state: State) -> State:
    """Return the attributes for a new module from atomic ones; only hooks and labels are copied."""
    attributes = state.copy()
    for key in HOOKS:
        attributes[key] = OrderedDict()
    if "_labelled" in state:
        attributes["_labelled"] = state["_labelled"].copy()
    return attributes


def restore_hooks(hooks: _Linked, tables: Sequence[Any]) -> OrderedDict[int, Any]:
    """Return the dictionary of hooks for a new module."""
    return OrderedDict((key, resolve(hook, tables)) for key, hook in hooks.value.items())


def restore_slots(module: nn.Module, state: State, tables: Sequence[Any]) -> None:
    """Set the attributes of a new module that its class stores in `__slots__`.

    Args:
        module: The new module.
        state: Captured attributes.
        tables: The modules, parameters and buffers of the model by key, and a dict of the objects made so far.
    """
    values = state.get(SLOTS)
    if values:
        values = resolve(values.value, tables) if type(values) is _Linked else values
        for name, value in values.items():
            object.__setattr__(module, name, value)


def select_plain_attributes(states: Sequence[State]) -> tuple[State, list[str]]:
    """Return the attributes of the root that are available without building it, and the names of the others."""
    if isinstance(states, AtomicStates):
        return states.plain, []
    state = states[0]
    plain = {key: value for key, value in state.items() if type(value) is not _Linked and key not in _UNSEEN}
    if len(plain) == len(state):
        return plain, []
    return plain, [key for key, value in state.items() if type(value) is _Linked and key not in HOOKS and key != SLOTS]


_UNSEEN = frozenset((RECORD, SLOTS, "_labelled"))


def assemble(
    structure: Structure,
    states: Sequence[State],
    parameters: Sequence[Any],
    buffers: Sequence[Any],
    root: nn.Module | None = None,
) -> list[nn.Module]:
    """Make the modules of a model, and return them in the order of the structure.

    Args:
        structure: The structure of the model.
        states: The plain attributes of every module.
        parameters: One per entry of the layout.
        buffers: One per buffer of the layout.
        root: The root, an empty object, if there is one already.
    """
    plan, restoring = facts_of(structure).plan, facts_of(structure).restoring
    modules: list[nn.Module] = [object.__new__(unwrap_kind(kind)) for kind, *_ in plan]
    if root is not None:
        modules[0] = root
    tables: Any = modules, parameters, buffers, {}
    # A slot that holds None has position -1.
    params, tensors, entries = [*parameters, None], [*buffers, None], [*modules, None]
    copies = states.copies if isinstance(states, AtomicStates) else None
    # The root is written last, so that other threads which read it see complete modules.
    for place in range(len(plan) - 1, -1, -1):
        state = restore(states[place], tables) if copies is None else _copy_atomic(copies[place])
        _set_registries(state, plan[place], params, tensors, entries)
        if place in restoring:
            twin: Any = object.__new__(unwrap_kind(plan[place][0]))
            twin.__setstate__(state)
            state = twin.__dict__
        if copies is None and SLOTS in states[place]:
            restore_slots(modules[place], states[place], tables)
        if place:
            object.__setattr__(modules[place], "__dict__", state)
        else:
            modules[0].__dict__.update(state)
    return modules


def _set_registries(state: State, plan: Any, params: list[Any], buffers: list[Any], modules: list[Any]) -> None:
    """Set the registries of a new module; `plan` has its entries, as in `Facts`. Most are empty, which saves comprehensions."""
    _, own, buffered, transient, children = plan
    state["_parameters"] = {name: params[i] for name, i in own} if own else {}
    state["_buffers"] = {name: buffers[i] for name, i in buffered} if buffered else {}
    state["_non_persistent_buffers_set"] = set(transient) if transient else set()
    state["_modules"] = {name: modules[i] for name, i in children} if children else {}


_PRE_HOOKS = "_forward_pre_hooks"


def recompute(states: Sequence[State], modules: Sequence[Any]) -> None:
    """Compute the attributes of new modules that hooks compute from parameters."""
    if isinstance(states, AtomicStates):
        return
    for state, module in zip(states, modules, strict=True):
        if _PRE_HOOKS in state:
            with torch.enable_grad():
                for name, hook in find_computed(module.__dict__[_PRE_HOOKS]).items():
                    compute_weight(module, name, hook)


def copy_unwrapped(module: nn.Module) -> Any:
    """Return a copy of a model without the wrapping of `fully_shard`; tensors are copied, plain attributes shared.

    FSDP2 does not support copying wrapped models. The copy has equal DTensors under the same names, and can be loaded into
    a wrapped model.

    Example:
        >>> from moduli.particles import copy_unwrapped
        >>> net = nn.Linear(2, 1)
        >>> twin = copy_unwrapped(net)
        >>> twin.weight is net.weight, twin.weight.equal(net.weight)
        (False, True)
    """
    reading = read(module)
    parameters = [nn.Parameter(param.detach().clone(), param.requires_grad) for param in reading.parameters]
    buffers = [buffer.detach().clone() for buffer in reading.buffers]
    states = capture(reading.modules, reading)
    modules = assemble(reading.structure, states, parameters, buffers)
    recompute(states, modules)
    return modules[0]
