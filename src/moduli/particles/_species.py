"""Versions of live particles: noticing edits, following those of others, and making them all or nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ._compare import compare
from ._edits import Undo
from ._record import Record, Species, Unborn, build, inspect, record_of
from ._template import LAZY, RECORD, Memory, Template, Walk
from .base import NytoModuleBase, ParticleKernelImp, VersionKernelImp, located, numbered, paired
from .errors import StructureError
from .kernel import ParticleKernel, VersionKernel
from .mtype import ModuleID, ParamConfig, ParamID

__all__ = ["current", "editing", "follow", "is_lagging", "kernel_of", "own_config", "species_of", "version_of"]


def current(module: nn.Module, attributes: bool = True) -> tuple[Record, Memory, list[Tensor], Walk]:
    """Read a module as `inspect` does, after noticing its edits and following those of its species."""
    record = record_of(module)
    old = record.memory
    found = inspect(module, attributes)
    version = record.version
    if version is None:
        return found
    if found[1] is not old:
        notice(module, record, old, found[1])
        version = record.version
    if version is not None and is_lagging(version):
        follow(module)
        found = inspect(module, attributes)
    return found


def is_lagging(version: VersionKernelImp | Unborn) -> bool:
    """Whether an edit was made from a version."""
    if type(version) is Unborn:
        return version.version is not None and version.version.next_version is not None
    return version.next_version is not None  # type: ignore[union-attr]


def resolved(record: Record, template: Template) -> VersionKernelImp:
    """The version of a particle, made from its structure if nobody asked for it before."""
    version = record.version
    if version is None:
        version = Unborn()
    if isinstance(version, Unborn):
        if version.version is None:
            data = numbered(template, version.species)
            data.uid = version.uid
            names = {name: pid for pid, name in data.names.items()}
            for name, config in version.config.items():
                if name in names:
                    data.config[names[name]] = config
                    version.species.configured = True
            version.version = VersionKernel(data)
            if data.uid is not None:
                from ._identity import remember

                remember(data.uid, version.version)
        version = version.version
    record.version = version
    return version


def notice(module: nn.Module, record: Record, old: Memory | None, new: Memory) -> None:
    """Make a new version if a module was edited without our knowledge since it was read."""
    if old is not None and _same(old, new):
        return
    if old is None and isinstance(record.version, Unborn) and record.version.version is None:
        return
    version = resolved(record, new.template if old is None else old.template)
    if version.next_version is not None:
        follow(module)
        renumber(module)
        version = resolved(record, new.template)
        before = None
    else:
        before = _identified(version, old)
    advance(module, record, version, compare(version.data, module, before))


def advance(module: nn.Module, record: Record, version: VersionKernelImp, edited: Any) -> None:
    """Link the version that edits lead to, and bring the particle that they were made on there."""
    if edited is None:
        return
    following, together = edited
    event = following.event(version.data, together.sentence(version.data))
    successor: VersionKernelImp = VersionKernel(following)
    adopt_children(module)
    # Nothing below can fail.
    following.species.events.append(event)
    version.next_version, version.particle_updater = successor, together
    record.version = successor
    kernel = record.kernel() if record.kernel is not None else None
    if kernel is not None:
        kernel.version = successor
        kernel.data = located(module, following)


def follow(module: nn.Module) -> None:
    """Bring a particle to the newest version of its species."""
    record = record_of(module)
    version = record.version
    if version is None or not is_lagging(version):
        return
    if isinstance(version, Unborn):
        version = version.version
    while version is not None and version.next_version is not None:
        data = located(module, version.data, partly=True)
        undo = Undo(tuple(data.modules.values()), data)
        try:
            version.particle_update(data)
            adopt_children(module)
        except BaseException:
            # An edit that is half in would be taken for one that was made on this particle.
            undo.restore()
            raise
        version = version.next_version
        record.version = version
        kernel = record.kernel() if record.kernel is not None else None
        if kernel is not None:
            kernel.version, kernel.data = version, data


def renumber(root: nn.Module) -> None:
    """Let the children of sequences be numbered without gaps again, where edits of two particles met."""
    for module in root.modules():
        if isinstance(module, nn.Sequential | nn.ModuleList):
            held = module._modules
            if list(held) != [str(place) for place in range(len(held))] and all(name.isdecimal() for name in held):
                children = list(held.values())
                held.clear()
                held.update((str(place), child) for place, child in enumerate(children))


def version_of(module: nn.Module) -> VersionKernelImp:
    """The version that a particle is at."""
    if LAZY in module.__dict__:
        build(module)
    record = record_of(module)
    old = record.memory
    _, memory, _, _ = inspect(module, attributes=False)
    if record.version is not None and memory is not old:
        notice(module, record, old, memory)
    fresh = record.version is None
    version = resolved(record, memory.template)
    if fresh:
        adopt_children(module)
        _take_configs(module, version)
    return version


def kernel_of(module: nn.Module) -> ParticleKernelImp:
    """The kernel of a particle. There is one, as long as somebody holds it."""
    version = version_of(module)
    record = record_of(module)
    kernel: ParticleKernelImp | None = record.kernel() if record.kernel is not None else None
    data = located(module, version.data)
    if kernel is None:
        kernel = ParticleKernel(version, data)
        record.kernel = weakref.ref(kernel)
    else:
        kernel.version, kernel.data = version, data
    return kernel


def species_of(record: Record) -> Species | None:
    """The species of a particle, if it has one."""
    version = record.version
    if version is None:
        return None
    return version.species if isinstance(version, Unborn) else version.data.species


@contextmanager
def editing(module: NytoModuleBase, name: str, forced: bool = True) -> Iterator[None]:
    """Make an edit of an attribute of a module all or nothing, and a new version of the species it is in.

    Args:
        module: The module.
        name: The attribute.
        forced: Whether assigning it is an edit even if the structure stays the same.
    """
    root = module._particle_root
    record = record_of(root)
    if record.version is not None:
        current(root)
        version = resolved(record, inspect(root, attributes=False)[1].template)
        before = _identified(version, record.memory)
    undo = Undo([module])
    held = record.version
    order = dict(record_of(module).order)
    children = dict(module._modules)
    try:
        yield
        record_of(module).order.setdefault(name)
        if record.version is not None:
            edited = compare(version.data, root, before, (module, name) if forced else None)
            advance(root, record, version, edited)
        else:
            adopt_child(root, module._modules.get(name))
    except BaseException:
        undo.restore()
        record.version = held
        record_of(module).order = order
        record.forget()
        raise
    record.forget()
    record_of(module).forget()
    for child in children.values():
        if child is not None and isinstance(child, NytoModuleBase):
            # It is a root of its own from now on, unless it is still in here.
            _ = child._particle_root


def adopt_children(root: nn.Module) -> None:
    """Tell the modules of a particle which particle they are in."""
    reference: weakref.ref[nn.Module] | None = None
    for module in root.modules():
        if module is not root and isinstance(module, NytoModuleBase):
            inner = record_of(module)
            if inner.root is None or inner.root() is not root:
                reference = reference or weakref.ref(root)
                inner.root = reference


def adopt_child(root: nn.Module, child: nn.Module | None) -> None:
    """Tell a module that was just assigned, and those below it, which particle they are in now."""
    if child is None or not (child._modules or isinstance(child, NytoModuleBase)):
        return
    reference = weakref.ref(root)
    configured = False
    for module in child.modules():
        if isinstance(module, NytoModuleBase) and module is not root:
            inner = record_of(module)
            inner.root = reference
            species = species_of(inner)
            configured = configured or (species is not None and species.configured)
    if configured:
        version_of(root)


def own_config(child: nn.Module, params: dict[int, ParamID]) -> dict[ParamID, ParamConfig]:
    """The configurations that modules of a tree were given as particles of their own, by identifiers of the new one."""
    found: dict[ParamID, ParamConfig] = {}
    for module in child.modules():
        record = module.__dict__.get(RECORD)
        if not isinstance(module, NytoModuleBase) or record is None:
            continue
        version = record.version
        if version is None or isinstance(version, Unborn) or not version.data.species.configured:
            continue
        for key, each in paired(module, 0, version.data.meta):
            for name, pid in version.data.meta[key].sub_params.items():
                held = each._parameters.get(name)
                if pid is not None and held is not None and id(held) in params:
                    config = version.data.config[pid]
                    if config != ParamConfig():
                        found[params[id(held)]] = config.copy()
    return found


def _take_configs(root: nn.Module, version: VersionKernelImp) -> None:
    data = located(root, version.data)
    params = {id(param): pid for pid, param in data.params.items()}
    for name, child in root.named_children():
        del name
        for pid, config in own_config(child, params).items():
            version.data.config[pid] = config
            version.data.species.configured = True


def _identified(version: VersionKernelImp, old: Memory | None) -> dict[ModuleID, nn.Module | None] | None:
    """The modules of a version by identifier, as they were when the particle was read last."""
    if old is None:
        return None
    nodes = old.template.nodes
    found: dict[ModuleID, nn.Module | None] = {}
    queue: list[tuple[ModuleID, int]] = [(0, 0)]
    for key, place in queue:
        if key in found:
            continue
        found[key] = old.refs[place]()
        children = dict(nodes[place].children)
        for name, child in version.data.meta[key].sub_modules.items():
            if child is not None:
                if children.get(name, -1) < 0:
                    return None
                queue.append((child, children[name]))
    return found


def _same(old: Memory, new: Memory) -> bool:
    """Whether two readings found the same structure of the same modules."""
    a, b = old.template, new.template
    return (
        len(a.nodes) == len(b.nodes)
        and all(
            x.kind is y.kind
            and x.parameters == y.parameters
            and x.children == y.children
            and x.transient == y.transient
            and [name for name, _ in x.buffers] == [name for name, _ in y.buffers]
            for x, y in zip(a.nodes, b.nodes, strict=True)
        )
        and [e.shape for e in a.layout] == [e.shape for e in b.layout]
        and all(x() is y() for x, y in zip(old.refs, new.refs, strict=True))
    )


def require(module: Any) -> NytoModuleBase:
    """Check that something is a particle.

    Raises:
        TypeError: If it is not.
    """
    if isinstance(module, NytoModuleBase):
        return module
    if isinstance(module, nn.Module):
        raise TypeError(f"a {type(module).__name__} is not a particle; write moduli.adopt(module) first")
    raise TypeError(f"a particle is expected, got a {type(module).__name__}")


def conflicts(left: nn.Module, right: nn.Module, difference: Any) -> StructureError:
    """The error of combining two particles of different structure."""
    return StructureError(
        f"cannot combine {type(left).__name__} and {type(right).__name__}: {difference}; the left is {described(left)}, "
        f"the right is {described(right)}. If one is an older version of the other, call its touch(), or take its values "
        "over with moduli.particles.migrate; otherwise build both from the same structure and convert them to one dtype"
    )


def described(module: nn.Module) -> str:
    """The version of a particle, for an error."""
    version = record_of(module).version
    if isinstance(version, Unborn):
        version = version.version
    if version is None:
        return "at version 0"
    return f"at version {version.data.number}" + ("" if version.is_newest else " (not the newest)")
