"""Particles made of torch modules: their metadata, their data, and what every such module has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeAlias

import torch  # noqa: F401 - for the examples
from torch import nn

from moduli.layout import read

from ._record import Event, ParticleRecord, Species, build, refuse_wrapped
from ._record import record_of as record_of
from ._skeleton import RECORD, unwrap_kind
from .errors import StructureError
from .kernel import ParticleKernel, VersionKernel
from .mtype import (
    ROOT_MODULE_ID,
    ConfigDict,
    MetaDict,
    ModuleDict,
    ModuleID,
    ModuleMeta,
    ParamConfig,
    ParamDict,
    ParamID,
)


class VersionDataImp:
    """The structure of a species at one version: what every attribute refers to, and every parameter's configuration.

    Attributes:
        meta: For each module, the identifiers of what its attributes refer to.
        config: For each parameter, how operations treat it.
        shapes: For each parameter, its shape.
        species: The species.
        number: How many edits were made before.

    Example:
        >>> from moduli.particles import adopt
        >>> data = adopt(torch.nn.Linear(3, 2))._version_kernel.data
        >>> dict(data.meta[0].sub_params), data.config[1]
        ({'weight': 0, 'bias': 1}, ParamConfig(operational=True, clone=True))
    """

    def __init__(self, meta: MetaDict, config: ConfigDict, species: Species | None = None, number: int = 0) -> None:
        self.meta = meta
        self.config = config
        self.shapes: dict[ParamID, tuple[int, ...]] = {}
        self.species = species or Species()
        self.number = number
        self.uid: str | None = None

    @classmethod
    def of(cls, root: nn.Module, configs: dict[str, ParamConfig] | None = None) -> VersionDataImp:
        """The metadata of a module that has no history.

        Args:
            root: The module.
            configs: Configurations by name.
        """
        made = cls(OrderedDict(), OrderedDict())
        params: dict[int, ParamID] = {}
        grow(made, root, {}, params, OrderedDict(), OrderedDict())
        for child in root.children():
            inherit_configs(made, child, params)
        if configs:
            made.config.update((pid, configs[name]) for pid, name in made.names.items() if name in configs)
            made.species.configured = True
        return made

    def copy(self) -> VersionDataImp:
        """A deep copy of the metadata, in order, for the next version of the species or the first of another."""
        twin = VersionDataImp(
            OrderedDict((key, self.meta[key].copy()) for key in sorted(self.meta)),
            OrderedDict((key, self.config[key].copy()) for key in sorted(self.config)),
            self.species,
            self.number,
        )
        twin.shapes = dict(self.shapes)
        return twin

    def init_kernel(self, kernel: VersionKernelImp) -> None:
        """Nothing needs to be prepared."""

    def init_particle(self, pdata: ParticleDataImp) -> None:
        """Put the keys of a particle's data in the order of the metadata."""
        pdata.modules = OrderedDict((key, pdata.modules[key]) for key in self.meta)
        pdata.params = OrderedDict((key, pdata.params[key]) for key in self.config)

    @cached_property
    def names(self) -> dict[ParamID, str]:
        """The dotted name of each parameter; the first one where it has several."""
        found: dict[ParamID, str] = {}
        # Depth first, a module's own parameters before its children: the order of `named_parameters()`.
        for key, path in self.paths():
            for name, pid in self.meta[key].sub_params.items():
                if pid is not None:
                    found.setdefault(pid, f"{path}.{name}" if path else name)
        return found

    def paths(self) -> Iterator[tuple[ModuleID, str]]:
        """Every name of every module, with its identifier, depth first."""
        stack: list[tuple[ModuleID, str]] = [(ROOT_MODULE_ID, "")]
        while stack:
            key, path = stack.pop()
            yield key, path
            below = self.meta[key].sub_modules.items()
            stack += reversed(
                [(child, f"{path}.{name}" if path else name) for name, child in below if child is not None]
            )

    def slots(self) -> set[tuple[str, object]]:
        """Every name of a parameter or buffer, with the shape of the parameter."""
        found: set[tuple[str, object]] = set()
        for key, path in self.paths():
            prefix = f"{path}." if path else ""
            meta = self.meta[key]
            found |= {(prefix + name, self.shapes.get(pid)) for name, pid in meta.sub_params.items() if pid is not None}
            found |= {(prefix + name, None) for name in meta.sub_buffers}
        return found

    def event(self, before: VersionDataImp, sentence: str) -> Event:
        """The edit that led here from the version before."""
        here, there = self.slots(), before.slots()
        return Event(
            self.number, sentence, frozenset(n for n, _ in here - there), frozenset(n for n, _ in there - here)
        )

    def get_sub_modules(self, root: ModuleID) -> set[ModuleID]:
        """The identifiers of a module and of all modules below it."""
        found: set[ModuleID] = set()
        queue = [root]
        for key in queue:
            if key not in found:
                found.add(key)
                queue += [child for child in self.meta[key].sub_modules.values() if child is not None]
        return found

    def get_sub_params(self, root: ModuleID) -> set[ParamID]:
        """The identifiers of all parameters of a module and of the modules below it."""
        return {
            pid for key in self.get_sub_modules(root) for pid in self.meta[key].sub_params.values() if pid is not None
        }

    def get_garbage_modules(self) -> set[ModuleID]:
        """The identifiers of modules that cannot be reached from the root."""
        return set(self.meta) - self.get_sub_modules(ROOT_MODULE_ID)

    def get_garbage_params(self) -> set[ParamID]:
        """The identifiers of parameters that cannot be reached from the root."""
        return set(self.config) - self.get_sub_params(ROOT_MODULE_ID)

    def remove_modules(self, modules: set[ModuleID]) -> None:
        """Remove the metadata of modules."""
        for key in modules:
            del self.meta[key]

    def remove_params(self, params: set[ParamID]) -> None:
        """Remove the metadata of parameters."""
        for key in params:
            del self.config[key]
            self.shapes.pop(key, None)


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

    def init_kernel(self, kernel: ParticleKernelImp) -> None:
        """Nothing needs to be prepared: modules find their kernel through the record of their particle."""

    def copy(self, vdata: VersionDataImp) -> ParticleDataImp:
        """New modules around the same parameters."""
        return self.create(vdata, OrderedDict(self.params))

    def create(self, vdata: VersionDataImp, params: ParamDict) -> ParticleDataImp:
        """New modules, in the same structure, around given parameters.

        Args:
            vdata: The structure.
            params: The parameters, with the identifiers of the present ones.
        """
        from ._arithmetic import rebuild

        root = rebuild(self.modules[ROOT_MODULE_ID], {id(self.params[key]): params[key] for key in self.params})
        return locate(root, vdata)

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


