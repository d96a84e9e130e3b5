"""Edits of attributes: all or nothing, each with a version of the species."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from moduli.layout import Guard, read

from ._compare import compare
from ._past import Removal, find_keys, find_removed, snapshot_slots
from ._record import ParticleRecord, record_of
from ._skeleton import RECORD
from ._species import adopt_children, advance, bring_up, join_edits, recall, settle_journal_of, version_of
from .edits import protect_modules

_MISSING = object()


def edit(module: nn.Module, root: nn.Module, name: str, act: Callable[[], None], value: Any = None) -> None:
    """Edit an attribute of a module, all or nothing, and make the new version of its species.

    Args:
        module: The module.
        root: The particle it is in.
        name: The attribute.
        act: Makes the edit.
        value: The assigned value; None for other edits.
    """
    at: Any = record_of(root).version
    with at.species.lock:
        if _is_addition(module, name, value) and _add(module, root, name, act, value):
            return
        version_of(root)
        reading_before = bring_up(root)
        record, order = record_of(root), module.__dict__[RECORD].order if RECORD in module.__dict__ else {}
        version, before = version_of(root), recall(record)
        parts = version.locate(reading_before)
        slots = [snapshot_slots(module, *find_keys(parts, [module]))]
        with Guard(deferred=True) as guard:
            guard.mappings(order)
            guard.add(partial(setattr, record, "version", version))
            protect_modules(guard, module)
            act()
            order.setdefault(name)
            reading = read(root)
            labelled = module.__dict__.get("_labelled", {})
            edited = compare(version, reading, before, [(module, labelled[name][0] if name in labelled else name)])
            if edited is not None:
                removed = find_removed(edited[1], parts)
                advance(root, record, *edited, reading, Removal(removed, slots))
        with Guard(deferred=True):
            join_edits(version)


def _is_addition(module: nn.Module, name: str, value: Any) -> bool:
    """Whether a parameter or child gets a name that the module does not have."""
    state = module.__dict__
    taken = any(name in state.get(key, ()) for key in ("_parameters", "_modules", "_buffers", "_labelled"))
    return isinstance(value, nn.Module | nn.Parameter) and not taken


def _add(module: nn.Module, root: nn.Module, name: str, act: Callable[[], None], value: Any) -> bool:
    """Add a parameter or child, and record it in the journal: the version is made when it is needed.

    So extending a model that has relatives takes time linear in its size, not quadratic.

    Returns:
        Whether it was added; otherwise the particle must be brought to its newest version first.
    """
    record, own = record_of(root), record_of(module)
    version: Any = record.version
    foreign = version.unsettled is not None and not record.journal
    if record.structure is None or version._next is not None or foreign:
        return False
    with Guard(deferred=True) as guard:
        # Protecting whole registries would take time proportional to the size of the module.
        guard.add(partial(_take_back, module, own, name, name in own.order, module.__dict__.get(name, _MISSING)))
        act()
        own.order.setdefault(name)
        parts = [value] if isinstance(value, nn.Parameter) else [*value.parameters(), *value.buffers()]
        before = record.snapshots or {}
        copies = {id(part): (part, part.detach().clone()) for part in parts if id(part) not in before}
    with Guard(deferred=True):  # defers signals only: nothing inside can fail
        before.update(copies)
        record.snapshots, journal = before, record.journal or []
        journal.append((weakref.ref(module), name))
        record.journal = journal
        version.unsettled = partial(settle_journal_of, weakref.ref(root))
    if isinstance(value, nn.Module):
        adopt_children(root, value)
    return True


def _take_back(module: nn.Module, record: ParticleRecord, name: str, ordered: bool, before: Any) -> None:
    """Remove a name that a failed edit added."""
    state = module.__dict__
    for registry in ("_parameters", "_modules"):
        state[registry].pop(name, None)
    if before is not _MISSING:
        state[name] = before
    if not ordered:
        record.order.pop(name, None)
