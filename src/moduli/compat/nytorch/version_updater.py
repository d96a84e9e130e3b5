"""The eight edits, for species: each makes the next version, and the updater that changes particles to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import torch
from torch import nn

from ...particles.base import NytoModuleBase
from ...particles.kernel import edit, record_of
from .mtype import ModuleID


class VersionEdit(ABC):
    """The edit of one attribute, for species. Subclasses define the change of the module."""

    def __init__(self, module_id: ModuleID, attr_name: str) -> None:
        self.module_id = module_id
        self.attr_name = attr_name
        self._particle_data: Any = None

    @abstractmethod
    def act(self, module: nn.Module) -> None:
        """Edit the module."""

    def set_version_data(self, vdata: Any) -> Self:
        """Receive the metadata of the current version."""
        return self

    def set_particle_data(self, pdata: Any) -> Self:
        """Receive the data of the particle that starts the edit."""
        self._particle_data = pdata
        return self

    def run(self, vdata: Any) -> tuple[Any, Any]:
        """Edit the particle that starts it, and return the metadata of the next version and the updater of particles."""
        kernel, self._particle_data = self._particle_data.modules[0]._particle_kernel, None
        before = kernel.version
        kernel.version_update(self)
        return kernel.version.data, before.particle_updater

    def edit(self, module: nn.Module, root: nn.Module) -> None:
        """Edit a module of a particle, which makes a new version of its species.

        Args:
            module: The module.
            root: The particle.

        Raises:
            AttributeError: If it has no such attribute.
        """

        def act() -> None:
            registered_before = self._is_registered(module)
            self.act(module)
            if not (registered_before or self._is_registered(module)):
                raise AttributeError(f"module {self.module_id} has no {self.attr_name!r} to edit")

        record = record_of(module) if isinstance(module, NytoModuleBase) else None
        if record is None:
            edit(module, root, self.attr_name, act)
            return
        record.busy = True
        try:
            edit(module, root, self.attr_name, act)
        finally:
            record.busy = False

    def _is_registered(self, module: nn.Module) -> bool:
        registries = (module.__dict__.get(key, ()) for key in ("_parameters", "_modules", "_buffers", "_labelled"))
        return any(self.attr_name in registry for registry in registries)


class AddModuleVersionUpdater(VersionEdit):
    """The assignment of a module.

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

    def act(self, module: nn.Module) -> None:
        """Edit the module."""
        setattr(module, self.attr_name, self.add_module)


class AddParamVersionUpdater(VersionEdit):
    """The assignment of a parameter.

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

    def act(self, module: nn.Module) -> None:
        """Edit the module."""
        setattr(module, self.attr_name, self.add_param)


class RegisterBufferVersionUpdater(VersionEdit):
    """The registration of a buffer.

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

    def act(self, module: nn.Module) -> None:
        """Edit the module."""
        module.register_buffer(self.attr_name, self.value, self.persistent)


class _SetNone(VersionEdit):
    def act(self, module: nn.Module) -> None:
        """Edit the module."""
        setattr(module, self.attr_name, None)


class _Deletion(VersionEdit):
    registry: str

    def act(self, module: nn.Module) -> None:
        """Edit the module.

        Raises:
            KeyError: If it has no such attribute.
        """
        names = getattr(module, self.registry)
        if self.attr_name not in names:
            kind = self.registry[1:]
            raise KeyError(f"module {self.module_id} has no {self.attr_name!r} to delete; its {kind} are {list(names)}")
        delattr(module, self.attr_name)


class SetModuleNoneVersionUpdater(_SetNone):
    """The replacement of a module by None.

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


class SetParamNoneVersionUpdater(_SetNone):
    """The replacement of a parameter by None.

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


class DelModuleVersionUpdater(_Deletion):
    """The deletion of a module.

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

    registry = "_modules"


class DelParamVersionUpdater(_Deletion):
    """The deletion of a parameter.

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

    registry = "_parameters"


class DelBufferVersionUpdater(_Deletion):
    """The deletion of a buffer.

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

    registry = "_buffers"
