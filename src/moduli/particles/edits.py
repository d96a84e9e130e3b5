"""`ParticleEdit`: the edit between two versions of a species, and applying it to a particle.

The next version defines the part of every name. An edit has the modules, parameters and buffers that are new in it, so all kinds
of edits are applied in the same way: copy the new parts, and rewrite the registries of the edited modules according to the version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moduli.layout import RESIZED, SWAPS, Guard, UnitMap
from moduli.nn import VirtualTensor

from ._own_values import OwnValue, join_own_values, keeps_own, write_own
from ._references import ModelPlace, resolve
from ._skeleton import HOOKS, RECORD, State, capture, list_referred, refers_to, restore, restore_slots
from ._version import Parts, Past, SlotNames, Version

__all__ = ["ParticleEdit", "clone_param", "protect_modules"]


def clone_param(param: nn.Parameter) -> nn.Parameter:
    """Return a parameter with a copy of the value, trainable if the original is.

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
    """Register the registries and attributes of modules with a guard, which restores them if an edit fails."""
    for module in modules:
        state = module.__dict__
        guard.mappings(*(state[key] for key in _CONTAINERS if key in state), state)


@dataclass(eq=False)
class ParticleEdit:
    """An edit between two versions. Parts are referred to by identifier (see `Version`).

    Attributes:
        remove_modules: The removed modules.
        remove_params: The removed parameters.
        add_modules: The new modules.
        add_params: The new parameters.
        touched: The edited modules.
        buffers: The new buffers, by module and name.
        attributes: The plain attributes of plain modules that were changed.
        hooks: The hooks that were added, or None for removed ones, by module and kind.
        labels: The labels of edited modules.
        resized: For parameters that are resized ones of others: those, and the maps. Every particle resizes its own values.
        resized_buffers: The maps of resized buffers, by module and name.
        text: The edit in words, a sentence for each attribute.
        names: The dotted names of those attributes.
        own_params: The sources of the values that particles keep in new parameters.
        own_buffers: The same for new buffers, by module and name.
        reused: Identifiers of removed parameters that are used again for others.
        start: The number of the version before.
        stop: The number of the version after.
    """

    remove_modules: set[int] = field(default_factory=set)
    remove_params: set[int] = field(default_factory=set)
    add_modules: dict[int, nn.Module] = field(default_factory=dict)
    add_params: dict[int, nn.Parameter] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    buffers: dict[tuple[int, str], Tensor | None] = field(default_factory=dict)
    attributes: dict[int, State] = field(default_factory=dict)
    hooks: dict[int, dict[str, dict[int, Any]]] = field(default_factory=dict)
    labels: dict[int, dict[str, Any]] = field(default_factory=dict)
    resized: dict[int, tuple[int, list[UnitMap]]] = field(default_factory=dict)
    resized_buffers: dict[tuple[int, str], list[UnitMap]] = field(default_factory=dict)
    text: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    own_params: dict[int, OwnValue] = field(default_factory=dict)
    own_buffers: dict[tuple[int, str], OwnValue] = field(default_factory=dict)
    reused: set[int] = field(default_factory=set)
    start: int = 0
    stop: int = 0

    def settle(self, snapshots: Snapshots | None = None) -> None:
        """Replace the new parts, which belong to the edited particle, by copies.

        Args:
            snapshots: Copies that were made at the time of the edit, with their originals, by `id`; others are made now.
        """
        self.add_modules, self.add_params = self._copies(None, snapshots or {})
        self.buffers = {key: _copy_to(buffer, None) for key, buffer in self.buffers.items()}

    def run(self, parts: Parts, following: Version, past: Sequence[Past] = ()) -> Parts:
        """Bring one particle to the next version, or raise and leave it unchanged.

        Args:
            parts: The parts of the particle.
            following: The next version.
            past: The parts that earlier edits removed from the particle.

        Returns:
            Its parts after the edit.
        """
        devices = {param.device for param in parts.params.values()}
        device = devices.pop() if len(devices) == 1 else None
        added, values = self._copies(device, {})
        self._write_own(self.own_params, values, parts, past)
        values |= {key: _resize(parts.params[source], maps) for key, (source, maps) in self.resized.items()}
        modules, params = {**parts.modules, **added}, {**parts.params, **values}
        tables: Any = modules, params, {}, {}
        changes: list[tuple[nn.Module, State, State]] = []
        for place, key in enumerate(following.modules):
            if key in self.touched or key in added:
                names = following.list_names(place)
                registries = self._make_registries(key, names, Parts(modules, params), device)
                fresh = {(key, n): value for n, value in registries["_buffers"].items() if (key, n) in self.own_buffers}
                self._write_own(self.own_buffers, fresh, parts, past)
                changes.append((modules[key], registries, restore(self.attributes.get(key, {}), tables)))
        # Nothing below can fail.
        for change in changes:
            _write_module(*change)
        SWAPS.add()
        self._write_hooks(modules, tables)
        return Parts(
            {key: module for key, module in modules.items() if key not in self.remove_modules},
            {key: param for key, param in params.items() if key not in self.remove_params},
        )

    def _make_registries(self, key: int, names: SlotNames, parts: Parts, device: torch.device | None) -> State:
        """Return the registries of an edited or new module.

        Args:
            key: The module.
            names: The names in its registries.
            parts: The parts of the particle, the new ones included.
            device: The device of new buffers; None for that of the edit's.
        """
        module = parts.modules[key]
        registries: State = {
            "_parameters": {n: None if p is None else parts.params[p] for n, p in names.params.items()},
            "_modules": {n: None if m is None else parts.modules[m] for n, m in names.modules.items()},
            "_buffers": {n: self._read_buffer(key, module, n, device) for n in names.buffers},
            "_non_persistent_buffers_set": {n for n, persistent in names.buffers.items() if not persistent},
        }
        if key in self.labels:
            registries["_labelled"] = dict(self.labels[key])
        return registries

    def _write_hooks(self, modules: Mapping[int, nn.Module], tables: Any) -> None:
        """Add and remove the changed hooks."""
        for key, hooks in self.hooks.items():
            for name, changed in hooks.items():
                own = modules[key].__dict__[name]
                own.update((each, resolve(hook, tables)) for each, hook in changed.items())
                for each in [each for each, hook in own.items() if hook is None]:
                    del own[each]

    def _write_own(
        self, table: Mapping[Any, OwnValue], fresh: Mapping[Any, Tensor], parts: Parts, past: Sequence[Past]
    ) -> None:
        """Write the values that a particle keeps into new tensors."""

        def find(key: Any, since: int | None) -> Any:
            if since is None:
                return parts.find(key)
            for each in reversed(past):
                if each.start <= since < each.stop and (each.start == since or not isinstance(key, tuple)):
                    return each.find(key)
            return None

        for key, own in table.items():
            target = fresh.get(key)
            if target is not None and keeps_own(parts.modules, own.owners):
                write_own(target, own, find)

    def _read_buffer(self, key: int, module: nn.Module, name: str, device: torch.device | None) -> Tensor | None:
        """Return the buffer of a module after the edit."""
        if (key, name) in self.buffers:
            return _copy_to(self.buffers[key, name], device)  # type: ignore[no-any-return]
        return _resize_all(module._buffers[name], self.resized_buffers.get((key, name), ()))  # type: ignore[no-any-return]

    def _copies(self, device: torch.device | None, snapshots: Snapshots) -> tuple[dict[int, nn.Module], dict[int, Any]]:
        """Return copies of the new modules, with the new tensors, and of the new parameters."""
        params = {key: _copy_to(p, device, snapshots) for key, p in self.add_params.items()}
        places = {id(m): ModelPlace(0, key) for key, m in self.add_modules.items()}
        places |= {id(p): ModelPlace(1, key) for key, p in self.add_params.items()}
        buffers: dict[int, Tensor] = {}
        for module in self.add_modules.values():
            for buffer in module._buffers.values():
                if buffer is not None and id(buffer) not in buffers:
                    buffers[id(buffer)] = _copy_to(buffer, device, snapshots)
                    places[id(buffer)] = ModelPlace(2, id(buffer))
        modules: dict[int, nn.Module] = {key: object.__new__(type(m)) for key, m in self.add_modules.items()}
        tables: Any = modules, params, buffers, {}
        states = capture(self.add_modules.values(), places, strict=False)
        for (key, source), state in zip(self.add_modules.items(), states, strict=True):
            twin = modules[key].__dict__
            twin.update(restore(state, tables))
            restore_slots(modules[key], state, tables)
            # `run` writes the other registries according to the version.
            twin["_buffers"] = {n: None if b is None else buffers[id(b)] for n, b in source._buffers.items()}
            if RECORD in state:
                from ._record import ParticleRecord

                twin[RECORD] = ParticleRecord(None, dict(state[RECORD]))
        return modules, params

    def join(self, later: ParticleEdit, following: Version) -> ParticleEdit | None:
        """Return the union of this edit and the one after it, without the values that the later one removes again.

        Args:
            later: The edit after this one.
            following: The version that it leads to.

        Returns:
            The edit; None if a part that stays refers to one that is removed.
        """
        modules = {k: m for k, m in self.add_modules.items() if k not in later.remove_modules}
        attributes = {
            key: {n: v for n, v in state.items() if n not in later.attributes.get(key, {})}
            for key, state in self.attributes.items()
            if key not in later.remove_modules
        }
        if self._refers_to_removed(modules, attributes, later):
            return None
        modules.update(later.add_modules)
        params = {k: p for k, p in self.add_params.items() if k not in later.remove_params} | later.add_params
        joint = ParticleEdit(add_modules=modules, add_params=params)
        self._join_resized(joint, later)
        if any(key in self.add_modules for key, _ in later.resized_buffers):
            return None  # the module is stored with its buffers before the resize
        # Parts that one edit adds and the other removes are not in the union.
        joint.remove_modules = (self.remove_modules | later.remove_modules - self.add_modules.keys()) - modules.keys()
        here = self.add_params.keys() | self.resized.keys()
        joint.remove_params = (self.remove_params | later.remove_params - here) - params.keys() - joint.resized.keys()
        joint.touched = (self.touched - later.remove_modules | later.touched) & set(following.modules)
        entries = dict(zip(following.modules, following.structure.modules, strict=True))
        joint.buffers = {
            (key, name): value
            for (key, name), value in self.buffers.items()
            if key not in later.remove_modules and name in dict(entries[key].buffers)
        }
        self._join_resized_buffers(joint, later)
        joint.buffers |= later.buffers
        for key, state in later.attributes.items():
            attributes[key] = attributes.get(key, {}) | state
        joint.attributes = attributes
        self._join_hooks(joint, later)
        joint.labels = {k: v for k, v in self.labels.items() if k not in later.remove_modules} | later.labels
        sentences = dict(zip((*self.text, *later.text), (*self.names, *later.names), strict=True))
        joint.text, joint.names = list(sentences), list(sentences.values())
        joint.start, joint.stop = self.start, later.stop
        joint.reused = (
            self.reused | later.reused | self.remove_params & (later.add_params.keys() | later.resized.keys())
        )
        join_own_values(self, later, joint)
        return joint

    def _refers_to_removed(
        self, modules: Mapping[int, nn.Module], attributes: Mapping[int, State], later: ParticleEdit
    ) -> bool:
        """Whether new modules or changed attributes of this edit refer to parts that a later one removes."""
        removed = {ModelPlace(0, key) for key in later.remove_modules}
        removed |= {ModelPlace(1, key) for key in later.remove_params}
        own = {id(m): ModelPlace(0, k) for k, m in self.add_modules.items() if k in later.remove_modules}
        own |= {id(p): ModelPlace(1, k) for k, p in self.add_params.items() if k in later.remove_params}
        return refers_to(modules.values(), own) or bool(list_referred(attributes.values()) & removed)

    def _join_hooks(self, joint: ParticleEdit, later: ParticleEdit) -> None:
        """Set the hooks that this edit and a later one change."""
        joint.hooks = {key: dict(hooks) for key, hooks in self.hooks.items() if key not in later.remove_modules}
        for key, hooks in later.hooks.items():
            own = joint.hooks.setdefault(key, {})
            own.update({name: own.get(name, {}) | changed for name, changed in hooks.items()})

    def _join_resized(self, joint: ParticleEdit, later: ParticleEdit) -> None:
        """Set the parameters that this edit and a later one resize: maps are concatenated, added values resized at once."""
        resized = {k: entry for k, entry in self.resized.items() if k not in later.remove_params}
        for key, (source, maps) in later.resized.items():
            if source in self.resized:
                origin, earlier = self.resized[source]
                resized[key] = origin, [*earlier, *maps]
            elif source in self.add_params:
                joint.add_params[key] = _resize(self.add_params[source], maps)
            else:
                resized[key] = source, maps
        joint.resized = resized

    def _join_resized_buffers(self, joint: ParticleEdit, later: ParticleEdit) -> None:
        """Set the buffers that this edit and a later one resize."""
        buffers = {k: maps for k, maps in self.resized_buffers.items() if k[0] not in later.remove_modules}
        for place, maps in later.resized_buffers.items():
            if place in joint.buffers:
                joint.buffers[place] = _resize_all(joint.buffers[place], maps)
            else:
                buffers[place] = [*buffers.get(place, ()), *maps]
        joint.resized_buffers = buffers

    def sentence(self) -> str:
        """Return the edit in words."""
        return "; ".join(self.text)


