"""Which edits lead from a version to a live module."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn

from . import particle_updater as particle
from ._edits import ParticleEdit, grown
from ._kinds import Together
from .base import VersionDataImp
from .mtype import ModuleID, ModuleMeta, ParamConfig, ParamID

__all__ = ["compare"]


def compare(
    vdata: VersionDataImp,
    root: nn.Module,
    before: dict[ModuleID, nn.Module | None] | None,
    forced: tuple[nn.Module, str] | None = None,
) -> tuple[VersionDataImp, Together] | None:
    """Find the edits that were made to a live module since it was at a version.

    A child is taken for the same module when it is the same object, or, where that is not known, of the same class. A
    parameter is the same when it has the same shape: another Parameter of that shape is another value, not an edit.

    Args:
        vdata: The version.
        root: The module.
        before: The modules by identifier, as they were at the version; None where that is not known.
        forced: A module and the name of an attribute that was assigned, hence an edit in any case.

    Returns:
        The metadata of the next version, and the edits with copies of the values now; None if nothing was edited.
    """
    return _Comparison(vdata, root, before, forced).result()


class _Comparison:
    def __init__(
        self,
        vdata: VersionDataImp,
        root: nn.Module,
        before: dict[ModuleID, nn.Module | None] | None,
        forced: tuple[nn.Module, str] | None,
    ) -> None:
        self.vdata = vdata
        self.before = before
        self.forced = forced
        self.following = vdata.copy()
        self.following.number += 1
        self.modules: dict[int, ModuleID] = {id(root): 0}
        self.params: dict[int, ParamID] = {}
        self.matched: list[tuple[ModuleID, nn.Module]] = [(0, root)]
        self.edits: list[ParticleEdit] = []
        # Modules that moved to another place are recognised by identity.
        self.known = {id(m): key for key, m in (before or {}).items() if m is not None}
        self._match()

    def _match(self) -> None:
        """Find the modules and parameters that are what they were."""
        used = {0}
        taken: set[ParamID] = set()
        for key, module in self.matched:
            for name, child in module._modules.items():
                old = self.vdata.meta[key].sub_modules.get(name)
                if child is None or id(child) in self.modules:
                    continue
                if (module, name) == self.forced:
                    continue
                if self.before is not None:
                    old = self.known.get(id(child))
                if old is None or old in used or self.vdata.meta[old].kind is not type(child):
                    continue
                used.add(old)
                self.modules[id(child)] = old
                self.matched.append((old, child))
        for key, module in self.matched:
            for name, held in module._parameters.items():
                pid = self.vdata.meta[key].sub_params.get(name)
                if held is None or pid is None or (module, name) == self.forced or self.vdata.shapes[pid] != held.shape:
                    continue
                if id(held) not in self.params and pid not in taken:
                    self.params[id(held)] = pid
                    taken.add(pid)

    def result(self) -> tuple[VersionDataImp, Together] | None:
        for key, module in self.matched:
            self._module(key, module)
        if not self.edits:
            return None
        following = self.following
        garbage = following.get_garbage_modules(), following.get_garbage_params()
        following.remove_modules(garbage[0])
        following.remove_params(garbage[1])
        together = Together(self.edits, *garbage)
        together.set_next_version_data(following)
        for edit in self.edits:
            settle = getattr(edit, "settle", None)
            if settle is not None:
                settle()
        return following, together

    def _module(self, key: ModuleID, module: nn.Module) -> None:
        """The edits of one module that is still there."""
        old = self.vdata.meta[key]
        meta = self.following.meta[key] = ModuleMeta(OrderedDict(), OrderedDict(), OrderedDict(), old.kind)
        removed: list[ParticleEdit] = []
        added: list[ParticleEdit] = []
        for name, child in module._modules.items():
            was = old.sub_modules.get(name)
            forced = (module, name) == self.forced
            if child is None:
                meta.sub_modules[name] = None
                if forced or was is not None or name not in old.sub_modules:
                    added.append(particle.SetModuleNoneParticleUpdater(key, name))
                continue
            place, modules, params = grown(self.following, child, self.modules, self.params)
            self._inherit(child, place)
            meta.sub_modules[name] = place
            if forced or was != place:
                assigned = particle.AddModuleParticleUpdater(key, name, place, modules, params)
                assigned.spare = None if place in modules else child
                added.append(assigned)
        for name, held in module._parameters.items():
            pid = old.sub_params.get(name)
            forced = (module, name) == self.forced
            if held is None:
                meta.sub_params[name] = None
                if forced or pid is not None or name not in old.sub_params:
                    added.append(particle.SetParamNoneParticleUpdater(key, name))
                continue
            now = self.params.get(id(held))
            fresh = now is None
            if now is None:
                now = self.params[id(held)] = max(self.following.config, default=-1) + 1
                # A configuration belongs to a name, and survives the exchange of what has the name.
                config = ParamConfig() if pid is None else self.vdata.config[pid].copy()
                self.following.config[now] = config
                self.following.shapes[now] = tuple(held.shape)
            meta.sub_params[name] = now
            if forced or now != pid:
                edit = particle.AddParamParticleUpdater(key, name, now, add_param=held if fresh else None)
                edit.spare = None if fresh else held
                edit.label = _label(module, name)
                added.append(edit)
        for name, buffer in module._buffers.items():
            persistent = meta.sub_buffers[name] = name not in module._non_persistent_buffers_set
            if (module, name) == self.forced or old.sub_buffers.get(name) is not persistent:
                kept = particle.RegisterBufferParticleUpdater(key, name, buffer, persistent)
                kept.label = _label(module, name)
                added.append(kept)
        for name in old.sub_modules:
            if name not in meta.sub_modules:
                removed.append(particle.DelModuleParticleUpdater(key, name))
        for name in old.sub_params:
            if name not in meta.sub_params:
                removed.append(particle.DelParamParticleUpdater(key, name))
        for name in old.sub_buffers:
            if name not in meta.sub_buffers:
                removed.append(particle.DelBufferParticleUpdater(key, name))
        # Names that changed their kind are taken away first.
        self.edits += removed + added

    def _inherit(self, child: nn.Module, place: ModuleID) -> None:
        """Take over the configurations that a child had as a particle of its own."""
        from ._species import own_config

        for pid, config in own_config(child, self.params).items():
            self.following.config[pid] = config
            self.following.species.configured = True


def _label(module: nn.Module, name: str) -> tuple[str, Any] | None:
    """The public name and the axes of a labelled tensor that is registered under a name."""
    labelled = module.__dict__.get("_labelled", {})
    return next(((public, record) for public, record in labelled.items() if record[0] == name), None)
