"""Particles made of torch modules: their metadata, their data, and what every such module has."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeAlias

import torch  # noqa: F401 - for the examples
from torch import nn

from ._record import Event, Record, Species, Unborn, inspect, record_of
from ._template import LAZY, Template
from .errors import StructureError
from .kernel import ParticleData, ParticleKernel, VersionData, VersionKernel
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

__all__ = [
    "NytoModuleBase",
    "VersionDataImp",
    "ParticleDataImp",
    "VersionKernelImp",
    "ParticleKernelImp",
    "create_new_group",
]


class VersionDataImp(VersionData["VersionDataImp", "ParticleDataImp"]):
    """The structure of a species at one version: what every attribute refers to, and every parameter's configuration.

    Attributes:
        meta: For each module, the identifiers of what its attributes refer to.
        config: For each parameter, how operations treat it.
        species: The species.
        number: How many edits were made before.

    Example:
        >>> from moduli.particles import adopt
        >>> data = adopt(torch.nn.Linear(3, 2))._version_kernel.data
        >>> dict(data.meta[0].sub_params), data.config[1]
        ({'weight': 0, 'bias': 1}, ParamConfig(operational=True, clone=True))
    """

    meta: MetaDict
    config: ConfigDict

    def __init__(self, meta: MetaDict, config: ConfigDict, species: Species | None = None, number: int = 0) -> None:
        self.meta = meta
        self.config = config
        self.species = species or Species()
        self.number = number
        self.uid: str | None = None
        self.shapes: dict[ParamID, tuple[int, ...]] = {}
        self._kernel: weakref.ref[VersionKernelImp] | None = None
        self._names: dict[ParamID, str] | None = None

    def copy(self) -> VersionDataImp:
        """A deep copy of the metadata, for the next version of the species or the first of another."""
        twin = VersionDataImp(
            OrderedDict((key, meta.copy()) for key, meta in self.meta.items()),
            OrderedDict((key, config.copy()) for key, config in self.config.items()),
            self.species,
            self.number,
        )
        twin.shapes = dict(self.shapes)
        return twin

    def init_kernel(self, kernel: VersionKernelImp) -> None:
        """Note which version holds this metadata."""
        self._kernel = weakref.ref(kernel)

    def init_particle(self, pdata: ParticleDataImp) -> None:
        """Put the keys of a particle's data in the order of the metadata, and note that it is at this version."""
        # A particle may lack what it removed itself since it was at a version; that is an edit of its own, noticed next.
        pdata.modules = OrderedDict((key, pdata.modules[key]) for key in self.meta if key in pdata.modules)
        pdata.params = OrderedDict((key, pdata.params[key]) for key in self.config if key in pdata.params)
        kernel = self._kernel() if self._kernel is not None else None
        if pdata.record is not None and kernel is not None:
            from ._species import adopt_children

            adopt_children(pdata.modules[ROOT_MODULE_ID])
            pdata.record.version = kernel
            pdata.record.forget()

    @property
    def names(self) -> dict[ParamID, str]:
        """The dotted name of each parameter; the first one where it has several."""
        if self._names is None:
            found: dict[ParamID, str] = {}
            # Depth first, a module's own parameters before its children: the order of `named_parameters()`.
            stack: list[tuple[ModuleID, str]] = [(ROOT_MODULE_ID, "")]
            seen: set[ModuleID] = set()
            while stack:
                key, prefix = stack.pop()
                if key in seen:
                    continue
                seen.add(key)
                for name, pid in self.meta[key].sub_params.items():
                    if pid is not None:
                        found.setdefault(pid, prefix + name)
                children = [(c, f"{prefix}{n}.") for n, c in self.meta[key].sub_modules.items() if c is not None]
                stack += reversed(children)
            self._names = found
        return self._names

    def slots(self) -> set[tuple[str, object]]:
        """Every name of a parameter or buffer, with the shape of the parameter."""
        found: set[tuple[str, object]] = set()
        stack: list[tuple[ModuleID, str]] = [(ROOT_MODULE_ID, "")]
        while stack:
            key, prefix = stack.pop()
            meta = self.meta[key]
            found |= {(prefix + name, self.shapes.get(pid)) for name, pid in meta.sub_params.items() if pid is not None}
            found |= {(prefix + name, None) for name in meta.sub_buffers}
            stack += [(child, f"{prefix}{name}.") for name, child in meta.sub_modules.items() if child is not None]
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


class ParticleDataImp(ParticleData[VersionDataImp, "ParticleDataImp"]):
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

    modules: ModuleDict
    params: ParamDict

    def __init__(self, modules: ModuleDict, params: ParamDict) -> None:
        self.modules = modules
        self.params = params
        self.record: Record | None = None

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
        from ._derive import rebuilt

        root = rebuilt(self.modules[ROOT_MODULE_ID], self.params, params)
        return located(root, vdata)

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


