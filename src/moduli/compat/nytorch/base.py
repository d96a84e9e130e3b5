"""Particles in the form of nytorch: metadata and data by identifier, computed on access."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch  # noqa: F401 - for the examples
from torch import nn

from ...particles import StructureError
from ...particles.base import NytoModuleBase as NytoModuleBase
from ...particles.base import kernel_of
from ...particles.kernel import Version, bring_up, build, identify, record_of, settle_journal
from .mtype import (
    ROOT_MODULE_ID,
    ConfigDict,
    MetaDict,
    ModuleDict,
    ModuleID,
    ModuleMeta,
    ParamDict,
    ParamID,
)
from .version_updater import VersionEdit

VersionKernelImp: TypeAlias = Version
"""A version of a species of modules."""


class VersionDataImp:
    """The structure of a species at one version: the references of attributes, and the configuration of each parameter.

    Attributes:
        meta: For each module, the identifiers that its attributes refer to.
        config: The configuration of each parameter for operations.
        names: The dotted name of each parameter; the first one where it has several.
        number: The number of earlier edits.

    Example:
        >>> from moduli.particles import adopt
        >>> data = adopt(torch.nn.Linear(3, 2))._version_kernel.data
        >>> dict(data.meta[0].sub_params), data.config[1]
        ({'weight': 0, 'bias': 1}, ParamConfig(operational=True, clone=True))
    """

    def __init__(self, version: Version) -> None:
        self.version = version
        self.number = version.number
        names: Any = zip(version.params, (entry.name for entry in version.structure.layout), strict=True)
        self.names: dict[ParamID, str] = dict(sorted(names))
        self.meta: MetaDict = OrderedDict(sorted(self._list_meta()))
        self.config: ConfigDict = OrderedDict((key, version.config(name)) for key, name in self.names.items())

    def _list_meta(self) -> Iterator[tuple[ModuleID, ModuleMeta]]:
        for place, key in enumerate(self.version.modules):
            names, kind = self.version.list_names(place), self.version.structure.modules[place].kind
            refs = OrderedDict(names.modules), OrderedDict(names.params), OrderedDict(names.buffers)
            yield key, ModuleMeta(*refs, kind)

    def copy(self) -> VersionDataImp:
        """Return a deep copy of the metadata, in order."""
        twin = VersionDataImp(self.version)
        twin.meta = OrderedDict((key, self.meta[key].copy()) for key in sorted(self.meta))
        twin.config = OrderedDict((key, self.config[key].copy()) for key in sorted(self.config))
        return twin

    def init_kernel(self, kernel: Any) -> None:
        """Do nothing."""

    def init_particle(self, pdata: ParticleDataImp) -> None:
        """Put the keys of a particle's data in the order of the metadata."""
        pdata.modules = OrderedDict((key, pdata.modules[key]) for key in self.meta)
        pdata.params = OrderedDict((key, pdata.params[key]) for key in self.config)

    def get_sub_modules(self, root: ModuleID) -> set[ModuleID]:
        """Return the identifiers of a module and of all modules below it."""
        queue = [root]
        for key in queue:
            queue += [
                child for child in self.meta[key].sub_modules.values() if child is not None and child not in queue
            ]
        return set(queue)

    def get_sub_params(self, root: ModuleID) -> set[ParamID]:
        """Return the identifiers of all parameters of a module and of the modules below it."""
        modules = self.get_sub_modules(root)
        return {pid for key in modules for pid in self.meta[key].sub_params.values() if pid is not None}

    def get_garbage_modules(self) -> set[ModuleID]:
        """Return the identifiers of modules that cannot be reached from the root."""
        return set(self.meta) - self.get_sub_modules(ROOT_MODULE_ID)

    def get_garbage_params(self) -> set[ParamID]:
        """Return the identifiers of parameters that cannot be reached from the root."""
        return set(self.config) - self.get_sub_params(ROOT_MODULE_ID)

    def remove_modules(self, modules: set[ModuleID]) -> None:
        """Remove the metadata of modules."""
        for key in modules:
            del self.meta[key]

    def remove_params(self, params: set[ParamID]) -> None:
        """Remove the metadata of parameters."""
        for key in params:
            del self.config[key]