VersionKernelImp: TypeAlias = VersionKernel
"""A version of a species of modules."""

ParticleKernelImp: TypeAlias = ParticleKernel
"""The kernel of a particle made of modules."""


def _check_free(held: Any, given: Any) -> None:
    taken = sorted(set(held) & set(given))
    if taken:
        raise StructureError(f"identifiers {taken} are taken; use numbers from {max(held) + 1} on")


def locate(root: nn.Module, vdata: VersionDataImp) -> ParticleDataImp:
    """Find the modules and parameters of a live particle by their identifiers.

    Raises:
        StructureError: If something is missing.
    """
    modules: dict[ModuleID, nn.Module] = {}
    params: dict[ParamID, nn.Parameter] = {}
    queue: list[tuple[ModuleID, nn.Module]] = [(ROOT_MODULE_ID, root)]
    for key, module in queue:
        if key in modules:
            continue
        modules[key] = module
        for name, pid in vdata.meta[key].sub_params.items():
            held = module._parameters.get(name)
            if pid is not None:
                if held is None:
                    raise StructureError(f"{vdata.names.get(pid, name)!r} is missing from this {type(root).__name__}")
                params[pid] = held
        for name, child in vdata.meta[key].sub_modules.items():
            below = module._modules.get(name)
            if child is not None:
                if below is None:
                    raise StructureError(f"module {name!r} is missing from this {type(root).__name__}")
                queue.append((child, below))
    return ParticleDataImp(
        OrderedDict((key, modules[key]) for key in vdata.meta), OrderedDict((key, params[key]) for key in vdata.config)
    )


