"""Comparing a live module with a version of its species, to find the edit that was made in between."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from moduli.layout import Reading, public_name
from moduli.nn import VirtualTensor

from ._config import is_selected
from ._facts import unwrap_kind
from ._own_values import find_own_values
from ._references import ModelPlace
from ._skeleton import HOOKS, POLICY, RECORD, SLOTS, State, capture
from ._version import Numbering, SlotNames, Version
from .base import NytoModuleBase
from .edits import ParticleEdit
from .mtype import ParamConfig

# Attributes of a plain module that relatives do not take over: registries, and those that belong to one particle.
_NEVER = frozenset((
    *HOOKS, "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_labelled", "training", RECORD, POLICY,
    SLOTS,
))  # fmt: skip


class LastSeen(NamedTuple):
    """A particle at the last time that it was known to be at its version: modules, and their attributes, by identifier."""

    modules: dict[int, nn.Module]
    states: dict[int, State]


def compare(
    version: Version, reading: Reading, before: LastSeen | None, forced: Iterable[tuple[nn.Module, str]] = ()
) -> tuple[Version, ParticleEdit] | None:
    """Return the edit that was made to a live module since it was at a version.

    A child counts as the same module if it is the same object or, without `before`, of the same class. A
    parameter counts as the same if it has the same shape: another Parameter of that shape is another value, not an edit.

    Args:
        version: The version.
        reading: The module.
        before: The module at the version; None if unknown.
        forced: Modules with the name of an attribute that was assigned, which is an edit in any case.

    Returns:
        The next version, and the edit with the values themselves; None if nothing was edited.
    """
    return _Comparison(version, reading, before, forced).result()


class _Comparison:
    """One comparison: matches modules and parameters with those of the version, then records the differences as an edit."""

    def __init__(
        self, version: Version, reading: Reading, before: LastSeen | None, forced: Iterable[tuple[nn.Module, str]]
    ) -> None:
        self.version, self.reading, self.before = version, reading, before
        self.forced = {(id(module), name) for module, name in forced}
        self.numbering = Numbering(reading, version)
        self.edit = ParticleEdit()
        # The position of each module in the structure of the version, by identifier.
        self.places = {key: place for place, key in enumerate(version.modules)}
        self.old_params = set(version.params)
        # Virtual tensors that relatives take over, by module identifier and name.
        self.virtuals: set[tuple[int, str]] = set()
        # The positions of modules that are in both structures.
        self.matched = [0]
        self._match_modules()
        self._match_params()

    def _is_forced(self, place: int, name: str) -> bool:
        return bool(self.forced) and (id(self.reading.modules[place]), name) in self.forced

    def _list_old_names(self, place: int) -> SlotNames:
        return self.version.list_names(self.places[self.numbering.modules[place]])

    def _match_modules(self) -> None:
        numbers, structure, old = self.numbering.modules, self.reading.structure, self.version.structure
        # A module that moved to another position is matched by identity.
        keys = {} if self.before is None else {id(module): key for key, module in self.before.modules.items()}
        numbers[0] = self.version.modules[0]
        used = {numbers[0]}
        for place in self.matched:
            names = self._list_old_names(place).modules if self.before is None else {}
            for name, child in structure.modules[place].children:
                if child < 0 or numbers[child] >= 0 or self._is_forced(place, name):
                    continue
                key = names.get(name) if self.before is None else keys.get(id(self.reading.modules[child]))
                if key is None or key in used:
                    continue
                if unwrap_kind(old.modules[self.places[key]].kind) is unwrap_kind(structure.modules[child].kind):
                    used.add(key)
                    numbers[child] = key
                    self.matched.append(child)

    def _match_params(self) -> None:
        numbers, layout = self.numbering.params, self.reading.structure.layout
        shapes = dict(zip(self.version.params, (entry.shape for entry in self.version.structure.layout), strict=True))
        used: set[int] = set()
        for place in self.matched:
            names = self._list_old_names(place).params
            for name, param in self.reading.structure.modules[place].parameters:
                key = names.get(name)
                if param < 0 or key is None or self._is_forced(place, name) or numbers[param] >= 0 or key in used:
                    continue
                if shapes[key] == layout.entries[param].shape:
                    numbers[param] = key
                    used.add(key)

    def result(self) -> tuple[Version, ParticleEdit] | None:
        version, edit, numbering, reading = self.version, self.edit, self.numbering, self.reading
        for place in self.matched:
            self._compare_module(place)
        if not edit.touched:
            return None
        following = Version(reading.structure, numbering.modules, numbering.params, version.species, version.number + 1)
        fresh = [place for place, key in enumerate(following.modules) if key not in self.places]
        edit.add_modules = {following.modules[place]: reading.modules[place] for place in fresh}
        params: Any = zip(following.params, reading.parameters, strict=True)
        edit.add_params = {key: param for key, param in params if key not in self.old_params}
        edit.remove_modules = set(version.modules).difference(following.modules)
        edit.remove_params = self.old_params.difference(following.params)
        self._compare_attributes()
        self._configure(following, fresh)
        find_own_values(version, following, edit)
        return following, edit

    def _compare_module(self, place: int) -> None:
        """Record the edits of one module that is in both structures."""
        key, module, entry = (
            self.numbering.modules[place],
            self.reading.modules[place],
            self.reading.structure.modules[place],
        )
        old, edit = self._list_old_names(place), self.edit
        old_path = self.version.structure.modules[self.places[key]].path
        path = f"{old_path}." if old_path else ""
        count, record = len(edit.text), partial(self._record, key, path)
        self._compare_slots("module", place, entry.children, old.modules, record)
        self._compare_slots("parameter", place, entry.parameters, old.params, record)
        self._compare_buffers(place, old.buffers, record)
        self._compare_virtuals(place, record)
        present = {name for slots in (entry.children, entry.parameters, entry.buffers) for name, _ in slots}
        for name in dict.fromkeys((*old.modules, *old.params, *old.buffers)):
            if name not in present:
                record(name, "", "was deleted")
        order = [[name for name, _ in slots] for slots in (entry.children, entry.parameters)]
        if len(edit.text) == count and [list(old.modules), list(old.params)] != order:
            edit.touched.add(key)
            edit.text.append(f"the order of {path or 'the names'!r} changed")
            edit.names.append(path)
        if key in edit.touched and "_labelled" in module.__dict__:
            edit.labels[key] = dict(module.__dict__["_labelled"])

    def _record(self, key: int, path: str, name: str, kind: str, change: str) -> None:
        """Record that an attribute of a module was edited."""
        self.edit.touched.add(key)
        self.edit.text.append(f"{kind}{path + name!r} {change}")
        self.edit.names.append(path + name)

    def _compare_slots(
        self, kind: str, place: int, slots: Any, before: dict[str, int | None], record: Callable[[str, str, str], None]
    ) -> None:
        """Record the children or parameters of a module that were assigned or became None."""
        number = self.numbering.add_module if kind == "module" else self.numbering.add_param
        for name, slot in slots:
            forced = self._is_forced(place, name)
            after = None if slot < 0 else number(slot)
            if after is None and (forced or before.get(name, "") is not None):
                record(name, "", "became None")
            elif after is not None and (forced or before.get(name) != after):
                record(name, f"{kind} ", "was assigned" + self._describe_new(kind, slot, after))

    def _compare_buffers(self, place: int, before: dict[str, bool], record: Callable[[str, str, str], None]) -> None:
        """Record the buffers of a module that are new, or whose persistence changed."""
        key, entry = self.numbering.modules[place], self.reading.structure.modules[place]
        for name, _ in entry.buffers:
            if self._is_forced(place, name) or before.get(name) is not (name not in entry.transient):
                self.edit.buffers[key, name] = self.reading.modules[place]._buffers[name]
                record(name, "", "was registered as a buffer")

    def _compare_virtuals(self, place: int, record: Callable[[str, str, str], None]) -> None:
        """Record the virtual tensors of a module that were assigned."""
        key = self.numbering.modules[place]
        for name, value in self.reading.modules[place].__dict__.items():
            if not isinstance(value, VirtualTensor):
                continue
            if self._is_forced(place, name):
                record(name, "virtual tensor ", "was assigned")
                self.virtuals.add((key, name))
            elif (key, value.attributes.ref) in self.edit.buffers:  # recorded with its reference buffer
                self.virtuals.add((key, name))

    def _describe_new(self, kind: str, slot: int, key: int) -> str:
        """Return text that describes an assigned module or parameter if it is new to the particle; otherwise ""."""
        if kind == "parameter":
            shape = self.reading.structure.layout.entries[slot].shape
            return "" if key in self.old_params else f" of shape {tuple(shape)}"
        return "" if key in self.places else f" a {type(self.reading.modules[slot]).__name__}"

    def _configure(self, following: Version, fresh: list[int]) -> None:
        """Configure the next version: configurations belong to names, also if the parameter of that name was replaced."""
        version, layout = self.version, following.structure.layout
        names = dict(zip(version.params, (entry.name for entry in version.structure.layout), strict=True))
        for key, entry in zip(following.params, layout, strict=True):
            if key in names and names[key] in version.configs:
                following.configs[entry.name] = version.configs[names[key]]
        following.inherit_configs(self.reading, fresh)
        if not following.species.configured:
            return
        for key, entry in zip(following.params, layout, strict=True):
            if key in names:
                continue
            config = following.configs.get(entry.name, ParamConfig())
            for pattern, changes in following.species.rules:
                if is_selected(entry.name, pattern) or is_selected(public_name(entry.name), pattern):
                    config.__dict__.update(changes)
            if config == ParamConfig() and entry.name in version.configs:
                config = version.configs[entry.name].copy()
            following.configs[entry.name] = config

    def _compare_attributes(self) -> None:
        """Record the plain attributes and hooks that an edit of a plain module changed, such as sizes and hooks of pruning."""
        edit, numbers = self.edit, self.numbering
        if self.before is None:
            return
        states = self.before.states
        live = {
            numbers.modules[place]: self.reading.modules[place]
            for place in self.matched
            if numbers.modules[place] in edit.touched and numbers.modules[place] in states
        }
        live = {key: module for key, module in live.items() if not owns_attributes(module) or self._has_virtual(key)}
        parts: Any = (self.reading.modules, numbers.modules), (self.reading.parameters, numbers.params)
        places = {id(e): ModelPlace(i, key) for i, part in enumerate(parts) for e, key in zip(*part, strict=True)}
        captured = capture(live.values(), places, strict=False)
        for (key, module), state in zip(live.items(), captured, strict=True):
            if owns_attributes(module):
                edit.attributes[key] = {name: state[name] for owner, name in self.virtuals if owner == key}
            else:
                edit.attributes[key] = _find_changed_attributes(states[key], state)
                hooks = _find_changed_hooks(states[key], state)
                if hooks:
                    edit.hooks[key] = hooks

    def _has_virtual(self, key: int) -> bool:
        return any(owner == key for owner, _ in self.virtuals)


def owns_attributes(module: nn.Module) -> bool:
    """Whether the plain attributes of a module belong to the particle; those of plain modules belong to the version."""
    return isinstance(module, NytoModuleBase) and not hasattr(type(module), "_adopted")


def _find_changed_attributes(before: State, after: State) -> dict[str, Any]:
    """Return the attributes that were added or replaced, and all containers, which may have been changed in place."""
    return {
        name: copy.copy(value) if type(value) in (dict, list, set) else value
        for name, value in after.items()
        if name not in _NEVER
        if name not in before or before[name] is not value or type(value) in (dict, list, set)
    }


def _find_changed_hooks(before: State, after: State) -> dict[str, dict[Any, Any]]:
    """Return, for each kind of hook, those that were added by their keys, and None for those that were removed."""
    changed = {}
    for name in HOOKS:
        old, new = ({} if name not in each else each[name].value for each in (before, after))
        changes = {key: hook for key, hook in new.items() if key not in old} | dict.fromkeys(old.keys() - new)
        if changes:
            changed[name] = changes
    return changed
