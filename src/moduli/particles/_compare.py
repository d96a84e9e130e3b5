"""Which edit leads from a version to a live module."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from moduli.layout import public_name

from ._config import is_selected
from ._references import ModelPlace
from ._skeleton import HOOKS, POLICY, RECORD, SLOTS, State, capture, unwrap_kind
from .base import NytoModuleBase, VersionDataImp, grow, inherit_configs, number_parameter
from .edits import ParticleEdit
from .mtype import ModuleID, ModuleMeta, ParamID

# What an edit of a plain module does not carry over: registries, and what belongs to one particle.
_NEVER = frozenset((
    *HOOKS, "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_labelled", "training", RECORD, POLICY,
    SLOTS,
))  # fmt: skip


class LastSeen(NamedTuple):
    """A particle as it was when it was last seen to be at its version: modules, and their attributes."""

    modules: dict[ModuleID, nn.Module]
    states: dict[ModuleID, State]


def compare(
    vdata: VersionDataImp, root: nn.Module, before: LastSeen | None, forced: tuple[nn.Module, str] | None = None
) -> tuple[VersionDataImp, ParticleEdit] | None:
    """Find the edit that was made to a live module since it was at a version.

    A child is taken for the same module when it is the same object, or, where that is not known, of the same class. A
    parameter is the same when it has the same shape: another Parameter of that shape is another value, not an edit.

    Args:
        vdata: The version.
        root: The module.
        before: What it was at the version; None where that is not known.
        forced: A module and the name of an attribute that was assigned, hence an edit in any case.

    Returns:
        The metadata of the next version, and the edit with the values themselves; None if nothing was edited.
    """
    return _Comparison(vdata, root, before, forced).result()


@dataclass
class _Comparison:
    vdata: VersionDataImp
    root: nn.Module
    before: LastSeen | None
    forced: tuple[nn.Module, str] | None

    def __post_init__(self) -> None:
        self.following = self.vdata.copy()
        self.following.number += 1
        self.modules: dict[int, ModuleID] = {id(self.root): 0}
        self.params: dict[int, ParamID] = {}
        self.matched: list[tuple[ModuleID, nn.Module]] = [(0, self.root)]
        self.edit = ParticleEdit(0, "")
        self.edit.touched = set()
        self._match()

    def _is_forced(self, module: nn.Module, name: str) -> bool:
        return self.forced is not None and module is self.forced[0] and name == self.forced[1]

    def _match(self) -> None:
        """Find the modules and parameters that are what they were."""
        # Modules that moved to another place are recognised by identity.
        known = {} if self.before is None else {id(module): key for key, module in self.before.modules.items()}
        used: set[ModuleID] = {0}
        taken: set[ParamID] = set()
        for key, module in self.matched:
            for name, child in module._modules.items():
                if child is None or id(child) in self.modules or self._is_forced(module, name):
                    continue
                old = self.vdata.meta[key].sub_modules.get(name) if self.before is None else known.get(id(child))
                if old is None or old in used or self.vdata.meta[old].kind is not unwrap_kind(type(child)):
                    continue
                used.add(old)
                self.modules[id(child)] = old
                self.matched.append((old, child))
        for key, module in self.matched:
            for name, held in module._parameters.items():
                pid = self.vdata.meta[key].sub_params.get(name)
                if held is None or pid is None or self._is_forced(module, name) or self.vdata.shapes[pid] != held.shape:
                    continue
                if id(held) not in self.params and pid not in taken:
                    self.params[id(held)] = pid
                    taken.add(pid)

    def result(self) -> tuple[VersionDataImp, ParticleEdit] | None:
        paths: dict[ModuleID, str] = {}
        for key, path in self.vdata.paths():
            paths.setdefault(key, f"{path}." if path else "")
        for key, module in self.matched:
            self._module(key, module, paths[key])
        following, edit = self.following, self.edit
        if not edit.touched:
            return None
        self._attributes()
        self._configure()
        edit.remove_modules, edit.remove_params = following.get_garbage_modules(), following.get_garbage_params()
        following.remove_modules(edit.remove_modules)
        following.remove_params(edit.remove_params)
        return following, edit.set_next_version_data(following)

    def _module(self, key: ModuleID, module: nn.Module, path: str) -> None:
        """The edits of one module that is still there."""
        old, following, edit = self.vdata.meta[key], self.following, self.edit
        meta = following.meta[key] = ModuleMeta(OrderedDict(), OrderedDict(), OrderedDict(), old.kind)
        told: list[str] = []

        def tell(name: str, before: str, what: str) -> None:
            edit.touched.add(key)
            told.append(f"{before}{path + name!r} {what}")
            edit.names.append(path + name)

        def add_child(child: nn.Module) -> ModuleID:
            place = grow(following, child, self.modules, self.params, edit.add_modules, edit.add_params)
            inherit_configs(following, child, self.params)
            return place

        def add_parameter(held: nn.Parameter) -> ParamID:
            return number_parameter(following, held, self.params, edit.add_params)

        tables: list[Any] = [
            ("module", module._modules, old.sub_modules, meta.sub_modules, add_child, edit.add_modules),
            ("parameter", module._parameters, old.sub_params, meta.sub_params, add_parameter, edit.add_params),
        ]
        for kind, live, before, after, add, fresh in tables:
            for name, held in live.items():
                after[name] = None if held is None else add(held)
                if held is None and (self._is_forced(module, name) or before.get(name, "") is not None):
                    tell(name, "", "became None")
                elif held is not None and (self._is_forced(module, name) or before.get(name) != after[name]):
                    what = f" of shape {tuple(held.shape)}" if kind == "parameter" else f" a {type(held).__name__}"
                    tell(name, f"{kind} ", "was assigned" + (what if after[name] in fresh else ""))
        for name, buffer in module._buffers.items():
            persistent = meta.sub_buffers[name] = name not in module._non_persistent_buffers_set
            if self._is_forced(module, name) or old.sub_buffers.get(name) is not persistent:
                edit.buffers[key, name] = buffer
                tell(name, "", "was registered as a buffer")
        here = {*meta.sub_modules, *meta.sub_params, *meta.sub_buffers}
        for name in dict.fromkeys((*old.sub_modules, *old.sub_params, *old.sub_buffers)):
            if name not in here:
                tell(name, "", "was deleted")
        if not told and (old.sub_modules, old.sub_params) != (meta.sub_modules, meta.sub_params):
            edit.touched.add(key)
            told.append(f"the order of {path or 'the names'!r} changed")
            edit.names.append(path)
        edit.text += told
        if key in edit.touched and "_labelled" in module.__dict__:
            edit.labels[key] = dict(module.__dict__["_labelled"])

    def _configure(self) -> None:
        """A configuration belongs to a name, and survives the exchange of what has the name."""
        species = self.following.species
        if not species.configured:
            return
        before = {name: pid for pid, name in self.vdata.names.items()}
        for pid, name in self.following.names.items():
            if pid not in self.edit.add_params:
                continue
            config = self.following.config[pid]
            for pattern, changes in species.rules:
                if is_selected(name, pattern) or is_selected(public_name(name), pattern):
                    config.__dict__.update(changes)
            if name in before and config == type(config)():
                self.following.config[pid] = self.vdata.config[before[name]].copy()

    def _attributes(self) -> None:
        """What else an edit of a plain module did to it: sizes of containers, the hooks of pruning."""
        edit = self.edit
        if self.before is None:
            return
        live = {
            key: module
            for key, module in self.matched
            if key in edit.touched and key in self.before.states
            if not isinstance(module, NytoModuleBase) or hasattr(type(module), "_adopted")
        }
        places = {key: ModelPlace(0, place) for key, place in self.modules.items()}
        places |= {key: ModelPlace(1, place) for key, place in self.params.items()}
        for key, state in zip(live, capture(live.values(), places, strict=False), strict=True):
            was = self.before.states[key]
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