def grow(
    vdata: VersionDataImp,
    module: nn.Module,
    known_modules: dict[int, ModuleID],
    known_params: dict[int, ParamID],
    modules: ModuleDict,
    params: ParamDict,
) -> ModuleID:
    """Give identifiers to a tree of modules that is added to a structure, except for those parts that are in it already.

    They are given in the order of assignment, where that is known.

    Args:
        vdata: The metadata, which is extended.
        module: The top of the tree.
        known_modules: Identifiers by `id` of the modules in the structure; extended.
        known_params: Identifiers by `id` of the parameters in the structure; extended.
        modules: Collects the modules that are new, by identifier.
        params: Collects the parameters that are new, by identifier.

    Returns:
        The identifier of the tree's top.
    """
    # A tree as deep as a list is long is not built by recursion in torch either.
    if id(module) in known_modules:
        return known_modules[id(module)]
    key = known_modules[id(module)] = next(reversed(vdata.meta), -1) + 1
    kept = OrderedDict((n, n not in module._non_persistent_buffers_set) for n in module._buffers)
    meta = vdata.meta[key] = ModuleMeta(OrderedDict(), OrderedDict(), kept, unwrap_kind(type(module)))
    modules[key] = module
    record: ParticleRecord | None = module.__dict__.get(RECORD)
    for name in dict.fromkeys((*(record.order if record is not None else ()), *module._parameters, *module._modules)):
        held, child = module._parameters.get(name), module._modules.get(name)
        if held is not None:
            number_parameter(vdata, held, known_params, params)
        elif child is not None:
            grow(vdata, child, known_modules, known_params, modules, params)
    meta.sub_params.update((n, None if p is None else known_params[id(p)]) for n, p in module._parameters.items())
    meta.sub_modules.update((n, None if m is None else known_modules[id(m)]) for n, m in module._modules.items())
    return key


def number_parameter(
    vdata: VersionDataImp, held: nn.Parameter, known: dict[int, ParamID], params: ParamDict
) -> ParamID:
    """The identifier of a parameter, which gets one if it has none; those that are new are collected."""
    pid = known.get(id(held))
    if pid is None:
        pid = known[id(held)] = next(reversed(vdata.config), -1) + 1
        vdata.config[pid] = ParamConfig()
        vdata.shapes[pid] = tuple(held.shape)
        params[pid] = held
    return pid


def inherit_configs(vdata: VersionDataImp, child: nn.Module, params: dict[int, ParamID]) -> None:
    """Take over the configurations that modules of a tree were given as particles of their own.

    Args:
        vdata: The metadata of the particle that they are in now.
        child: The top of the tree.
        params: Identifiers in that particle by `id` of the parameters.
    """
    for module in child.modules():
        record: ParticleRecord | None = module.__dict__.get(RECORD)
        version = None if record is None else record.version
        if version is None or not version.data.species.configured:
            continue
        for pid, held in locate(module, version.data).params.items():
            config = version.data.config[pid]
            if id(held) in params and config != ParamConfig():
                vdata.config[params[id(held)]] = config.copy()
                vdata.species.configured = True


class NytoModuleBase(nn.Module):
    """What every module that is a particle has; the base of `NytoModule` and of adopted modules.

    Attributes:
        _module_id: The identifier of the module in its particle.
        _particle_kernel: The kernel of the particle; None while a `ParticleModule` wraps it.

    Example:
        >>> from moduli.particles import NytoModule
        >>> net, net.inner = NytoModule(), NytoModule()
        >>> net.is_root, net.inner.is_root, net.inner._module_id
        (True, False, 1)
    """

    @property
    def _particle_root(self) -> nn.Module:
        """The module at the top of the particle that this module is in."""
        record = record_of(self)
        root = record.root() if record.root is not None else None
        if root is not None and any(module is self for module in root.modules()):
            return root
        # There is none, it is gone, or this module was taken out of it.
        record.root = None
        return self

    @property
    def is_root(self) -> bool:
        """Whether this module is at the top of its particle."""
        return self._particle_root is self

    @property
    def _particle_kernel(self) -> ParticleKernelImp | None:
        from ._species import kernel_of

        root = self._particle_root
        return None if record_of(root).wrapped else kernel_of(root)

    @property
    def _module_id(self) -> ModuleID:
        from ._species import kernel_of

        root = self._particle_root
        if root is self:
            return ROOT_MODULE_ID
        data: ParticleDataImp = kernel_of(root).data
        return next(key for key, module in data.modules.items() if module is self)

    @property
    def _version_kernel(self) -> VersionKernelImp:
        from ._species import version_of

        root = self._particle_root
        refuse_wrapped(self, root)
        return version_of(root)


def create_new_group(ref: nn.Module) -> ParticleKernelImp:
    """Make a new species with one particle, an empty module.

    Args:
        ref: The module. It must have no parameters and no children yet.

    Raises:
        StructureError: If it has.

    Example:
        >>> from moduli.particles.base import create_new_group
        >>> kernel = create_new_group(torch.nn.Module())
        >>> list(kernel.data.modules), len(kernel.data.params)
        ([0], 0)
    """
    from ._species import give_version

    build(ref)
    if ref._parameters or ref._modules:
        raise StructureError(
            f"this {type(ref).__name__} already has parameters or children; start from an empty module"
        )
    record = record_of(ref)
    record.version = None
    version = give_version(ref, record, read(ref))
    return ParticleKernel(version, locate(ref, version.data))
