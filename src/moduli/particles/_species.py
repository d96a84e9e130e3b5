"""Versions of live particles: detecting edits, following those of relatives, and recording new versions.

Functions that read or change the versions of a species hold its lock, so threads may edit relatives.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

from torch import nn

from moduli.layout import REMOVED, Guard, Reading, list_registered, read

from ._compare import LastSeen, compare
from ._past import Addition, Removal, infer_removal, list_steps, remember, snapshot_removal
from ._record import Event, ParticleRecord, Species, build, record_of
from ._skeleton import PENDING, RECORD, State, capture
from ._version import Version
from .base import NytoModuleBase
from .edits import ParticleEdit, protect_modules
from .errors import StructureError


def bring_up(module: nn.Module) -> Reading:
    """Read a particle at the newest recorded version of its species, after recording its own edits."""
    settled: ParticleRecord | None = module.__dict__.get(RECORD)
    if settled is not None and settled.watch is not None and settled.version is not None:
        reading, same = settled.read(module)
        if same and settled.version.next_version is None:
            return reading
    record, reading, same = _look(module)
    version = record.version
    if version is None or (same and version.next_version is None):
        return reading
    with version.species.lock:
        return _settle(module, record)


def _look(module: nn.Module) -> tuple[ParticleRecord, Reading, bool]:
    """Read a module; a new copy of a particle is compared with the version of the original.

    Returns:
        Its record, the reading, and whether it is unchanged since it was last known to be at its version.
    """
    if PENDING in module.__dict__:
        build(module)
    record = record_of(module)
    reading, same = record.read(module)
    version = record.version
    if record.structure is None and version is not None and compare(version, reading, None) is None:
        record.saw(reading)
        version.species.members.add(module)
        same = True
    return record, reading, same


def _settle(module: nn.Module, record: ParticleRecord) -> Reading:
    """Bring a particle to the newest version, its own edits included, or raise and leave it unchanged."""
    reading, same = record.read(module)
    version: Any = record.version
    unsettled = version.unsettled
    if record.journal:
        version.unsettled = None
    try:
        before = None if same else recall(record)
        edited = None if same else compare(version, reading, before)
        if version.next_version is not None:
            edited = _follow(module, record, version, edited)
            reading = read(module)
        if edited is not None:
            version = record.version
            advance(module, record, *edited, reading, infer_removal(version, *edited, reading, before))
            with Guard(deferred=True):
                join_edits(version)
        else:
            record.saw(reading)
            record.journal, record.snapshots = (), None
    finally:
        if record.journal:
            version.unsettled = unsettled
    version.species.members.add(module)
    return reading


def _follow(
    module: nn.Module,
    record: ParticleRecord,
    first: Version,
    own: tuple[Version, ParticleEdit] | None,
) -> tuple[Version, ParticleEdit] | None:
    """Apply the edits of relatives to a particle, all or none.

    Args:
        module: The particle.
        record: Its record.
        first: Its version.
        own: An edit of the particle itself that has no version yet.

    Returns:
        The part of the own edit that the edits of relatives did not make.

    Raises:
        StructureError: If the particle itself was edited in another way.
    """
    version = first
    if own is not None:
        while version.next_version is not None:
            version = version.next_version
        left = compare(version, read(module), None)
        if record.structure is not None and left is not None:
            theirs: Any = first.particle_updater
            raise StructureError(
                f"this {type(module).__name__} was edited ({own[1].sentence()}) after a relative had edited it too "
                f"({theirs.sentence()}), and the edits do not merge. Call touch() before an edit; now take the "
                "values over with moduli.particles.migrate(this, to=relative), or go on alone with particles.independent(this)"
            )
        # The particle already has the edits of its relatives.
        record.version = version
        return left
    parts = first.locate(read(module))
    params = list_registered(module)
    with Guard(deferred=True) as guard:
        guard.add(partial(setattr, record, "version", first))
        protect_modules(guard, *module.modules())
        guard.add(partial(setattr, record, "past", record.past))
        while version.next_version is not None:
            edit: Any = version.particle_updater
            removal = snapshot_removal(edit, parts)
            parts = version.particle_update(parts, record.past)
            remember(record, version, list_steps(removal, (), edit.start, edit.stop))
            version = version.next_version
        record.version = version
        adopt_children(module)
        record.saw(read(module))
    REMOVED.mark(params, module)
    return None


def advance(
    module: nn.Module,
    record: ParticleRecord,
    following: Version,
    own: ParticleEdit,
    reading: Reading,
    removal: Removal,
) -> None:
    """Record the version that an edit makes, and move the edited particle to it.

    Args:
        module: The particle.
        record: Its record.
        following: The version.
        own: The edit.
        reading: The particle after the edit.
        removal: What the edit removed.
    """
    version: Any = record.version
    own.settle(record.snapshots)
    events, additions = _describe(module, record, following, own, version)
    steps = list_steps(removal, additions, version.number, following.number)
    adopt_children(module)
    states = capture(reading.modules, reading, strict=False)
    with Guard(deferred=True):  # defers signals only: nothing inside can fail
        following.species.events += events
        record.journal, record.snapshots = (), None
        # Linked first: other threads that read the edited particle must not take it for one of the former version.
        version.link(following, own)
        record.version = following
        remember(record, following, steps)
        record.saw(reading, states)


def _describe(
    module: nn.Module, record: ParticleRecord, following: Version, own: ParticleEdit, before: Version
) -> tuple[list[Event], list[Addition]]:
    """Return the events of an edit, one for each addition in the journal and one for the rest; and those additions."""
    whole = following.event(before, own.sentence(), tuple(filter(None, own.names)))
    paths = {id(each): f"{path}." if path else "" for path, each in module.named_modules()} if record.journal else {}
    names = [f"{paths.get(id(owner()), '')}{name}" for owner, name in record.journal]
    sentences = dict(zip(own.names, own.text, strict=True))
    noted = {name: Addition(*each) for name, each in zip(names, record.journal, strict=True) if name in sentences}
    single, additions = list(noted), list(noted.values())
    others = {name: text for name, text in zip(own.names, own.text, strict=True) if name not in noted}
    if len(single) + bool(others) < 2:
        return [whole], additions
    events, added = [], set(whole.added)
    for number, name in enumerate(single, following.number):
        mine = {each for each in added if each == name or each.startswith(f"{name}.")}
        added -= mine
        events.append(Event(number, sentences[name], frozenset(mine), frozenset(), (name,), whole.when))
    if others:
        last = following.number + len(single), "; ".join(others.values()), frozenset(added)
        events.append(Event(*last, whole.removed, tuple(others), whole.when, whole.moved))
    following.number += len(events) - 1
    return events, additions


def join_edits(later: Version) -> None:
    """Join consecutive edits that lead to a version, as long as no particle is at the version in between.

    A particle that was not used for a thousand edits then follows a few, and only the last values of a name that was
    assigned repeatedly are stored.
    """
    while (middle := _find_previous(later)) is not None and (first := _find_previous(middle)) is not None:
        before, after = first.particle_updater, middle.particle_updater
        # A version with an identifier was pickled, and may be looked up again.
        joint = before.join(after, later) if before and after and middle.uid is None else None
        if joint is None:
            later = middle
            continue
        probe = weakref.ref(middle)
        first._next, first.particle_updater = later, joint
        # Without other references, the version in between is freed when this one is deleted.
        del middle
        referenced = probe()
        if referenced is None:
            later.previous = weakref.ref(first)
        else:
            first._next, first.particle_updater = referenced, before
            later = referenced


def _find_previous(version: Version) -> Version | None:
    """Return the version whose next one this is, if it is still referenced."""
    previous = None if version.previous is None else version.previous()
    return previous if previous is not None and previous.next_version is version else None


def recall(record: ParticleRecord) -> LastSeen | None:
    """Return the modules and attributes of a particle when it was last known to be at its version; None if unknown."""
    structure, version = record.structure, record.version
    if structure is None or version is None:
        return None
    live = zip(version.modules, (reference() for reference in record.modules), strict=True)
    return LastSeen(
        {key: module for key, module in live if module is not None},
        dict(zip(version.modules, record.states, strict=True)),
    )


_BIRTH = threading.Lock()
_MISSING = object()


def give_version(
    module: nn.Module, record: ParticleRecord, reading: Reading, states: list[State] | None = None
) -> Version:
    """Return the version of a particle; if it has none, make the first one of a new species.

    Args:
        module: The particle.
        record: Its record.
        reading: The reading of it.
        states: The plain attributes of its modules, if they were captured already.
    """
    with _BIRTH:
        if record.version is None:
            version = Version.of(reading)
            record.saw(reading, states)
            adopt_children(module)
            version.species.members.add(module)
            record.version = version
        return record.version


def version_of(module: nn.Module) -> Version:
    """Return the version of a particle, after recording its own edits, without following those of relatives."""
    record, reading, same = _look(module)
    version = record.version
    if version is None:
        return give_version(module, record, reading)
    if not same:
        with version.species.lock:
            # Another thread may have edited it since.
            _settle(module, record)
    return record.version or version


def identify(module: nn.Module) -> tuple[Version, Reading]:
    """Return the version of a particle, and a reading of it."""
    version = version_of(module)
    return version, read(module)


def touch(root: nn.Module) -> None:
    """Bring a particle to the newest version of its species, including edits of relatives that have no version yet."""
    version = record_of(root).version
    if version is None:
        return
    species: Species = version.species
    members = species.members
    if len(members) > 1 or root not in members:
        with species.lock:
            # Members are built; an unbuilt result cannot have been edited.
            for other in list(members):
                at = record_of(other).version
                # A relative at an older version must follow first, before its own edits can be recorded.
                if other is not root and at is not None and at.next_version is None and at.species is species:
                    bring_up(other)
            bring_up(root)
    else:
        bring_up(root)


def settle_journal_of(reference: weakref.ref[nn.Module]) -> None:
    """Make the version of the additions in the journal of a particle, if it still exists."""
    root = reference()
    if root is not None:
        settle_journal(root)


def settle_journal(root: nn.Module) -> None:
    """Make the version of the additions in the journal of a particle."""
    record: ParticleRecord | None = root.__dict__.get(RECORD)
    if record is not None and record.journal:
        version_of(root)


def adopt_children(root: nn.Module, below: nn.Module | None = None) -> None:
    """Set the root of the modules of a particle, or only of those below a newly assigned child."""
    reference = weakref.ref(root)
    configured = False
    for module in (root if below is None else below).modules():
        if module is not root and isinstance(module, NytoModuleBase):
            inner = record_of(module)
            inner.root = reference
            configured = configured or (inner.version is not None and inner.version.species.configured)
    if configured and below is not None:
        version_of(root)


def require(module: Any) -> NytoModuleBase:
    """Return the argument if it is a particle.

    Raises:
        TypeError: If it is not.
    """
    if isinstance(module, NytoModuleBase):
        return module
    if isinstance(module, nn.Module):
        raise TypeError(f"a {type(module).__name__} is not a particle; write moduli.adopt(module) first")
    raise TypeError(f"a particle is expected, got a {type(module).__name__}")