class ParticleDataImp:
    """The modules and parameters of one particle, by identifier.

    Attributes:
        modules: The modules.
        params: The parameters.

    Example:
        >>> from moduli.particles import adopt
        >>> net = adopt(torch.nn.Linear(3, 2))
        >>> data = net._particle_kernel.data
        >>> data.modules[0] is net, data.params[0] is net.weight
        (True, True)
    """

    def __init__(self, modules: ModuleDict, params: ParamDict) -> None:
        self.modules = modules
        self.params = params

    def init_kernel(self, kernel: Any) -> None:
        """Do nothing: modules find their kernel through the record of their particle."""

    def copy(self, vdata: VersionDataImp) -> ParticleDataImp:
        """Return new modules around the same parameters."""
        return self.create(vdata, OrderedDict(self.params))

    def create(self, vdata: VersionDataImp, params: ParamDict) -> ParticleDataImp:
        """Return new modules, in the same structure, around given parameters.

        Args:
            vdata: The structure.
            params: The parameters, with the identifiers of the present ones.
        """
        product: Any = self.modules[ROOT_MODULE_ID].product()  # type: ignore[operator]
        product.params = params
        root = product.module()
        build(root)
        return _locate(root)

    def assign(self, params: ParamDict) -> None:
        """Take over given parameters in place of the present ones.

        Raises:
            StructureError: If their identifiers differ.
        """
        if set(params) != set(self.params):
            raise StructureError(
                f"parameters {sorted(params)} were given for a particle that has {sorted(self.params)}"
            )
        self.params = OrderedDict(params)

    def add_modules(self, modules: ModuleDict) -> None:
        """Add modules under identifiers that are free."""
        _check_free(self.modules, modules)
        self.modules.update(modules)

    def add_params(self, params: ParamDict) -> None:
        """Add parameters under identifiers that are free."""
        _check_free(self.params, params)
        self.params.update(params)

    def remove_modules(self, modules: set[ModuleID]) -> None:
        """Remove modules."""
        for key in modules:
            del self.modules[key]

    def remove_params(self, params: set[ParamID]) -> None:
        """Remove parameters."""
        for key in params:
            del self.params[key]


def _check_free(present: Any, added: Any) -> None:
    taken = sorted(set(present) & set(added))
    if taken:
        raise StructureError(f"identifiers {taken} are taken; use numbers from {max(present) + 1} on")


def _locate(root: nn.Module) -> ParticleDataImp:
    version, reading = identify(root)
    parts = version.locate(reading)
    return ParticleDataImp(OrderedDict(sorted(parts.modules.items())), OrderedDict(sorted(parts.params.items())))


class ParticleKernelImp:
    """The kernel of a live particle: it reads from the particle, and changes of it are made to the particle.

    Attributes:
        root: The particle.

    Example:
        >>> from moduli.particles import adopt
        >>> kernel = adopt(torch.nn.Linear(3, 2))._particle_kernel
        >>> [tuple(p.shape) for p in kernel.data.params.values()]
        [(2, 3), (2,)]
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root

    @property
    def version(self) -> Any:
        """The version that the particle is at."""
        settle_journal(self.root)
        return record_of(self.root).version

    @property
    def data(self) -> ParticleDataImp:
        """The modules and parameters of the particle."""
        return _locate(self.root)

    def create(self, data: ParticleDataImp) -> Any:
        """Return the kernel of the particle that other data are of."""
        return kernel_of(data.modules[ROOT_MODULE_ID])

    def version_update(self, version_updater: Any) -> None:
        """Make an edit: a new version, to which this particle is changed; if either fails, nothing changes.

        Raises:
            StructureError: If the particle has no such module, or the edit is none of the eight documented ones.
        """
        if not isinstance(version_updater, VersionEdit):
            name = type(version_updater).__name__
            raise StructureError(
                f"a kernel of modules takes the eight documented edits (AddModuleVersionUpdater, ...), not a {name}; "
                "edit the module itself, and the version follows"
            )
        bring_up(self.root)
        modules = self.data.modules
        if version_updater.module_id not in modules:
            raise StructureError(f"the particle has no module {version_updater.module_id}; it has {list(modules)}")
        version_updater.edit(modules[version_updater.module_id], self.root)

    def particle_update(self) -> None:
        """Change the particle to the newest version, through all versions in between."""
        bring_up(self.root)

    def detach(self) -> Any:
        """Return the same parameters as a particle of a new species."""
        return self.root.detach()._particle_kernel  # type: ignore[operator]


def create_new_group(ref: nn.Module) -> ParticleKernelImp:
    """Make a new species with one particle, an empty module.

    Args:
        ref: The module. It must have no parameters and no children yet.

    Raises:
        StructureError: If it has.

    Example:
        >>> from moduli.compat.nytorch import create_new_group
        >>> kernel = create_new_group(torch.nn.Module())
        >>> list(kernel.data.modules), len(kernel.data.params)
        ([0], 0)
    """
    build(ref)
    if ref._parameters or ref._modules:
        raise StructureError(
            f"this {type(ref).__name__} already has parameters or children; start from an empty module"
        )
    record_of(ref).version = record_of(ref).kernel = None
    identify(ref)
    return kernel_of(ref)  # type: ignore[no-any-return]
