"""Storage of what the last edits removed from a particle, and the plan for going back to an earlier version."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from moduli.layout import SWAPS, Reading
from moduli.nn import VirtualTensor

from ._compare import LastSeen, owns_attributes
from ._record import ParticleRecord
from ._skeleton import HOOKS, PENDING, POLICY, RECORD, State
from ._version import Parts, Past, SlotNames, Version
from .edits import ParticleEdit
from .errors import StructureError

REGISTRIES = ("_parameters", "_modules", "_buffers")
_OTHERS = ("_non_persistent_buffers_set", "_labelled")
_NOT_PLAIN = frozenset((
    *HOOKS, *REGISTRIES, *_OTHERS, "training", RECORD, PENDING, POLICY, "_compiled_call_impl", "_replicate_for_data_parallel",
))  # fmt: skip


class _Mark:
    """A sentinel with a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


_SIMPLE = (int, float, str, tuple)
STAYS, MISSING, LOST = _Mark("STAYS"), _Mark("MISSING"), _Mark("LOST")
"""Sentinels for the former value of a name: the same as now; none; an object that is not stored any more."""


class PastSlots(NamedTuple):
    """The registries and attributes of one module before an edit.

    Attributes:
        module: The module; it is in the particle, or in a part that a later edit removed.
        key: Its identifier.
        registries: The former contents of each registry, in order.
        others: The names of non-persistent buffers, and the labels of tensors.
        attributes: The former values of the plain attributes that an edit changed.
    """

    module: weakref.ref[nn.Module]
    key: int | None
    registries: dict[str, dict[str, Any]]
    others: dict[str, Any]
    attributes: dict[str, Any]


class Addition(NamedTuple):
    """A name that was added to a module."""

    module: weakref.ref[nn.Module]
    name: str
    key: None = None


# -- when a particle is edited -------------------------------------------------------------------------------------------


def remember(record: ParticleRecord, version: Version, steps: Iterable[Past]) -> None:
    """Store the last edits of a particle, and drop those older than its species' limit.

    Args:
        record: The record of the particle.
        version: Its version.
        steps: The edits.
    """
    depth = version.species.depth
    record.past = (*record.past, *steps)[-depth:] if depth else ()


def snapshot_slots(module: nn.Module, key: int | None = None) -> PastSlots:
    """Return copies of a module's registries and attributes, before an edit of it; `key` is its identifier."""
    state = module.__dict__
    registries = {key: dict(state[key]) for key in REGISTRIES}
    others = {key: copy.copy(state[key]) for key in _OTHERS if key in state}
    return PastSlots(weakref.ref(module), key, registries, others, _read_attributes(module))


