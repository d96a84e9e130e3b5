"""What an edit of a structure is: the values it brings, and how a particle is brought to the next version.

The metadata of the next version says what every attribute refers to. An edit adds the modules, parameters and buffers that
are new there, so bringing a particle along is one thing for all kinds of edits: copy what is new, and let the modules that
were edited refer to what the metadata says. The documented updaters are names for edits of one attribute.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from moduli.layout import Guard

from ._references import ModelPlace, resolve
from ._skeleton import HOOKS, RECORD, State, capture, list_referred, refers_to, restore, restore_slots
from .base import ParticleDataImp, VersionDataImp
from .errors import StructureError
from .mtype import MetaDict, ModuleDict, ModuleID, ParamDict, ParamID

__all__ = ["ParticleEdit", "VersionEdit", "clone_param", "protect_modules"]


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


def protect_modules(guard: Guard, *modules: nn.Module) -> None:
    """Register what modules hold with a guard, which puts it back if an edit fails."""
    for module in modules:
        state = module.__dict__
        guard.mappings(*(state[key] for key in _CONTAINERS if key in state), state)


@dataclass(eq=False)
class ParticleEdit:
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
        text: The edit in words, a sentence for each attribute.
        names: The dotted names of those attributes.
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
    names: list[str] = field(default_factory=list)
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

    def settle(self, snapshots: Snapshots | None = None) -> None:
        """Keep copies of the values instead of those of the particle that started the edit.

        Args:
            snapshots: Copies that were made at the edit, with the tensors they are of, by `id`; others are made now.
        """
        self.add_modules, self.add_params = self._copies(None, snapshots or {})
        self.buffers = {key: _copy_to(held, None) for key, held in self.buffers.items()}

    def run(self, pdata: ParticleDataImp) -> None:
        """Bring one particle to the next version, or raise and leave it as it was."""
        meta = self.next_version_modules_meta
        if meta is None:
            raise StructureError("this edit has not been told the metadata of the next version")
        starts = self.owner is pdata
        device = None if starts else _device_of(pdata)
        added, values = (self.add_modules, self.add_params) if starts else self._copies(device, {})
        modules, params = {**pdata.modules, **added}, {**pdata.params, **values}
        tables: Any = modules, params, {}, {}
        changes: list[tuple[nn.Module, State, State]] = []
        for key in {*self.touched, *added}:
            module, each = modules[key], meta[key]
            buffers = {}
            for name in each.sub_buffers:
                value = self.buffers[key, name] if (key, name) in self.buffers else module._buffers[name]
                buffers[name] = value if starts or (key, name) not in self.buffers else _copy_to(value, device)
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
                    own = modules[key].__dict__[name]
                    own.update((each, resolve(hook, tables)) for each, hook in changed.items())
                    for each in [each for each, hook in own.items() if hook is None]:
                        del own[each]
        pdata.modules = OrderedDict((k, m) for k, m in modules.items() if k not in self.remove_modules)
        pdata.params = OrderedDict((k, p) for k, p in params.items() if k not in self.remove_params)
        if starts:
            self.settle()

    def _copies(self, device: torch.device | None, snapshots: Snapshots) -> tuple[ModuleDict, ParamDict]:
        """Copies of what is new."""
        params = OrderedDict((key, _copy_to(p, device, snapshots)) for key, p in self.add_params.items())
        places = {id(m): ModelPlace(0, key) for key, m in self.add_modules.items()}
        places |= {id(p): ModelPlace(1, key) for key, p in self.add_params.items()}
        buffers: dict[int, Tensor] = {}
        for module in self.add_modules.values():
            for held in module._buffers.values():
                if held is not None and id(held) not in buffers:
                    buffers[id(held)] = _copy_to(held, device, snapshots)
                    places[id(held)] = ModelPlace(2, id(held))
        made: ModuleDict = OrderedDict((key, object.__new__(type(m))) for key, m in self.add_modules.items())
        tables: Any = made, params, buffers, {}
        states = capture(self.add_modules.values(), places, strict=False)
        for (key, source), state in zip(self.add_modules.items(), states, strict=True):
            twin = made[key].__dict__
            twin.update(restore(state, tables))
            restore_slots(made[key], state, tables)
            # The metadata says what else the registries hold when a particle is brought along.
            twin["_buffers"] = {n: None if b is None else buffers[id(b)] for n, b in source._buffers.items()}
            if RECORD in state:
                from ._record import ParticleRecord

                twin[RECORD] = ParticleRecord(None, dict(state[RECORD]))
        return made, params

    def join(self, later: ParticleEdit) -> ParticleEdit | None:
        """Make one edit of this one and the one after it, without the values that the later one removes again.

        Returns:
            The edit; None if something that stays refers to something that is removed.
        """
        meta = later.next_version_modules_meta
        removed = {ModelPlace(0, key) for key in later.remove_modules}
        removed |= {ModelPlace(1, key) for key in later.remove_params}
        gone = {id(m): ModelPlace(0, k) for k, m in self.add_modules.items() if k in later.remove_modules}
        gone |= {id(p): ModelPlace(1, k) for k, p in self.add_params.items() if k in later.remove_params}
        modules = OrderedDict((k, m) for k, m in self.add_modules.items() if k not in later.remove_modules)
        attributes = {
            key: {n: v for n, v in state.items() if n not in later.attributes.get(key, {})}
            for key, state in self.attributes.items()
            if key not in later.remove_modules
        }
        if meta is None or refers_to(modules.values(), gone) or list_referred(attributes.values()) & removed:
            return None
        modules.update(later.add_modules)
        params = OrderedDict((k, p) for k, p in self.add_params.items() if k not in later.remove_params)
        params.update(later.add_params)
        joint = ParticleEdit(self.module_id, self.attr_name, add_modules=modules, add_params=params)
        # What was added by the one and removed by the other was never there.
        joint.remove_modules = (self.remove_modules | later.remove_modules - self.add_modules.keys()) - modules.keys()
        joint.remove_params = (self.remove_params | later.remove_params - self.add_params.keys()) - params.keys()
        joint.next_version_modules_meta = meta
        joint.touched = {key for key in self.touched - later.remove_modules | later.touched if key in meta}
        joint.buffers = {
            (key, name): value
            for (key, name), value in self.buffers.items()
            if key not in later.remove_modules and name in meta[key].sub_buffers
        } | later.buffers
        for key, state in later.attributes.items():
            attributes[key] = attributes.get(key, {}) | state
        joint.attributes = attributes
        joint.hooks = {key: dict(hooks) for key, hooks in self.hooks.items() if key not in later.remove_modules}
        for key, hooks in later.hooks.items():
            own = joint.hooks.setdefault(key, {})
            own.update({name: own.get(name, {}) | changed for name, changed in hooks.items()})
        joint.labels = {k: v for k, v in self.labels.items() if k not in later.remove_modules} | later.labels
        sentences = dict(zip((*self.text, *later.text), (*self.names, *later.names), strict=True))
        joint.text, joint.names = list(sentences), list(sentences.values())
        return joint

    def sentence(self, vdata: VersionDataImp) -> str:
        """The edit in words."""
        return "; ".join(self.text)


def _device_of(pdata: ParticleDataImp) -> torch.device | None:
    """The device of a particle that is on one."""
    devices = {param.device for param in pdata.params.values()}
    return devices.pop() if len(devices) == 1 else None


Snapshots = dict[int, tuple[Tensor, Tensor]]


def _copy_to(value: Any, device: torch.device | None, snapshots: Snapshots | None = None) -> Any:
    """A copy of a tensor on a device, or where it is, or the one that was made before; a parameter stays one."""
    if value is None:
        return None
    source, made = (snapshots or {}).get(id(value), (None, value))
    if source is not value:
        made = value.detach().to(value.device if device is None else device, copy=True)
    return nn.Parameter(made, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else made


class VersionEdit(ABC):
    """An edit of one attribute, as the species sees it. Subclasses say what it does to the module."""

    def __init__(self, module_id: ModuleID, attr_name: str) -> None:
        self.module_id = module_id
        self.attr_name = attr_name
        self.owner_modules: ModuleDict | None = None
        self.owner_params: ParamDict | None = None

    @abstractmethod
    def act(self, module: nn.Module) -> None:
        """Edit the module."""

    def set_version_data(self, vdata: VersionDataImp) -> Self:
        """Receive the metadata of the current version."""
        return self

    def set_particle_data(self, pdata: ParticleDataImp) -> Self:
        """Receive the data of the particle that starts the edit."""
        self.owner_modules, self.owner_params = pdata.modules, pdata.params
        return self

    def run(self, vdata: VersionDataImp) -> tuple[VersionDataImp, ParticleEdit]:
        """Edit the particle that starts it; gives the metadata of the next version, and what brings particles there."""
        from ._compare import LastSeen, compare

        # What the particle consists of must not be kept by the edit.
        modules: ModuleDict = self.owner_modules or OrderedDict()
        self.owner_modules = self.owner_params = None
        if self.module_id not in modules:
            raise StructureError(f"the particle has no module {self.module_id}; it has {list(modules)}")
        module = modules[self.module_id]
        record = module.__dict__.get(RECORD)
        if record is not None:
            record.busy = True
        try:
            self.act(module)
        finally:
            if record is not None:
                record.busy = False
        edited = compare(vdata, modules[0], LastSeen(dict(modules), {}), (module, self.attr_name))
        if edited is None:
            raise AttributeError(f"module {self.module_id} has no {self.attr_name!r} to edit")
        vdata.species.events.append(edited[0].event(vdata, edited[1].sentence(vdata)))
        return edited
