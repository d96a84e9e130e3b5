"""Versions of live particles: noticing edits, following those of others, and making them all or nothing.

Whatever reads or changes the versions of a species holds its lock, so threads may edit relatives.
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
    """Read a particle, after noticing its own edits and following those of its species, as far as they are known."""
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
    """Read a module. A copy of a particle that was not looked at yet is compared with what the original was.

    Returns:
        Its record, the reading, and whether it is what it was when it was last seen to be at its version.
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
    """Bring a particle to the newest version, its own edits included, or raise and leave it as it was."""
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
    """Repeat the edits of relatives, all or none.

    Returns:
        What is left of an edit of its own.

    Raises:
        StructureError: If the particle was edited itself meanwhile, in another way.
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
        # The same edit was made here.
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
    """Link the version that an edit leads to, and note that the particle it was made on is there.

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
    with Guard(deferred=True):  # nothing in it can fail
        following.species.events += events
        record.journal, record.snapshots = (), None
        # Other threads may read meanwhile: what looks new must not be taken for the version before.
        version.link(following, own)
        record.version = following
        remember(record, following, steps)
        record.saw(reading, states)


def _describe(
    module: nn.Module, record: ParticleRecord, following: Version, own: ParticleEdit, before: Version
) -> tuple[list[Event], list[Addition]]:
    """Return the events of an edit, one for each addition in the journal and one for all else; and those additions."""
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
        events.append(Event(*last, whole.removed, tuple(others), whole.when))
    following.number += len(events) - 1
    return events, additions


def join_edits(later: Version) -> None:
    """Make one edit of each two that lead to a version, where nothing is at the version in between.

    A particle that was not used for a thousand edits then follows a few, and of a name that was assigned again and again
    it keeps the last values, not all.
    """
    while (middle := _find_previous(later)) is not None and (first := _find_previous(middle)) is not None:
        before, after = first.particle_updater, middle.particle_updater
        # A version that was pickled is found again by its identifier.
        joint = before.join(after, later) if before and after and middle.uid is None else None
        if joint is None:
            later = middle
            continue
        probe = weakref.ref(middle)
        first._next, first.particle_updater = later, joint
        # If nothing else holds the version in between, it is gone with the last reference here.
        del middle
        held = probe()
        if held is None:
            later.previous = weakref.ref(first)
        else:
            first._next, first.particle_updater = held, before
            later = held


def _find_previous(version: Version) -> Version | None:
    """Return the version whose next one this is, if something is still at it."""
    previous = None if version.previous is None else version.previous()
    return previous if previous is not None and previous.next_version is version else None


def recall(record: ParticleRecord) -> LastSeen | None:
    """The modules of a particle by identifier, as they were when it was last seen to be at its version."""
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
    """Let a particle that has no version be the first of a new species."""
    with _BIRTH:
        if record.version is None:
            version = Version.of(reading)
            record.saw(reading, states)
            adopt_children(module)
            version.species.members.add(module)
            record.version = version
        return record.version


def version_of(module: nn.Module) -> Version:
    """The version that a particle is at, its own edits included; it does not follow those of others."""
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
    """Return the version that a particle is at, and a reading of it there."""
    version = version_of(module)
    return version, read(module)


def touch(root: nn.Module) -> None:
    """Bring a particle to the newest version of its species, edits of relatives that no operation noticed yet included."""
    version = record_of(root).version
    if version is None:
        return
    species: Species = version.species
    members = species.members
    if len(members) > 1 or root not in members:
        with species.lock:
            # Members are built: those that are not cannot have been edited.
            for other in list(members):
                at = record_of(other).version
                # One that lags has to follow before its own edits count.
                if other is not root and at is not None and at.next_version is None and at.species is species:
                    bring_up(other)
            bring_up(root)
    else:
        bring_up(root)


def settle_journal_of(reference: weakref.ref[nn.Module]) -> None:
    root = reference()
    if root is not None:
        settle_journal(root)


def settle_journal(root: nn.Module) -> None:
    """Make the version of additions that a particle has noted."""
    record: ParticleRecord | None = root.__dict__.get(RECORD)
    if record is not None and record.journal:
        version_of(root)


def adopt_children(root: nn.Module, below: nn.Module | None = None) -> None:
    """Tell the modules of a particle, or those of a child that was just assigned, which particle they are in."""
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
    """Check that something is a particle.

    Raises:
        TypeError: If it is not.
    """
    if isinstance(module, NytoModuleBase):
        return module
    if isinstance(module, nn.Module):
        raise TypeError(f"a {type(module).__name__} is not a particle; write moduli.adopt(module) first")
    raise TypeError(f"a particle is expected, got a {type(module).__name__}")
