"""The eight edits, as particles see them: what brings a particle from one version to the next."""

from . import _kinds

__all__ = [
    "AddModuleParticleUpdater",
    "AddParamParticleUpdater",
    "RegisterBufferParticleUpdater",
    "SetModuleNoneParticleUpdater",
    "SetParamNoneParticleUpdater",
    "DelModuleParticleUpdater",
    "DelParamParticleUpdater",
    "DelBufferParticleUpdater",
]


class AddModuleParticleUpdater(_kinds.AddModule):
    """Brings particles to the version in which a module is assigned.

    The particle that starts the edit gets the very objects; the others get copies of the values at the time of the edit.

    Example:
        >>> import torch
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> version = net._version_kernel
        >>> net.add_module("head", torch.nn.Linear(2, 1))
        >>> len(version.particle_updater.edits)
        1
    """


class AddParamParticleUpdater(_kinds.AddParam):
    """Brings particles to the version in which a parameter is assigned.

    The particle that starts the edit gets the very objects; the others get copies of the values at the time of the edit.

    Example:
        >>> import torch
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> version = net._version_kernel
        >>> net.w = torch.nn.Parameter(torch.zeros(2))
        >>> len(version.particle_updater.edits)
        1
    """


class RegisterBufferParticleUpdater(_kinds.RegisterBuffer):
    """Brings particles to the version in which a buffer is registered.

    The particle that starts the edit gets the very objects; the others get copies of the values at the time of the edit.

    Example:
        >>> import torch
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> version = net._version_kernel
        >>> net.register_buffer("mean", torch.zeros(2))
        >>> len(version.particle_updater.edits)
        1
    """


class SetModuleNoneParticleUpdater(_kinds.SetModuleNone):
    """Brings particles to the version in which a module becomes None.

    The particle that starts the edit gets the very objects; the others get copies of the values at the time of the edit.

    Example:
        >>> import torch
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> net.head = torch.nn.Linear(2, 1)
        >>> version = net._version_kernel
        >>> net.head = None
        >>> len(version.particle_updater.edits)
        1
    """


class SetParamNoneParticleUpdater(_kinds.SetParamNone):
    """Brings particles to the version in which a parameter becomes None.

    The particle that starts the edit gets the very objects; the others get copies of the values at the time of the edit.

    Example:
        >>> import torch
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> net.w = torch.nn.Parameter(torch.zeros(2))
        >>> version = net._version_kernel
        >>> net.w = None
        >>> len(version.particle_updater.edits)
        1
    """


class DelModuleParticleUpdater(_kinds.DelModule):
    """Brings particles to the version in which a module is deleted.

    The particle that starts the edit gets the very objects; the others get copies of the values at the time of the edit.

    Example:
        >>> import torch
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> net.head = torch.nn.Linear(2, 1)
        >>> version = net._version_kernel
        >>> del net.head
        >>> len(version.particle_updater.edits)
        1
    """


class DelParamParticleUpdater(_kinds.DelParam):
    """Brings particles to the version in which a parameter is deleted.

    The particle that starts the edit gets the very objects; the others get copies of the values at the time of the edit.

    Example:
        >>> import torch
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> net.w = torch.nn.Parameter(torch.zeros(2))
        >>> version = net._version_kernel
        >>> del net.w
        >>> len(version.particle_updater.edits)
        1
    """


class DelBufferParticleUpdater(_kinds.DelBuffer):
    """Brings particles to the version in which a buffer is deleted.

    The particle that starts the edit gets the very objects; the others get copies of the values at the time of the edit.

    Example:
        >>> import torch
        >>> from moduli.particles import NytoModule
        >>> net = NytoModule()
        >>> net.register_buffer("mean", torch.zeros(2))
        >>> version = net._version_kernel
        >>> del net.mean
        >>> len(version.particle_updater.edits)
        1
    """
