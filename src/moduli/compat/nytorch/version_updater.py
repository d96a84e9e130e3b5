"""The eight edits, as the species sees them: each makes the next version, and what brings particles there."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from ...particles.base import VersionDataImp, grow, number_parameter
from ...particles.edits import ParticleEdit, VersionEdit
from ...particles.mtype import ModuleDict, ModuleID, ModuleMeta, ParamDict
from . import particle_updater as particle

__all__ = [
    "AddModuleVersionUpdater",
    "AddParamVersionUpdater",
    "RegisterBufferVersionUpdater",
    "SetModuleNoneVersionUpdater",
    "SetParamNoneVersionUpdater",
    "DelModuleVersionUpdater",
    "DelParamVersionUpdater",
    "DelBufferVersionUpdater",
]


class AddModuleVersionUpdater(VersionEdit):
    """Assigns a module.

    Args:
        module_id: The module that it is assigned to.
        attr_name: The name of the attribute.
        add_module: The module.

    Example:
        >>> from moduli.particles import NytoModule
        >>> net, head = NytoModule(), NytoModule()
        >>> net._particle_kernel.version_update(AddModuleVersionUpdater(net._module_id, "head", head))
        >>> net.head is head
        True
    """

    def __init__(self, module_id: ModuleID, attr_name: str, add_module: nn.Module) -> None:
        super().__init__(module_id, attr_name)
        self.add_module = add_module

    def change(self, vdata: VersionDataImp, meta: ModuleMeta) -> ParticleEdit:
        """Change the metadata of the next version; returns what does the same to particles."""
        modules = {id(module): key for key, module in (self.owner_modules or {}).items()}
        params = {id(param): key for key, param in (self.owner_params or {}).items()}
        added: ModuleDict = OrderedDict()
        fresh: ParamDict = OrderedDict()
        key = grow(vdata, self.add_module, modules, params, added, fresh)
        self._clear(meta, meta.sub_modules)
        meta.sub_modules[self.attr_name] = key
        return particle.AddModuleParticleUpdater(self.module_id, self.attr_name, key, added, fresh)


class AddParamVersionUpdater(VersionEdit):
    """Assigns a parameter.

    Args:
        module_id: The module that it is assigned to.
        attr_name: The name of the attribute.
        add_param: The parameter.

    Example:
        >>> from moduli.particles import NytoModule
        >>> net, w = NytoModule(), nn.Parameter(torch.zeros(2))
        >>> net._particle_kernel.version_update(AddParamVersionUpdater(net._module_id, "w", w))
        >>> net.w is w
        True
    """

    def __init__(self, module_id: ModuleID, attr_name: str, add_param: nn.Parameter) -> None:
        super().__init__(module_id, attr_name)
        self.add_param = add_param

    def change(self, vdata: VersionDataImp, meta: ModuleMeta) -> ParticleEdit:
        """Change the metadata of the next version; returns what does the same to particles."""
        known = {id(param): key for key, param in (self.owner_params or {}).items()}
        fresh: ParamDict = OrderedDict()
        key = number_parameter(vdata, self.add_param, known, fresh)
        self._clear(meta, meta.sub_params)
        meta.sub_params[self.attr_name] = key
        return particle.AddParamParticleUpdater(self.module_id, self.attr_name, key, add_param=fresh.get(key))


class RegisterBufferVersionUpdater(VersionEdit):
    """Registers a buffer.

    Args:
        module_id: The module that it is registered with.
        attr_name: The name of the attribute.
        value: The buffer, or None.
        persistent: Whether `state_dict()` holds it.

    Example:
        >>> from moduli.particles import NytoModule
        >>> net, mean = NytoModule(), torch.zeros(2)
        >>> net._particle_kernel.version_update(RegisterBufferVersionUpdater(net._module_id, "mean", mean))
        >>> net.mean is mean
        True
    """

    def __init__(
        self, module_id: ModuleID, attr_name: str, value: torch.Tensor | None, persistent: bool = True
    ) -> None:
        super().__init__(module_id, attr_name)
        self.value = value
        self.persistent = persistent

    def change(self, vdata: VersionDataImp, meta: ModuleMeta) -> ParticleEdit:
        """Change the metadata of the next version; returns what does the same to particles."""
        self._clear(meta, meta.sub_buffers)
        meta.sub_buffers[self.attr_name] = self.persistent
        return particle.RegisterBufferParticleUpdater(self.module_id, self.attr_name, self.value, self.persistent)


class _Removal(VersionEdit):
    """Takes what is registered under a name away, or leaves None in its place."""

    slots: str
    what: str
    edit: type[ParticleEdit]
    leaves_none = False

    def change(self, vdata: VersionDataImp, meta: ModuleMeta) -> ParticleEdit:
        """Change the metadata of the next version; returns what does the same to particles."""
        held = getattr(meta, self.slots)
        self._check_present(held, self.what)
        self._clear(meta, held if self.leaves_none else None)
        if self.leaves_none:
            held[self.attr_name] = None
        return self.edit(self.module_id, self.attr_name)


class SetModuleNoneVersionUpdater(_Removal):
    """Sets a module to None.

    Args:
        module_id: The module that has it.
        attr_name: The name of the attribute.

    Example:
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> net.head = nn.Linear(2, 1)
        >>> net._particle_kernel.version_update(SetModuleNoneVersionUpdater(net._module_id, "head"))
        >>> net.head is None
        True
    """

    slots, what, edit = "sub_modules", "module", particle.SetModuleNoneParticleUpdater
    leaves_none = True


class SetParamNoneVersionUpdater(_Removal):
    """Sets a parameter to None.

    Args:
        module_id: The module that has it.
        attr_name: The name of the attribute.

    Example:
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> net.w = nn.Parameter(torch.zeros(2))
        >>> net._particle_kernel.version_update(SetParamNoneVersionUpdater(net._module_id, "w"))
        >>> net.w is None
        True
    """

    slots, what, edit = "sub_params", "parameter", particle.SetParamNoneParticleUpdater
    leaves_none = True


class DelModuleVersionUpdater(_Removal):
    """Deletes a module.

    Args:
        module_id: The module that has it.
        attr_name: The name of the attribute.

    Example:
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> net.head = nn.Linear(2, 1)
        >>> net._particle_kernel.version_update(DelModuleVersionUpdater(net._module_id, "head"))
        >>> hasattr(net, "head")
        False
    """

    slots, what, edit = "sub_modules", "module", particle.DelModuleParticleUpdater


class DelParamVersionUpdater(_Removal):
    """Deletes a parameter.

    Args:
        module_id: The module that has it.
        attr_name: The name of the attribute.

    Example:
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> net.w = nn.Parameter(torch.zeros(2))
        >>> net._particle_kernel.version_update(DelParamVersionUpdater(net._module_id, "w"))
        >>> hasattr(net, "w")
        False
    """

    slots, what, edit = "sub_params", "parameter", particle.DelParamParticleUpdater


class DelBufferVersionUpdater(_Removal):
    """Deletes a buffer.

    Args:
        module_id: The module that has it.
        attr_name: The name of the attribute.

    Example:
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> net.register_buffer("mean", torch.zeros(2))
        >>> net._particle_kernel.version_update(DelBufferVersionUpdater(net._module_id, "mean"))
        >>> hasattr(net, "mean")
        False
    """

    slots, what, edit = "sub_buffers", "buffer", particle.DelBufferParticleUpdater
