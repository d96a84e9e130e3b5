"""Versions of live particles: noticing edits, following those of others, and making them all or nothing.

Whatever reads or changes the versions of a species holds its lock, so threads may edit relatives.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn

from moduli.layout import Reading, read

from ._compare import LastSeen, compare
from ._config import take_configs
from ._record import ParticleRecord, Species, build, record_of
from ._skeleton import PENDING, State, capture
from .base import (
    NytoModuleBase,
    ParticleDataImp,
    ParticleKernelImp,
    VersionDataImp,
    VersionKernelImp,
    locate,
    orders_of,
)
from .edits import ParticleEdit, Undo
from .errors import StructureError
from .kernel import ParticleKernel, VersionKernel
from .mtype import ModuleID


def bring_up(module: nn.Module, record: ParticleRecord) -> Reading:
    """Read a module, after noticing its own edits and following those of its species."""
    reading = read(module)
    version = record.version
    if version is not None and record.structure is None:
        _recognise(module, record, reading)
    if version is None or (version.next_version is None and record.looks_like(reading)):
        return reading
    with version.data.species.lock:
        return _settle(module, record, read(module))


def _settle(module: nn.Module, record: ParticleRecord, reading: Reading) -> Reading:
    """Bring a particle to the newest version, its own edits included, or raise and leave it as it was."""
    version = record.version
    if version is None:
        return reading
    before = None if record.structure is None else _read_known(record)
    edited = None if record.looks_like(reading) else compare(version.data, module, before)
    if version.next_version is not None:
        if edited is None:
            _follow(module, record)
        else:
            edited = _merge(module, record, edited[1])
        reading = read(module)
    if edited is not None:
        _advance(module, record, *edited, reading)
    else:
        record.saw(reading, capture(reading.modules, reading))
    version.data.species.enter(module)
    return reading


def _follow(module: nn.Module, record: ParticleRecord) -> None:
    """Repeat the edits of relatives, each whole or not at all."""
    version = record.version
    while version is not None and version.next_version is not None:
        data = locate(module, version.data)
        undo = Undo(*data.modules.values())
        try:
            version.particle_update(data)
            adopt_children(module)
            reading = read(module)
        except BaseException:
            undo.restore()
            raise
        version = record.version = version.next_version
        record.saw(reading)
        kernel = record.kernel() if record.kernel is not None else None
        if kernel is not None:
            kernel.version, kernel.data = version, data


def _merge(module: nn.Module, record: ParticleRecord, own: ParticleEdit) -> tuple[VersionDataImp, ParticleEdit] | None:
    """Follow the edits of relatives with a particle that was edited itself meanwhile, in another place.

    Returns:
        What is left of its own edit.

    Raises:
        StructureError: If the edits get in each other's way.
    """
    first = version = record.version
    newest = version
    while newest is not None and newest.next_version is not None:
        newest = newest.next_version
    if first is None or version is None or newest is None:
        return None
    if record.structure is None or compare(newest.data, module, None) is None:
        # The same edit was made here.
        record.version = newest
        return compare(newest.data, module, None)
    known = _read_known(record)
    live = {id(each) for each in module.modules()}
    data = ParticleDataImp(OrderedDict((k, m) for k, m in known.modules.items() if id(m) in live), OrderedDict())
    for key, each in data.modules.items():
        for name, pid in first.data.meta[key].sub_params.items():
            held = each._parameters.get(name)
            if pid is not None and held is not None:
                data.params.setdefault(pid, held)
    undo = Undo(*module.modules())
    try:
        while version.next_version is not None:
            theirs: Any = version.particle_updater
            met = (
                own.touched & theirs.touched | own.touched & theirs.remove_modules | theirs.touched & own.remove_modules
            )
            if met or not theirs.can_run(data):
                raise _explain_unmerged(module, own, theirs, version.data, met)
            theirs.run(data)
            version = version.next_version
        record.version = version
        return compare(version.data, module, LastSeen(data.modules, known.states))
    except BaseException:
        undo.restore()
        record.version = first
        raise


def _explain_unmerged(
    module: nn.Module, own: ParticleEdit, theirs: ParticleEdit, vdata: VersionDataImp, met: set[ModuleID]
) -> StructureError:
    paths = [path for key, path in vdata.paths() if key in met]
    where = repr(paths[0]) if paths and paths[0] else "this"
    return StructureError(
        f"{where} in a {type(module).__name__} was edited ({own.sentence(vdata)}) after a relative had edited it too "
        f"({theirs.sentence(vdata)}), and the edits do not merge. Call touch() before an edit; now take the values over with "
        "moduli.particles.migrate(this, to=relative), or go on alone with moduli.particles.independent(this)"
    )


def _advance(
    module: nn.Module, record: ParticleRecord, following: VersionDataImp, own: ParticleEdit, reading: Reading
) -> None:
    """Link the version that an edit leads to, and note that the particle it was made on is there."""
    version = record.version
    if version is None:
        return
    event = following.event(version.data, own.sentence(version.data))
    successor: VersionKernelImp = VersionKernel(following)
    adopt_children(module)
    states = capture(reading.modules, reading)
    kernel = record.kernel() if record.kernel is not None else None
    data = None if kernel is None else locate(module, following)
    # Nothing below can fail.
    following.species.events.append(event)
    version.next_version, version.particle_updater = successor, own
    record.version = successor
    record.saw(reading, states)
    if kernel is not None:
        kernel.version, kernel.data = successor, data


def _read_known(record: ParticleRecord) -> LastSeen:
    """The modules of a particle by identifier, as they were when it was last seen to be at its version."""
    structure, version = record.structure, record.version
    modules: dict[ModuleID, nn.Module] = {}
    states: dict[ModuleID, State] = {}
    if structure is None or version is None:
        return LastSeen(modules, states)
    queue: list[tuple[ModuleID, int]] = [(0, 0)]
    seen: set[ModuleID] = set()
    for key, place in queue:
        held = record.modules[place]()
        if key in seen:
            continue
        seen.add(key)
        if held is not None:
            modules[key] = held
            if len(record.states) == len(record.modules):
                states[key] = record.states[place]
        children = dict(structure.modules[place].children)
        queue += [(child, children[n]) for n, child in version.data.meta[key].sub_modules.items() if child is not None]
    return LastSeen(modules, states)


_BIRTH = threading.Lock()


def give_version(module: nn.Module, record: ParticleRecord, reading: Reading, states: list[State]) -> VersionKernelImp:
    """The version of a particle, which is the first of a new species if it has none."""
    version = record.version
    if version is None:
        with _BIRTH:
            version = record.version
            if version is None:
                version = VersionKernel(VersionDataImp.of(reading.structure, orders_of(reading.modules)))
                record.saw(reading, states)
                adopt_children(module)
                version.data.species.enter(module)
                record.version = version
                take_configs(module, version.data)
    return version


def version_of(module: nn.Module) -> VersionKernelImp:
    """The version that a particle is at, its own edits included; it does not follow those of others."""
    if PENDING in module.__dict__:
        build(module)
    record = record_of(module)
    version = record.version
    reading = read(module)
    if version is None:
        return give_version(module, record, reading, capture(reading.modules, reading))
    if record.structure is None:
        _recognise(module, record, reading)
    if not record.looks_like(reading):
        with version.data.species.lock:
            _settle(module, record, reading)
    return record.version or version


def _recognise(module: nn.Module, record: ParticleRecord, reading: Reading) -> None:
    """See whether a copy of another particle is what the original was."""
    version = record.version
    if version is not None and compare(version.data, module, None) is None:
        record.saw(reading, capture(reading.modules, reading))
        version.data.species.enter(module)


def kernel_of(module: nn.Module) -> ParticleKernelImp:
    """The kernel of a particle. There is one, as long as something holds it."""
    version = version_of(module)
    record = record_of(module)
    kernel: ParticleKernelImp | None = record.kernel() if record.kernel is not None else None
    data = locate(module, version.data)
    if kernel is None:
        kernel = ModuleKernel(version, data)
        record.kernel = weakref.ref(kernel)
    else:
        kernel.version, kernel.data = version, data
    return kernel


class ModuleKernel(ParticleKernel[VersionDataImp, ParticleDataImp]):
    """The kernel of a live particle: what is done to it is done to the particle."""

    def version_update(self, version_updater: Any) -> None:
        """Make an edit: a new version, and this particle brought to it; if either fails, neither happens."""
        module = self.data.modules[0]
        with self.version.data.species.lock:
            touch_one(module)
            events = list(self.version.data.species.events)
            undo = Undo(*self.data.modules.values())
            try:
                super().version_update(version_updater)
                self._settle(module)
            except BaseException:
                undo.restore()
                self.version.data.species.events[:] = events
                raise

    def particle_update(self) -> None:
        """Bring the particle to the newest version, through all those in between."""
        super().particle_update()
        self._settle(self.data.modules[0])

    def _settle(self, module: nn.Module) -> None:
        record = record_of(module)
        adopt_children(module)
        record.version = self.version
        reading = read(module)
        record.saw(reading, capture(reading.modules, reading))


def touch_one(root: nn.Module) -> None:
    """Bring one particle to the newest version of its species, as far as that is known."""
    bring_up(root, record_of(root))


def touch(root: nn.Module) -> None:
    """Bring a particle to the newest version of its species, edits of relatives that no operation noticed yet included."""
    record = record_of(root)
    version = record.version
    if version is None:
        return
    species: Species = version.data.species
    with species.lock:
        for ref in list(species.members.values()):
            other = ref()
            if other is None or other is root:
                continue
            build(other)
            held = record_of(other)
            if (
                held.version is None
                or held.version.next_version is not None
                or held.version.data.species is not species
            ):
                # One that lags has to follow before its own edits count.
                continue
            bring_up(other, held)
        bring_up(root, record)


def edit(module: NytoModuleBase, name: str, act: Callable[[], None]) -> None:
    """Make an edit of an attribute of a module all or nothing, and a new version of the species it is in."""
    root = module._particle_root
    record = record_of(root)
    version = record.version
    if version is None:
        _make_edit(module, name, act, root, record)
        return
    with version.data.species.lock:
        touch_one(root)
        _make_edit(module, name, act, root, record)


def _make_edit(
    module: NytoModuleBase, name: str, act: Callable[[], None], root: nn.Module, record: ParticleRecord
) -> None:
    version = record.version
    before = None if version is None else _read_known(record)
    undo = Undo(module)
    order = dict(record_of(module).order)
    children = dict(module._modules)
    try:
        act()
        record_of(module).order.setdefault(name)
        if version is not None:
            reading = read(root)
            labelled = module.__dict__.get("_labelled", {})
            edited = compare(version.data, root, before, (module, labelled[name][0] if name in labelled else name))
            if edited is not None:
                _advance(root, record, *edited, reading)
        else:
            adopt_child(root, module._modules.get(name))
    except BaseException:
        undo.restore()
        record.version = version
        record_of(module).order = order
        raise
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
            configured = configured or (inner.version is not None and inner.version.data.species.configured)
    if configured:
        version_of(root)


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
