"""What an edit does to metadata and to a particle, once for all eight kinds.

The documented pairs of updaters are thin classes over these.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Self

from torch import nn

from .base import ParticleDataImp, VersionDataImp
from .errors import StructureError
from .kernel import ParticleUpdater, VersionUpdater
from .mtype import MetaDict, ModuleDict, ModuleID, ModuleMeta, ParamConfig, ParamDict, ParamID

__all__ = ["ParticleEdit", "Undo", "VersionEdit", "grown", "put"]

_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Undo:
    """What some modules hold, to put it back when an edit fails."""

    def __init__(self, modules: Any = (), pdata: ParticleDataImp | None = None) -> None:
        self._states: list[tuple[nn.Module, dict[str, Any], list[tuple[Any, Any]]]] = []
        for module in modules:
            self.note(module)
        self._pdata = pdata
        if pdata is not None:
            self._held = (OrderedDict(pdata.modules), OrderedDict(pdata.params))

    def note(self, module: nn.Module) -> None:
        """Remember one module, if it is not remembered yet."""
        if any(known is module for known, _, _ in self._states):
            return
        state = module.__dict__
        containers = [state[key] for key in (*_REGISTRIES, "_non_persistent_buffers_set", "_labelled") if key in state]
        self._states.append((module, dict(state), [(held, copy.copy(held)) for held in containers]))

    def restore(self) -> None:
        """Put everything back."""
        for module, state, containers in self._states:
            for held, before in containers:
                held.clear()
                held.update(before)
            module.__dict__.clear()
            module.__dict__.update(state)
        if self._pdata is not None:
            self._pdata.modules, self._pdata.params = self._held


def put(module: nn.Module, registry: str, name: str, value: Any, persistent: bool = True) -> None:
    """Give a name of a module another meaning, whatever it had before."""
    state = module.__dict__
    for key in _REGISTRIES:
        if key != registry:
            state[key].pop(name, None)
    state["_non_persistent_buffers_set"].discard(name)
    state.pop(name, None)
    state[registry][name] = value
    if registry == "_buffers" and not persistent:
        state["_non_persistent_buffers_set"].add(name)


def drop(module: nn.Module, name: str) -> None:
    """Take a name of a module away."""
    state = module.__dict__
    for key in _REGISTRIES:
        state[key].pop(name, None)
    state["_non_persistent_buffers_set"].discard(name)
    labelled = state.get("_labelled", {})
    for public in [public for public, (key, _) in labelled.items() if key == name]:
        del labelled[public]


def grown(
    vdata: VersionDataImp, module: nn.Module, known_modules: dict[int, ModuleID], known_params: dict[int, ParamID]
) -> tuple[ModuleID, ModuleDict, ParamDict]:
    """Give identifiers to a tree of modules that is added to a structure, except for those parts that are in it already.

    Args:
        vdata: The metadata, which is extended.
        module: The top of the tree.
        known_modules: Identifiers by `id` of the modules in the structure; extended.
        known_params: Identifiers by `id` of the parameters in the structure; extended.

    Returns:
        The identifier of the tree's top, and the new modules and parameters by identifier.
    """
    modules: ModuleDict = OrderedDict()
    params: ParamDict = OrderedDict()

    def visit(each: nn.Module) -> ModuleID:
        if id(each) in known_modules:
            return known_modules[id(each)]
        key = known_modules[id(each)] = max(vdata.meta, default=-1) + 1
        kept = OrderedDict((n, n not in each._non_persistent_buffers_set) for n in each._buffers)
        meta = vdata.meta[key] = ModuleMeta(OrderedDict(), OrderedDict(), kept, type(each))
        modules[key] = each
        for name, held in each._parameters.items():
            if held is None:
                meta.sub_params[name] = None
                continue
            pid = known_params.get(id(held))
            if pid is None:
                pid = known_params[id(held)] = max(vdata.config, default=-1) + 1
                vdata.config[pid] = ParamConfig()
                vdata.shapes[pid] = tuple(held.shape)
                params[pid] = held
            meta.sub_params[name] = pid
        for name, child in each._modules.items():
            meta.sub_modules[name] = None if child is None else visit(child)
        return key

    return visit(module), modules, params


class VersionEdit(VersionUpdater[VersionDataImp, ParticleDataImp]):
    """An edit of one attribute, as the species sees it. Subclasses say what it changes."""

    def __init__(self, module_id: ModuleID, attr_name: str) -> None:
        self.module_id = module_id
        self.attr_name = attr_name
        self.owner_modules: ModuleDict | None = None
        self.owner_params: ParamDict | None = None

    def set_version_data(self, vdata: VersionDataImp) -> Self:
        """Receive the metadata of the current version."""
        return self

    def set_particle_data(self, pdata: ParticleDataImp) -> Self:
        """Receive the data of the particle that starts the edit."""
        self.owner_modules, self.owner_params = pdata.modules, pdata.params
        return self

    def run(self, vdata: VersionDataImp) -> tuple[VersionDataImp, ParticleUpdater[VersionDataImp, ParticleDataImp]]:
        """Make the metadata of the next version, and what brings particles there."""
        following = vdata.copy()
        following.number += 1
        if self.module_id not in following.meta:
            raise StructureError(f"the particle has no module {self.module_id}; it has {list(following.meta)}")
        before = following.meta[self.module_id]
        edit = self.change(following, before)
        edit.remove_modules, edit.remove_params = following.get_garbage_modules(), following.get_garbage_params()
        following.remove_modules(edit.remove_modules)
        following.remove_params(edit.remove_params)
        # What the particle that starts the edit consists of must not be kept by it.
        self.owner_modules = self.owner_params = None
        vdata.species.events.append(following.event(vdata, edit.sentence(vdata)))
        return following, edit

    def change(self, vdata: VersionDataImp, meta: ModuleMeta) -> ParticleEdit:
        """Change the metadata of the next version; returns what does the same to particles."""
        raise TypeError(f"{type(self).__name__} does not say what it changes")

    def _clear(self, meta: ModuleMeta, keep: Any = None) -> None:
        for slots in (meta.sub_modules, meta.sub_params, meta.sub_buffers):
            if slots is not keep:
                slots.pop(self.attr_name, None)

    def _present(self, slots: Mapping[str, Any], what: str) -> None:
        if self.attr_name not in slots:
            raise AttributeError(
                f"module {self.module_id} has no {what} {self.attr_name!r}; it has {list(slots) or 'none'}"
            )


class ParticleEdit(ParticleUpdater[VersionDataImp, ParticleDataImp]):
    """An edit of one attribute, as a particle sees it."""

    verb = "was edited"

    def __init__(
        self,
        module_id: ModuleID,
        attr_name: str,
        remove_modules: set[ModuleID] | None = None,
        remove_params: set[ParamID] | None = None,
    ) -> None:
        self.module_id = module_id
        self.attr_name = attr_name
        self.remove_modules = remove_modules or set()
        self.remove_params = remove_params or set()
        self.next_version_modules_meta: MetaDict | None = None
        self._owner: weakref.ref[ParticleDataImp] | None = None

    @property
    def owner(self) -> ParticleDataImp | None:
        """The data of the particle that started the edit, as long as it lives."""
        return self._owner() if self._owner is not None else None

    def set_version_data(self, vdata: VersionDataImp) -> Self:
        """Receive the metadata of the version that particles come from."""
        return self

    def set_next_version_data(self, vdata: VersionDataImp) -> Self:
        """Receive the metadata of the version that particles go to."""
        self.next_version_modules_meta = vdata.meta
        return self

    def set_particle_data(self, pdata: ParticleDataImp) -> Self:
        """Receive the data of the particle that starts the edit."""
        self._owner = weakref.ref(pdata)
        return self

    def run(self, pdata: ParticleDataImp) -> None:
        """Bring one particle to the next version, or raise and leave it as it was."""
        module = pdata.modules[self.module_id]
        undo = Undo([module], pdata)
        try:
            self.apply(module, pdata, self.owner is pdata)
            pdata.remove_modules(self.remove_modules & set(pdata.modules))
            pdata.remove_params(self.remove_params & set(pdata.params))
            self.arrange(module)
        except BaseException:
            undo.restore()
            raise

    def apply(self, module: nn.Module, pdata: ParticleDataImp, initiator: bool) -> None:
        """Change a module of a particle; the one that started the edit gets the very objects."""
        drop(module, self.attr_name)

    def arrange(self, module: nn.Module) -> None:
        """Put the names of a module in the order that the next version has."""
        metas = self.next_version_modules_meta
        meta = metas.get(self.module_id) if metas is not None else None
        if meta is not None:
            for registry, order in ((module._parameters, meta.sub_params), (module._modules, meta.sub_modules)):
                arranged(registry, order)

    def sentence(self, vdata: VersionDataImp) -> str:
        """The edit in words."""
        path = module_path(vdata, self.module_id)
        return f"{(path + '.' if path else '') + self.attr_name!r} {self.verb}"


def arranged(registry: dict[str, Any], order: Mapping[str, Any]) -> None:
    """Put the keys of a dict in an order, in place."""
    if list(registry) != list(order) and set(registry) == set(order):
        held = dict(registry)
        registry.clear()
        registry.update((name, held[name]) for name in order)


def module_path(vdata: VersionDataImp, key: ModuleID) -> str:
    """The dotted name of a module."""
    queue: list[tuple[ModuleID, str]] = [(0, "")]
    seen: set[ModuleID] = set()
    for each, path in queue:
        if each == key:
            return path
        if each not in seen:
            seen.add(each)
            below = vdata.meta[each].sub_modules.items()
            queue += [(child, f"{path}.{name}" if path else name) for name, child in below if child is not None]
    return f"module {key}"