VersionKernelImp: TypeAlias = VersionKernel[VersionDataImp, ParticleDataImp]
"""A version of a species of modules."""

ParticleKernelImp: TypeAlias = ParticleKernel[VersionDataImp, ParticleDataImp]
"""The kernel of a particle made of modules."""


def _check_free(held: Any, given: Any) -> None:
    taken = sorted(set(held) & set(given))
    if taken:
        raise StructureError(f"identifiers {taken} are taken; use numbers from {max(held) + 1} on")


def located(root: nn.Module, vdata: VersionDataImp, partly: bool = False) -> ParticleDataImp:
    """Find the modules and parameters of a live particle by their identifiers.

    Args:
        root: The particle.
        vdata: The structure.
        partly: Whether some of it may be missing.

    Raises:
        StructureError: If something is missing that may not.
    """
    modules: dict[ModuleID, nn.Module] = {}
    params: dict[ParamID, nn.Parameter] = {}
    for key, module in paired(root, ROOT_MODULE_ID, vdata.meta, partly):
        modules[key] = module
        for name, pid in vdata.meta[key].sub_params.items():
            if pid is not None:
                held = module._parameters.get(name)
                if held is None and partly:
                    continue
                if held is None:
                    raise StructureError(f"{vdata.names.get(pid, name)!r} is missing from this {type(root).__name__}")
                params[pid] = held
    found = ParticleDataImp(
        OrderedDict((key, modules[key]) for key in vdata.meta if key in modules),
        OrderedDict((key, params[key]) for key in vdata.config if key in params),
    )
    found.record = record_of(root)
    return found


def paired(
    root: nn.Module, key: ModuleID, meta: MetaDict, partly: bool = False
) -> Iterator[tuple[ModuleID, nn.Module]]:
    """The modules of a tree with their identifiers."""
    queue: list[tuple[ModuleID, nn.Module]] = [(key, root)]
    seen: set[ModuleID] = set()
    for key, module in queue:
        if key in seen:
            continue
        seen.add(key)
        yield key, module
        for name, child in meta[key].sub_modules.items():
            if child is not None:
                held = module._modules.get(name)
                # A module of another class took the place: the one that was there is gone.
                if partly and (held is None or meta[child].kind not in (None, type(held))):
                    continue
                if held is None:
                    raise StructureError(f"module {name!r} is missing from this {type(root).__name__}")
                queue.append((child, held))


def numbered(template: Template, species: Species) -> VersionDataImp:
    """The metadata of a structure that has no history: identifiers in the order of assignment."""
    meta: dict[ModuleID, ModuleMeta] = {}
    modules: dict[int, ModuleID] = {}
    params: dict[int, ParamID] = {}

    def visit(place: int) -> ModuleID:
        # A tree as deep as a list is long is not built by recursion in torch either.
        if place in modules:
            return modules[place]
        key = modules[place] = len(modules)
        node = template.nodes[place]
        own, below = dict(node.parameters), dict(node.children)
        kept = OrderedDict((name, name not in node.transient) for name, _ in node.buffers)
        meta[key] = ModuleMeta(OrderedDict(), OrderedDict(), kept, node.kind)
        ids: dict[str, int | None] = {}
        for name in node.order:
            if name in own:
                entry = own[name]
                ids[name] = None if entry < 0 else params.setdefault(entry, len(params))
            else:
                ids[name] = None if below[name] < 0 else visit(below[name])
        meta[key].sub_params.update((name, ids[name]) for name in own)
        meta[key].sub_modules.update((name, ids[name]) for name in below)
        return key

    visit(0)
    data = VersionDataImp(
        OrderedDict(sorted(meta.items())), OrderedDict((key, ParamConfig()) for key in range(len(params))), species
    )
    data.shapes = {key: template.layout.entries[entry].shape for entry, key in params.items()}
    return data


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
        if record.root is not None:
            # The particle is gone, or this module was taken out of it.
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
        return next(key for key, module in kernel_of(root).data.modules.items() if module is self)

    @property
    def _version_kernel(self) -> VersionKernelImp:
        from ._species import version_of

        root = self._particle_root
        if record_of(root).wrapped:
            raise StructureError(
                f"this {type(self).__name__} is wrapped by a ParticleModule; use the wrapper, or `with GetNytoModule(wrapper)`"
            )
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
    if LAZY in ref.__dict__ or ref._parameters or ref._modules:
        raise StructureError(
            f"this {type(ref).__name__} already has parameters or children; start from an empty module"
        )
    record, memory, _, _ = inspect(ref)
    unborn = Unborn()
    version: VersionKernelImp = VersionKernel(numbered(memory.template, unborn.species))
    record.version = version
    return ParticleKernel(version, located(ref, version.data))
