"""Which edit leads from a version to a live module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn

from moduli.layout import Reading, public_name
from moduli.nn import VirtualTensor

from ._config import is_selected
from ._own_values import find_own_values
from ._references import ModelPlace
from ._skeleton import HOOKS, POLICY, RECORD, SLOTS, State, capture, unwrap_kind
from ._version import Numbering, SlotNames, Version
from .base import NytoModuleBase
from .edits import ParticleEdit
from .mtype import ParamConfig

# What an edit of a plain module does not carry over: registries, and what belongs to one particle.
_NEVER = frozenset((
    *HOOKS, "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_labelled", "training", RECORD, POLICY,
    SLOTS,
))  # fmt: skip


class LastSeen(NamedTuple):
    """A particle as it was when it was last seen to be at its version: modules, and their attributes, by identifier."""

    modules: dict[int, nn.Module]
    states: dict[int, State]


def compare(
    version: Version, reading: Reading, before: LastSeen | None, forced: Iterable[tuple[nn.Module, str]] = ()
) -> tuple[Version, ParticleEdit] | None:
    """Find the edit that was made to a live module since it was at a version.

    A child is taken for the same module when it is the same object, or, where that is not known, of the same class. A
    parameter is the same when it has the same shape: another Parameter of that shape is another value, not an edit.

    Args:
        version: The version.
        reading: The module.
        before: What it was at the version; None where that is not known.
        forced: Modules with the name of an attribute that was assigned, hence an edit in any case.

    Returns:
        The next version, and the edit with the values themselves; None if nothing was edited.
    """
    return _Comparison(version, reading, before, forced).result()


class _Comparison:
    def __init__(
        self, version: Version, reading: Reading, before: LastSeen | None, forced: Iterable[tuple[nn.Module, str]]
    ) -> None:
        self.version, self.reading, self.before = version, reading, before
        self.forced = {(id(module), name) for module, name in forced}
        self.numbering = Numbering(reading, version)
        self.edit = ParticleEdit()
        # The place that each module had in the structure of the version, by identifier.
        self.places = {key: place for place, key in enumerate(version.modules)}
        self.old_params = set(version.params)
        # Virtual tensors that relatives get, by module and name.
        self.virtuals: set[tuple[int, str]] = set()
        # The places of modules that are what they were.
        self.matched = [0]
        self._match_modules()
        self._match_params()

    def _is_forced(self, place: int, name: str) -> bool:
        return bool(self.forced) and (id(self.reading.modules[place]), name) in self.forced

    def _list_old_names(self, place: int) -> SlotNames:
        return self.version.list_names(self.places[self.numbering.modules[place]])

    def _match_modules(self) -> None:
        numbers, structure, old = self.numbering.modules, self.reading.structure, self.version.structure
        # Modules that moved to another place are recognised by identity.
        known = {} if self.before is None else {id(module): key for key, module in self.before.modules.items()}
        numbers[0] = self.version.modules[0]
        used = {numbers[0]}
        for place in self.matched:
            names = self._list_old_names(place).modules if self.before is None else {}
            for name, child in structure.modules[place].children:
                if child < 0 or numbers[child] >= 0 or self._is_forced(place, name):
                    continue
                key = names.get(name) if self.before is None else known.get(id(self.reading.modules[child]))
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
        """Note the edits of one module that is still there."""
        key, module, entry = (
            self.numbering.modules[place],
            self.reading.modules[place],
            self.reading.structure.modules[place],
        )
        old, edit = self._list_old_names(place), self.edit
        old_path = self.version.structure.modules[self.places[key]].path
        path = f"{old_path}." if old_path else ""
        told: list[str] = []

        def tell(name: str, before: str, what: str) -> None:
            edit.touched.add(key)
            told.append(f"{before}{path + name!r} {what}")
            edit.names.append(path + name)

        def compare_slots(kind: str, slots: Any, before: dict[str, int | None], number: Callable[[int], int]) -> None:
            for name, slot in slots:
                forced = self._is_forced(place, name)
                after = None if slot < 0 else number(slot)
                if after is None and (forced or before.get(name, "") is not None):
                    tell(name, "", "became None")
                elif after is not None and (forced or before.get(name) != after):
                    tell(name, f"{kind} ", "was assigned" + self._describe_new(kind, slot, after))

        compare_slots("module", entry.children, old.modules, self.numbering.add_module)
        compare_slots("parameter", entry.parameters, old.params, self.numbering.add_param)
        for name, _ in entry.buffers:
            if self._is_forced(place, name) or old.buffers.get(name) is not (name not in entry.transient):
                edit.buffers[key, name] = module._buffers[name]
                tell(name, "", "was registered as a buffer")
        for name, value in module.__dict__.items():
            # One that came with its reference is told of by that.
            if isinstance(value, VirtualTensor) and self._is_forced(place, name):
                tell(name, "virtual tensor ", "was assigned")
                self.virtuals.add((key, name))
            elif isinstance(value, VirtualTensor) and (key, value.attributes.ref) in edit.buffers:
                self.virtuals.add((key, name))
        here = {name for slots in (entry.children, entry.parameters, entry.buffers) for name, _ in slots}
        for name in dict.fromkeys((*old.modules, *old.params, *old.buffers)):
            if name not in here:
                tell(name, "", "was deleted")
        now = [[name for name, _ in slots] for slots in (entry.children, entry.parameters)]
        if not told and [list(old.modules), list(old.params)] != now:
            edit.touched.add(key)
            told.append(f"the order of {path or 'the names'!r} changed")
            edit.names.append(path)
        edit.text += told
        if key in edit.touched and "_labelled" in module.__dict__:
            edit.labels[key] = dict(module.__dict__["_labelled"])

    def _describe_new(self, kind: str, slot: int, key: int) -> str:
        """Return what was assigned, if the particle did not have it before."""
        if kind == "parameter":
            shape = self.reading.structure.layout.entries[slot].shape
            return "" if key in self.old_params else f" of shape {tuple(shape)}"
        return "" if key in self.places else f" a {type(self.reading.modules[slot]).__name__}"

    def _configure(self, following: Version, fresh: list[int]) -> None:
        """Configure the next version: a configuration belongs to a name, and survives the exchange of what has the name."""
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

    def _is_ours(self, place: int) -> bool:
        """Whether plain attributes of a module are its own; those of others belong to its version."""
        module = self.reading.modules[place]
        return isinstance(module, NytoModuleBase) and not hasattr(type(module), "_adopted")

    def _compare_attributes(self) -> None:
        """Note what else an edit of a plain module did to it: sizes of containers, the hooks of pruning."""
        edit, numbers = self.edit, self.numbering
        if self.before is None:
            return
        live = {
            numbers.modules[place]: self.reading.modules[place]
            for place in self.matched
            if numbers.modules[place] in edit.touched and numbers.modules[place] in self.before.states
            if not self._is_ours(place) or any(key == numbers.modules[place] for key, _ in self.virtuals)
        }
        parts: Any = (self.reading.modules, numbers.modules), (self.reading.parameters, numbers.params)
        places = {id(e): ModelPlace(i, key) for i, part in enumerate(parts) for e, key in zip(*part, strict=True)}
        for key, state in zip(live, capture(live.values(), places, strict=False), strict=True):
            was = self.before.states[key]
            if self._is_ours(numbers.modules.index(key)):
                edit.attributes[key] = {name: state[name] for owner, name in self.virtuals if owner == key}
                continue
            edit.attributes[key] = {
                name: copy.copy(held) if type(held) in (dict, list, set) else held
                for name, held in state.items()
                if name not in _NEVER and (name not in was or was[name] is not held or type(held) in (dict, list, set))
            }
            for name in HOOKS:
                old, new = ({} if name not in each else each[name].value for each in (was, state))
                changes = {key: hook for key, hook in new.items() if key not in old} | dict.fromkeys(old.keys() - new)
                if changes:
                    edit.hooks.setdefault(key, {})[name] = changes
