"""What an edit does to metadata and to a particle, once for all eight kinds.

The documented pairs of updaters are thin classes over these.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn

from .base import ParticleDataImp, VersionDataImp, paired
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


class AddParam(ParticleEdit):
    """A parameter is assigned."""

    def __init__(
        self,
        module_id: ModuleID,
        attr_name: str,
        add_param_id: ParamID,
        remove_modules: set[ModuleID] | None = None,
        remove_params: set[ParamID] | None = None,
        add_param: nn.Parameter | None = None,
    ) -> None:
        super().__init__(module_id, attr_name, remove_modules, remove_params)
        self.add_param_id = add_param_id
        self.add_param = add_param
        self.label: tuple[str, Any] | None = None

    def apply(self, module: nn.Module, pdata: ParticleDataImp, initiator: bool) -> None:
        value = self.add_param
        if initiator and value is not None:
            pdata.params[self.add_param_id] = value
            nn.Module.__setattr__(module, self.attr_name, value)
            self.settle()
            return
        if self.add_param_id not in pdata.params:
            if value is None:
                raise StructureError(_lost(self.attr_name, f"parameter {self.add_param_id}"))
            pdata.params[self.add_param_id] = copied(value)
        put(module, "_parameters", self.attr_name, pdata.params[self.add_param_id])
        if self.label is not None and "_labelled" in module.__dict__:
            module.__dict__["_labelled"][self.label[0]] = self.label[1]

    def settle(self) -> None:
        """Keep a copy of the value as it is now, instead of the parameter itself."""
        if self.add_param is not None:
            self.add_param = copied(self.add_param)

    def sentence(self, vdata: VersionDataImp) -> str:
        shape = "" if self.add_param is None else f" of shape {tuple(self.add_param.shape)}"
        return f"parameter {super().sentence(vdata)}{shape}"

    verb = "was assigned"


class SetParamNone(ParticleEdit):
    """A parameter becomes None."""

    verb = "became None"

    def apply(self, module: nn.Module, pdata: ParticleDataImp, initiator: bool) -> None:
        put(module, "_parameters", self.attr_name, None)


class DelParam(ParticleEdit):
    """A parameter is deleted."""

    verb = "was deleted"

    def __init__(self, module_id: ModuleID, attr_name: str, remove_params: set[ParamID] | None = None) -> None:
        super().__init__(module_id, attr_name, None, remove_params)


class AddModule(ParticleEdit):
    """A module is assigned."""

    def __init__(
        self,
        module_id: ModuleID,
        attr_name: str,
        add_module_id: ModuleID,
        add_modules: ModuleDict,
        add_params: ParamDict,
        remove_modules: set[ModuleID] | None = None,
        remove_params: set[ParamID] | None = None,
    ) -> None:
        super().__init__(module_id, attr_name, remove_modules, remove_params)
        self.add_module_id = add_module_id
        self.add_modules = add_modules
        self.add_params = add_params

    def apply(self, module: nn.Module, pdata: ParticleDataImp, initiator: bool) -> None:
        if self.add_module_id not in self.add_modules:
            # It was in the particle already, under another name.
            if self.add_module_id not in pdata.modules:
                raise StructureError(_lost(self.attr_name, f"module {self.add_module_id}"))
            put(module, "_modules", self.attr_name, pdata.modules[self.add_module_id])
            return
        if initiator:
            value = self.add_modules[self.add_module_id]
            pdata.add_modules(self.add_modules)
            pdata.add_params(self.add_params)
            nn.Module.__setattr__(module, self.attr_name, value)
            self.settle()
            return
        meta = self.next_version_modules_meta
        if meta is None:
            raise StructureError("this edit has not been told the metadata of the next version")
        source = self.add_modules[self.add_module_id]
        memo: dict[int, Any] = {}
        for key, each in paired(source, self.add_module_id, meta):
            if key not in self.add_modules:
                if key not in pdata.modules:
                    raise StructureError(_lost(self.attr_name, f"module {key}"))
                memo[id(each)] = pdata.modules[key]
            for name, pid in meta[key].sub_params.items():
                if pid is not None and pid not in self.add_params:
                    if pid not in pdata.params:
                        raise StructureError(_lost(self.attr_name, f"parameter {pid}"))
                    memo[id(each._parameters[name])] = pdata.params[pid]
        made = copy.deepcopy(source, memo)
        for key, each in paired(made, self.add_module_id, meta):
            if key in self.add_modules:
                pdata.modules[key] = each
                for name, pid in meta[key].sub_params.items():
                    held = each._parameters[name]
                    if pid is not None and held is not None:
                        pdata.params.setdefault(pid, held)
        put(module, "_modules", self.attr_name, made)

    def settle(self) -> None:
        """Keep a copy of the modules as they are now, instead of the modules themselves."""
        meta = self.next_version_modules_meta
        if self.add_module_id in self.add_modules and meta is not None:
            twin = copy.deepcopy(self.add_modules[self.add_module_id])
            for key, each in paired(twin, self.add_module_id, meta):
                if key in self.add_modules:
                    self.add_modules[key] = each
                    for name, pid in meta[key].sub_params.items():
                        held = each._parameters[name]
                        if pid in self.add_params and pid is not None and held is not None:
                            self.add_params[pid] = held

    def sentence(self, vdata: VersionDataImp) -> str:
        value = self.add_modules.get(self.add_module_id)
        kind = "" if value is None else f" a {type(value).__name__}"
        return f"module {super().sentence(vdata)}{kind}"

    verb = "was assigned"


class SetModuleNone(ParticleEdit):
    """A module becomes None."""

    verb = "became None"

    def apply(self, module: nn.Module, pdata: ParticleDataImp, initiator: bool) -> None:
        put(module, "_modules", self.attr_name, None)


class DelModule(ParticleEdit):
    """A module is deleted."""

    verb = "was deleted"


class RegisterBuffer(ParticleEdit):
    """A buffer is registered."""

    verb = "was registered as a buffer"

    def __init__(
        self,
        module_id: ModuleID,
        attr_name: str,
        value: torch.Tensor | None,
        persistent: bool,
        remove_modules: set[ModuleID] | None = None,
        remove_params: set[ParamID] | None = None,
    ) -> None:
        super().__init__(module_id, attr_name, remove_modules, remove_params)
        self.value = value
        self.persistent = persistent
        self.label: tuple[str, Any] | None = None

    def apply(self, module: nn.Module, pdata: ParticleDataImp, initiator: bool) -> None:
        value = self.value
        if initiator:
            self.settle()
        elif value is not None:
            value = value.detach().clone()
        put(module, "_buffers", self.attr_name, value, self.persistent)
        if self.label is not None and "_labelled" in module.__dict__:
            module.__dict__["_labelled"][self.label[0]] = self.label[1]

    def settle(self) -> None:
        """Keep a copy of the value as it is now, instead of the buffer itself."""
        if self.value is not None:
            self.value = self.value.detach().clone()


class DelBuffer(ParticleEdit):
    """A buffer is deleted."""

    verb = "was deleted"

    def __init__(self, module_id: ModuleID, attr_name: str) -> None:
        super().__init__(module_id, attr_name)


class Together(ParticleEdit):
    """Several edits that were noticed at once."""

    def __init__(self, edits: list[ParticleEdit], remove_modules: set[ModuleID], remove_params: set[ParamID]) -> None:
        super().__init__(0, "", remove_modules, remove_params)
        self.edits = edits

    def set_next_version_data(self, vdata: VersionDataImp) -> Self:
        """Receive the metadata of the version that particles go to."""
        for edit in self.edits:
            edit.set_next_version_data(vdata)
        return super().set_next_version_data(vdata)

    def run(self, pdata: ParticleDataImp) -> None:
        """Bring one particle to the next version, or raise and leave it as it was."""
        undo = Undo((), pdata)
        try:
            for edit in self.edits:
                if edit.module_id not in pdata.modules:
                    # This particle removed the module itself.
                    continue
                undo.note(pdata.modules[edit.module_id])
                edit.apply(pdata.modules[edit.module_id], pdata, False)
            pdata.remove_modules(self.remove_modules & set(pdata.modules))
            pdata.remove_params(self.remove_params & set(pdata.params))
            for edit in self.edits:
                if edit.module_id in pdata.modules:
                    edit.arrange(pdata.modules[edit.module_id])
        except BaseException:
            undo.restore()
            raise

    def sentence(self, vdata: VersionDataImp) -> str:
        """The edits in words."""
        return "; ".join(edit.sentence(vdata) for edit in self.edits)


def _lost(name: str, what: str) -> str:
    return (
        f"an edit of the species lets {name!r} refer to {what}, which this particle has removed itself; combine it as it "
        "is through detach(), or take its values over with moduli.particles.migrate"
    )


def copied(parameter: nn.Parameter) -> nn.Parameter:
    """An independent parameter with the same value."""
    return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