def _read_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that an edit may change: all of a plain module, else sizes and virtual tensors."""
    state = module.__dict__
    if owns_attributes(module):
        kinds = (VirtualTensor, int, float, str, tuple)
        return {n: value for n, value in state.items() if isinstance(value, kinds) and n not in _NOT_PLAIN}
    attributes = {
        name: copy.copy(value) if type(value) in (list, dict, set) else value
        for name, value in state.items()
        if name not in _NOT_PLAIN
    }
    return attributes | {name: dict(state[name]) for name in HOOKS if name in state}


def compare_slots(before: PastSlots) -> PastSlots | None:
    """Reduce the former contents of a module to the differences from its present ones; None if there are none."""
    module = before.module()
    if module is None:
        return None
    state = module.__dict__
    registries = {
        key: {name: STAYS if state[key].get(name, MISSING) is value else value for name, value in names.items()}
        for key, names in before.registries.items()
    }
    now = _read_attributes(module)
    attributes = {
        name: before.attributes.get(name, MISSING)
        for name in (*before.attributes, *now)
        if not _is_same(before.attributes.get(name, MISSING), now.get(name, MISSING))
    }
    same = all(list(registries[key]) == list(state[key]) for key in REGISTRIES)
    same = same and all(value is STAYS for names in registries.values() for value in names.values())
    same = same and all(_is_same(value, state.get(key)) for key, value in before.others.items())
    return None if same and not attributes else before._replace(registries=registries, attributes=attributes)


def _is_same(before: Any, after: Any) -> bool:
    """Whether two attributes are one object, or containers of the same objects."""
    if before is after or type(before) is not type(after) or type(before) not in (list, dict, set):
        return before is after
    if isinstance(before, set):
        return bool(before == after)
    if len(before) != len(after):
        return False
    if isinstance(before, list):
        return all(map(is_, before, after))
    return list(before) == list(after) and all(map(is_, before.values(), after.values()))


def find_removed(edit: ParticleEdit, parts: Parts) -> Parts:
    """Return the parts of a particle that an edit removes."""
    return Parts(
        {key: parts.modules[key] for key in edit.remove_modules if key in parts.modules},
        {key: parts.params[key] for key in edit.remove_params - edit.reused if key in parts.params},
    )


def snapshot_removal(edit: ParticleEdit, parts: Parts) -> Removal:
    """Return the parts and registry contents that an edit, which a particle is about to follow, will remove."""
    slots = [snapshot_slots(parts.modules[key], key) for key in edit.touched if key in parts.modules]
    return Removal(find_removed(edit, parts), slots)


class Removal(NamedTuple):
    """The parts that an edit removed, and the former contents of the edited modules."""

    parts: Parts
    slots: list[PastSlots]


def list_steps(removal: Removal, additions: Sequence[Addition], start: int, stop: int) -> list[Past]:
    """Return the edits of a particle one by one: each addition, and everything else as the last.

    Args:
        removal: The parts that the edit removed.
        additions: The names that were added, each by its own version.
        start: The number of the version before.
        stop: The number of the version after.
    """
    nothing = Parts({}, {})
    steps = [Past(start + at, start + at + 1, nothing, (each,)) for at, each in enumerate(additions)]
    if start + len(steps) < stop:
        for module, name, _ in additions:  # names that were there before the last edit
            for slot in removal.slots:
                owner = module()
                if slot.module() is owner and owner is not None:
                    for key in REGISTRIES:
                        registry = owner.__dict__[key]
                        slot.registries[key].update({name: registry[name]} if name in registry else {})
        slots = tuple(slot for slot in map(compare_slots, removal.slots) if slot is not None)
        steps.append(Past(start + len(steps), stop, removal.parts, slots))
    return steps


def infer_removal(
    version: Version, following: Version, edit: ParticleEdit, reading: Reading, before: LastSeen | None
) -> Removal:
    """Reconstruct what edits of plain modules removed, which were detected only after they had been made.

    Args:
        version: The version before.
        following: The version after.
        edit: The edits, as one.
        reading: The particle after them.
        before: The particle before them; None if unknown.
    """
    live_params: dict[int, Any] = dict(zip(following.params, reading.parameters, strict=True))
    live = Parts(dict(zip(following.modules, reading.modules, strict=True)), live_params)
    last_seen = LastSeen({}, {}) if before is None else before
    old = last_seen.modules
    removed = Parts({key: old[key] for key in edit.remove_modules if key in old}, {})
    slots: list[PastSlots] = []
    for place, key in enumerate(version.modules):
        names = version.list_names(place)
        if key in removed.modules:
            registry = removed.modules[key]._parameters
            former = {param: registry.get(name) for name, param in names.params.items() if param is not None}
            removed.params.update({param: each for param, each in former.items() if each is not None})
        elif key in edit.touched and key in live.modules:
            slots.append(_infer_slots(key, names, edit, live, last_seen))
    for slot in slots:
        params = slot.registries["_parameters"]
        params.update({n: removed.params.get(p, LOST) for n, p in params.items() if isinstance(p, int)})
    gone = {key: param for key, param in removed.params.items() if key in edit.remove_params}
    return Removal(Parts(removed.modules, gone), slots)


def _infer_slots(key: int, names: SlotNames, edit: ParticleEdit, live: Parts, before: LastSeen) -> PastSlots:
    """Return the former contents of an edited module; removed parameters are represented by their identifiers.

    Args:
        key: The identifier of the module.
        names: The names of its registries in the version before.
        edit: The edit.
        live: The parts of the particle after it.
        before: The modules and attributes before it, as far as known.
    """
    module, buffers = live.modules[key], live.modules[key]._buffers
    registries: dict[str, dict[str, Any]] = {
        "_parameters": {n: None if p is None else live.params.get(p, p) for n, p in names.params.items()},
        "_modules": {
            n: None if m is None else live.modules.get(m, before.modules.get(m, LOST)) for n, m in names.modules.items()
        },
        "_buffers": {n: LOST if (key, n) in edit.buffers else buffers.get(n, LOST) for n in names.buffers},
    }
    state = before.states.get(key, {})
    others: dict[str, Any] = {"_non_persistent_buffers_set": {n for n, saved in names.buffers.items() if not saved}}
    others |= {"_labelled": dict(state["_labelled"])} if "_labelled" in state else {}
    return PastSlots(weakref.ref(module), key, registries, others, _infer_attributes(module, state))


def _infer_attributes(module: nn.Module, state: State) -> dict[str, Any]:
    """Return the former attributes of a module, as far as they do not refer to the model itself."""
    now = _read_attributes(module)
    if owns_attributes(module):
        return now
    attributes: dict[str, Any] = {}
    for name, value in now.items():
        linked = state.get(name, MISSING)
        if name in HOOKS:
            hooks = {} if linked is MISSING else linked.value
            attributes[name] = {key: value.get(key, hook) for key, hook in hooks.items()}
        elif linked is MISSING or type(linked) in (int, float, str, bool):
            attributes[name] = linked
        else:
            attributes[name] = value
    return attributes


# -- when it goes back ---------------------------------------------------------------------------------------------------


def find_steps(record: ParticleRecord, target: int, number: int, kind: str) -> list[Past]:
    """Return the stored edits of a particle from a version to the newest one.

    Args:
        record: The record of the particle.
        target: The version to go back to.
        number: The newest version.
        kind: The class of the particle, for errors.

    Raises:
        ValueError: If there is no such version.
        StructureError: If not all of those edits are stored.
    """
    if isinstance(target, bool) or not isinstance(target, int) or not 0 <= target <= number:
        raise ValueError(f"{target!r} is not a version of this {kind}: they are 0 to {number}; see net.history")
    steps = [past for past in record.past if past.stop > target]
    expected = target
    for past in steps:
        if past.start != expected:
            break
        expected = past.stop
    if expected != number or (steps and steps[0].start != target):
        starts = sorted({past.start for past in record.past} | {number})
        raise StructureError(
            f"this {kind} cannot go back to version {target}: it has what edits removed since version {starts[0]}, and can go "
            f"to {_list_numbers(starts)}. A model keeps what the last edits removed that it made or followed itself, and one that "
            "followed several at once goes back over all of them; call particles.rollback on the relative that made the edits, and "
            "touch() this one, or keep more with particles.keep_removed(net, edits)"
        )
    return steps


def _list_numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + (" or " if len(numbers) > 1 else "") + str(numbers[-1])


class Plan:
    """The contents of a particle's modules at an earlier version, computed before anything is written."""

    def __init__(self, steps: Sequence[Past], kind: str) -> None:
        self._slots: dict[int, tuple[nn.Module, PastSlots]] = {}
        self._kind = kind
        for past in reversed(steps):
            for slot in reversed(past.slots):
                module = slot.module()
                if module is None:
                    raise StructureError(f"a module that an edit removed from this {kind} is gone")
                self._apply(module, slot)

    def _apply(self, module: nn.Module, slot: PastSlots | Addition) -> None:
        if id(module) not in self._slots:
            self._slots[id(module)] = module, snapshot_slots(module)
        now = self._slots[id(module)][1]
        if isinstance(slot, Addition):
            label = now.others.get("_labelled", {}).pop(slot.name, None)
            for names in now.registries.values():
                names.pop(slot.name, None)
                if label is not None:
                    names.pop(label[0], None)
            return
        for key, names in slot.registries.items():
            current = now.registries[key]
            now.registries[key] = {name: current.get(name, LOST) if v is STAYS else v for name, v in names.items()}
        now.others.update({key: copy.copy(value) for key, value in slot.others.items()})
        now.attributes.update(slot.attributes)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that will be changed."""
        return [module for module, _ in self._slots.values()]

    def check(self) -> None:
        """Raise StructureError if an object that has to come back is not stored."""
        for module, slot in self._slots.values():
            for names in slot.registries.values():
                for name, value in names.items():
                    if value is LOST:
                        raise StructureError(
                            f"{name!r} of a {type(module).__name__} in this {self._kind} was replaced inside of a plain module, "
                            "and nothing has kept what it was; assign such a name through a moduli.Module, or put it back by hand"
                        )

    def list_forced(self, live: set[int]) -> list[tuple[nn.Module, str]]:
        """Return the parameters and buffers that come back, by module and name; `live` has the ids of the present ones."""
        return [
            (module, name)
            for module, slot in self._slots.values()
            for key in ("_parameters", "_buffers")
            for name, value in slot.registries[key].items()
            if isinstance(value, Tensor) and id(value) not in live
        ]

    def list_sizes(self) -> list[tuple[nn.Module, str, Any]]:
        """Return the sizes and other simple attributes that come back: module, name and value."""
        return [
            (module, name, copy.copy(value))
            for module, slot in self._slots.values()
            for name, value in slot.attributes.items()
            if isinstance(value, _SIMPLE) or (type(value) is list and all(isinstance(item, _SIMPLE) for item in value))
        ]

    def write(self) -> None:
        """Write the planned registries and attributes into the modules."""
        for module, slot in self._slots.values():
            state = module.__dict__
            for name in {n for names in slot.registries.values() for n in names} & state.keys():
                del state[name]
            for name, value in slot.attributes.items():
                if value is MISSING:
                    state.pop(name, None)
                elif name in HOOKS:
                    state[name].clear()
                    state[name].update(value)
                else:
                    state[name] = value
            state.update(slot.registries)
            state.update(slot.others)
        SWAPS.add()


def find_keys(parts: Parts, modules: Iterable[nn.Module]) -> list[int | None]:
    """Return the identifiers of modules in a particle; None for those that are not in it."""
    keys = {id(module): key for key, module in parts.modules.items()}
    return [keys.get(id(module)) for module in modules]


def protect_record(guard: Any, record: ParticleRecord) -> None:
    """Register the fields of a record that an edit changes with a guard."""
    guard.add(partial(setattr, record, "version", record.version))
    guard.add(partial(setattr, record, "past", record.past))