Snapshots = dict[int, tuple[Tensor, Tensor]]


def _write_module(module: nn.Module, registries: State, attributes: State) -> None:
    """Write registries and plain attributes into a module; virtual tensors whose reference buffer was removed are deleted."""
    state = module.__dict__
    for name in {n for key in ("_parameters", "_modules", "_buffers") for n in registries[key]} & state.keys():
        del state[name]
    state.update((name, value) for name, value in attributes.items() if name not in HOOKS)
    state.update(registries)
    for name in [name for name, value in state.items() if isinstance(value, VirtualTensor)]:
        if state[name].attributes.ref not in registries["_buffers"]:
            del state[name]


def _copy_to(value: Any, device: torch.device | None, snapshots: Snapshots | None = None) -> Any:
    """Return a copy of a tensor on a device (None for its own), or its snapshot; parameters give parameters."""
    if value is None:
        return None
    source, copied = (snapshots or {}).get(id(value), (None, value))
    if source is not value:
        copied = value.detach().to(value.device if device is None else device, copy=True)
    return nn.Parameter(copied, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else copied


def _resize(param: nn.Parameter, maps: Sequence[UnitMap]) -> nn.Parameter:
    """Return a parameter of resized values, and record its origin."""
    resized = nn.Parameter(_resize_all(param, maps), requires_grad=param.requires_grad)
    RESIZED.record(param, resized, maps)
    return resized


def _resize_all(value: Any, maps: Sequence[UnitMap]) -> Any:
    for each in maps if value is not None else ():
        value = each.resize(value)
    return value
