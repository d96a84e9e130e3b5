"""`rollback`: going back to an earlier version, as an edit that relatives follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch  # noqa: F401 - for the examples
from torch import Tensor, nn

from moduli.layout import REMOVED, Guard, Reading, list_registered, read

from ._compare import compare
from ._own_values import OwnValue
from ._past import PastSlots, Plan, Removal, find_keys, find_removed, find_steps, protect_record, snapshot_slots
from ._record import record_of, refuse_wrapped
from ._species import advance, join_edits, recall, require, touch, version_of
from ._version import Past, Version
from .edits import ParticleEdit, protect_modules

T = TypeVar("T", bound=nn.Module)


def rollback(module: T, version: int) -> T:
    """Give a particle the structure that it had at an earlier version of its species.

    The rollback is an edit like any other: it makes a new version, relatives and an `Optimizer` of the module follow it, and it
    can be rolled back. Tensors that are in both versions keep their present values; tensors and modules that edits removed since
    come back as the same objects, with their values. A relative gets its own back if it followed those edits.

    A species counts its versions from the moment when a particle of it is first cloned or combined, or its `history` is read.
    Each particle stores the parts that the last eight edits removed from it; `keep_removed` sets another number.

    Args:
        module: A particle, or a module inside one, which goes back as a whole.
        version: The number of the version in `net.history`; 0 is the version before the first edit.

    Returns:
        The module.

    Raises:
        TypeError: If the module is no particle.
        ValueError: If there is no such version.
        StructureError: If the particle no longer stores the parts removed since; nothing is changed then.

    Example:
        >>> from moduli.particles import NytoModule, rollback
        >>> net = NytoModule()
        >>> net.head = nn.Linear(2, 1)
        >>> head, before = net.head, net.history.version
        >>> net.head = nn.Linear(3, 1)
        >>> rollback(net, before).head is head
        True
        >>> [edit.number for edit in net.history]
        [1, 2]
    """
    root = require(module)._particle_root
    refuse_wrapped(module, root)
    touch(root)
    at = version_of(root)
    with at.species.lock:
        _go_back(root, version)
    return module


def keep_removed(module: T, edits: int) -> T:
    """Set the number of edits that the particles of a species can roll back, for which they store the removed parts.

    Args:
        module: A particle of the species, or a module inside one.
        edits: The number of edits; 0 stores nothing.

    Returns:
        The module.

    Raises:
        ValueError: If the number is negative.

    Example:
        >>> from moduli.particles import NytoModule, keep_removed
        >>> net = keep_removed(NytoModule(), 0)
        >>> net.w = nn.Parameter(torch.zeros(2))
        >>> del net.w  # and its memory is free
    """
    if isinstance(edits, bool) or not isinstance(edits, int) or edits < 0:
        raise ValueError(f"the number of edits to keep is {edits!r}; it must be an integer of at least 0")
    root = require(module)._particle_root
    species = version_of(root).species
    with species.lock:
        species.depth = edits
        for member in (root, *species.members):
            record = record_of(member)
            record.past = record.past[-edits:] if edits else ()
    return module


def _go_back(root: nn.Module, target: int) -> None:
    """Roll back a particle that is at the newest version."""
    record, kind = record_of(root), type(root).__name__
    version, reading, before = version_of(root), read(root), recall(record)
    steps = find_steps(record, target, version.number, kind)
    if not steps:
        return
    plan = Plan(steps, kind)
    plan.check()
    parts, named = version.locate(reading), list_registered(root)
    slots = list(map(snapshot_slots, plan.modules, find_keys(parts, plan.modules)))
    forced = plan.list_forced({id(tensor) for tensor in (*reading.parameters, *reading.buffers)})
    with Guard(deferred=True) as guard:
        protect_record(guard, record)
        protect_modules(guard, *plan.modules)
        plan.write()
        after = read(root)
        edited = compare(version, after, before, forced)
        if edited is not None:
            following, edit = edited
            edit.text[0] = f"rolled back to version {target}: {edit.text[0]}"
            _note_returning(following, edit, after, steps)
            keys = {id(module): key for key, module in zip(following.modules, after.modules, strict=True)}
            for module, name, value in plan.list_sizes():
                if id(module) in keys:
                    edit.touched.add(keys[id(module)])
                    edit.attributes.setdefault(keys[id(module)], {}).setdefault(name, value)
            removal = Removal(find_removed(edit, parts), slots)
            advance(root, record, following, edit, after, removal)
    REMOVED.mark(named, root)
    if edited is not None:
        with Guard(deferred=True):
            join_edits(version)


def _note_returning(following: Version, edit: ParticleEdit, after: Reading, steps: Sequence[Past]) -> None:
    """Record the tensors that come back, so that each relative restores its own."""
    params, modules, buffers = _list_removed(steps)
    owners = following.modules[:1]
    for place, buffer in edit.buffers.items():
        if id(buffer) in buffers:
            own = edit.own_buffers.get(place, OwnValue(None, None, None, owners))
            edit.own_buffers[place] = own._replace(back=buffers[id(buffer)])
    for key, param in zip(following.params, after.parameters, strict=True):
        if key in edit.add_params and id(param) in params:
            own = edit.own_params.get(key, OwnValue(None, None, None, owners))
            edit.own_params[key] = own._replace(back=params[id(param)])
    for key, module in zip(following.modules, after.modules, strict=True):
        if key in edit.add_modules and id(module) in modules:
            old, since = modules[id(module)]
            for name in module._buffers:
                own = edit.own_buffers.get((key, name), OwnValue(None, None, None, owners))
                edit.own_buffers[key, name] = own._replace(back=((old, name), since))


def _list_removed(steps: Sequence[Past]) -> tuple[dict[int, Any], dict[int, Any], dict[int, Any]]:
    """Return the identifier and last version of each removed parameter, module and buffer, by `id`."""
    params: dict[int, Any] = {}
    modules: dict[int, Any] = {}
    for past in steps:
        for table, removed in ((params, past.removed.params), (modules, past.removed.modules)):
            for key, each in removed.items():
                table.setdefault(id(each), (key, past.start))
    buffers: dict[int, Any] = {
        id(tensor): ((slot.key, name), past.start)
        for past in reversed(steps)
        for slot in past.slots
        if isinstance(slot, PastSlots)
        for name, tensor in slot.registries["_buffers"].items()
        if isinstance(tensor, Tensor)
    }
    return params, modules, buffers
