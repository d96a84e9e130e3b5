"""What an edit of a structure is: the values it brings, and how a particle is brought to the next version.

The metadata of the next version says what every attribute refers to. An edit adds the modules, parameters and buffers that
are new there, so bringing a particle along is one thing for all kinds of edits: copy what is new, and let the modules that
were edited refer to what the metadata says. The documented updaters are names for edits of one attribute.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from ._skeleton import HOOKS, RECORD, ModelPlace, State, capture, restore
from .base import ParticleDataImp, VersionDataImp
from .errors import StructureError
from .kernel import ParticleUpdater, VersionUpdater
from .mtype import MetaDict, ModuleDict, ModuleID, ModuleMeta, ParamDict, ParamID

__all__ = ["ParticleEdit", "Undo", "VersionEdit", "clone_param"]


def clone_param(param: nn.Parameter) -> nn.Parameter:
    """A parameter with a copy of the value, trainable if the original is.

    Example:
        >>> from moduli.particles.edits import clone_param
        >>> a = nn.Parameter(torch.ones(2))
        >>> b = clone_param(a)
        >>> b is a, torch.equal(a, b), b.requires_grad
        (False, True, True)
    """
    return nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)


_CONTAINERS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_labelled")


class Undo:
    """What some modules hold, to put it back when an edit fails."""

    def __init__(self, *modules: nn.Module) -> None:
        states = [module.__dict__ for module in modules]
        self._held = [(held, copy.copy(held)) for state in states for key, held in state.items() if key in _CONTAINERS]
        self._held += [(state, dict(state)) for state in states]

    def restore(self) -> None:
        """Put everything back."""
        for held, before in self._held:
            held.clear()
            held.update(before)


@dataclass(eq=False)
class ParticleEdit(ParticleUpdater[VersionDataImp, ParticleDataImp]):
    """An edit, as a particle sees it.

    Attributes:
        module_id: The module that was edited.
        attr_name: The attribute.
        remove_modules: The modules that are gone.
        remove_params: The parameters that are gone.
        add_modules: The modules that are new.
        add_params: The parameters that are new.
        next_version_modules_meta: What every attribute refers to afterwards.
        touched: All modules that were edited.
        buffers: The buffers that are new, by module and name.
        attributes: Plain attributes that came with an edit of a plain module; None for those that went.
        hooks: Hooks that came with it; None for those that went.
        labels: The labels of edited modules.
        text: The edit in words.
    """

    module_id: ModuleID
    attr_name: str
    remove_modules: set[ModuleID] = field(default_factory=set)
    remove_params: set[ParamID] = field(default_factory=set)
    add_modules: ModuleDict = field(default_factory=OrderedDict)
    add_params: ParamDict = field(default_factory=OrderedDict)
    next_version_modules_meta: MetaDict | None = None
    touched: set[ModuleID] = field(default_factory=set)
    buffers: dict[tuple[ModuleID, str], Tensor | None] = field(default_factory=dict)
    attributes: dict[ModuleID, State] = field(default_factory=dict)
    hooks: dict[ModuleID, dict[str, dict[int, Any]]] = field(default_factory=dict)
    labels: dict[ModuleID, dict[str, Any]] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)
    _owner: weakref.ref[ParticleDataImp] | None = None

    def __post_init__(self) -> None:
        self.touched.add(self.module_id)

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

    def settle(self) -> None:
        """Keep copies of the values as they are now, instead of those of the particle that started the edit."""
        self.add_modules, self.add_params = self._copies(None)
        self.buffers = {key: None if held is None else held.detach().clone() for key, held in self.buffers.items()}

    def run(self, pdata: ParticleDataImp) -> None:
        """Bring one particle to the next version, or raise and leave it as it was."""
        meta = self.next_version_modules_meta
        if meta is None:
            raise StructureError("this edit has not been told the metadata of the next version")
        starts = self.owner is pdata
        device = None if starts else _device_of(pdata)
        added, values = (self.add_modules, self.add_params) if starts else self._copies(device)
        modules, params = {**pdata.modules, **added}, {**pdata.params, **values}
        nothing: dict[Any, Tensor] = {}
        tables = modules, params, nothing
        changes: list[tuple[nn.Module, State, State]] = []
        for key in {*self.touched, *added}:
            module, each = modules[key], meta[key]
            buffers = {}
            for name in each.sub_buffers:
                value = self.buffers[key, name] if (key, name) in self.buffers else module._buffers[name]
                buffers[name] = value if starts or (key, name) not in self.buffers else _move(value, device)
            registries: State = {
                "_parameters": {n: None if p is None else params[p] for n, p in each.sub_params.items()},
                "_modules": {n: None if m is None else modules[m] for n, m in each.sub_modules.items()},
                "_buffers": buffers,
                "_non_persistent_buffers_set": {n for n, persistent in each.sub_buffers.items() if not persistent},
            }
            if key in self.labels:
                registries["_labelled"] = dict(self.labels[key])
            changes.append((module, registries, {} if starts else restore(self.attributes.get(key, {}), tables)))
        # Nothing below can fail.
        for module, registries, attributes in changes:
            state = module.__dict__
            names = {n for registry in ("_parameters", "_modules", "_buffers") for n in registries[registry]}
            for name in names & state.keys():
                del state[name]
            for name, value in attributes.items():
                if name not in HOOKS:
                    state[name] = value
            state.update(registries)
        if not starts:
            for key, hooks in self.hooks.items():
                for name, changed in hooks.items():
                    held = modules[key].__dict__[name]
                    for hook, function in changed.items():
                        if function is None:
                            held.pop(hook, None)
                        else:
                            held[hook] = function
        pdata.modules = OrderedDict((k, m) for k, m in modules.items() if k not in self.remove_modules)
        pdata.params = OrderedDict((k, p) for k, p in params.items() if k not in self.remove_params)
        if starts:
            self.settle()

    def _copies(self, device: torch.device | None) -> tuple[ModuleDict, ParamDict]:
        """Copies of what is new."""
        params = OrderedDict((key, _move(clone_param(p), device)) for key, p in self.add_params.items())
        places = {id(m): ModelPlace(0, key) for key, m in self.add_modules.items()}
        places |= {id(p): ModelPlace(1, key) for key, p in self.add_params.items()}
        buffers: dict[int, Tensor] = {}
        for module in self.add_modules.values():
            for held in module._buffers.values():
                if held is not None and id(held) not in buffers:
                    buffers[id(held)] = _move(held, device)
                    places[id(held)] = ModelPlace(2, id(held))
        made: ModuleDict = OrderedDict((key, object.__new__(type(m))) for key, m in self.add_modules.items())
        tables = made, params, buffers
        states = capture(self.add_modules.values(), places)
        for (key, source), state in zip(self.add_modules.items(), states, strict=True):
            twin = made[key].__dict__
            twin.update(restore(state, tables))
            # What is new refers to what is new; the rest is put in when a particle is brought along.
            twin["_parameters"] = {n: _resolve(p, places, tables) for n, p in source._parameters.items()}
            twin["_modules"] = {n: _resolve(m, places, tables) for n, m in source._modules.items()}
            twin["_buffers"] = {n: None if b is None else buffers[id(b)] for n, b in source._buffers.items()}
            twin["_non_persistent_buffers_set"] = set(source._non_persistent_buffers_set)
            if RECORD in state:
                from ._record import ParticleRecord

                twin[RECORD] = ParticleRecord(None, state[RECORD])
        return made, params

    def sentence(self, vdata: VersionDataImp) -> str:
        """The edit in words."""
        return "; ".join(self.text)


def _resolve(held: Any, places: Mapping[int, ModelPlace], tables: Any) -> Any:
    place = places.get(id(held))
    return None if place is None else tables[place.kind][place.key]


def _device_of(pdata: ParticleDataImp) -> torch.device | None:
    """The device of a particle that is on one."""
    devices = {param.device for param in pdata.params.values()}
    return devices.pop() if len(devices) == 1 else None


def _move(value: Any, device: torch.device | None) -> Any:
    """A copy of a tensor on a device, or the tensor where it is; a parameter stays one."""
    if value is None or device is None or value.device == device:
        return value if isinstance(value, nn.Parameter) or value is None else value.detach().clone()
    moved = value.detach().to(device)
    return nn.Parameter(moved, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else moved


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
        edit = self.change(following, following.meta[self.module_id])
        edit.remove_modules, edit.remove_params = following.get_garbage_modules(), following.get_garbage_params()
        following.remove_modules(edit.remove_modules)
        following.remove_params(edit.remove_params)
        # What the particle that starts the edit consists of must not be kept by it.
        self.owner_modules = self.owner_params = None
        path = next(path for key, path in vdata.paths() if key == self.module_id)
        name = f"{path}.{self.attr_name}" if path else self.attr_name
        edit.text = [f"{name!r} was edited by a {type(self).__name__}"]
        vdata.species.events.append(following.event(vdata, edit.sentence(vdata)))
        return following, edit

    def change(self, vdata: VersionDataImp, meta: ModuleMeta) -> ParticleEdit:
        """Change the metadata of the next version; returns what does the same to particles."""
        raise TypeError(f"{type(self).__name__} does not say what it changes")

    def _clear(self, meta: ModuleMeta, keep: Any = None) -> None:
        for slots in (meta.sub_modules, meta.sub_params, meta.sub_buffers):
            if slots is not keep:
                slots.pop(self.attr_name, None)

    def _check_present(self, slots: Mapping[str, Any], what: str) -> None:
        if self.attr_name not in slots:
            raise AttributeError(
                f"module {self.module_id} has no {what} {self.attr_name!r}; it has {list(slots) or 'none'}"
            )
