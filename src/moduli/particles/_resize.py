"""Writing resized tensors and size attributes into a live model, as one edit of its species."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from moduli.layout import REMOVED, RESIZED, Guard, UnitMap, allow_interrupts, list_registered, read

from ._compare import compare
from ._past import PastSlots, Removal, find_removed, snapshot_slots
from ._record import ParticleRecord, record_of
from ._species import advance, bring_up, join_edits, recall, version_of
from ._version import Parts, Version
from .base import NytoModuleBase
from .edits import protect_modules


class ResizeWrites(NamedTuple):
    """The changes that are written into the modules of a model.

    Attributes:
        tensors: For each parameter or buffer that is replaced, by `id`: the old tensor, the new one, and the map between them.
        attributes: Plain attributes of modules.
        labels: The labels of labelled tensors: the module, the public name, and the registered name with the axes.
        sentence: The edit in words, for the history.
    """

    tensors: dict[int, tuple[Tensor, Tensor, UnitMap]]
    attributes: list[tuple[nn.Module, str, Any]]
    labels: list[tuple[nn.Module, str, Any]]
    sentence: str


def edit_model(net: nn.Module, make: Callable[[], ResizeWrites], check: Callable[[], None]) -> None:
    """Edit a model, check it, and make one version of the species that it is in; all or nothing.

    Args:
        net: The model.
        make: Edits registries and attributes of its modules, and returns the changes.
        check: Raises if the edited model is invalid; everything is restored then.
    """
    roots = _list_roots(net)
    with contextlib.ExitStack() as stack:
        lives = [stack.enter_context(_begin(root)) for root in roots]
        owners = roots or [net]
        params = [list_registered(owner) for owner in owners]
        with Guard(deferred=True) as guard:
            for live in lives:
                guard.add(partial(setattr, live.record, "version", live.version))
            guard.add(partial(_reset_lists, [each for each in net.modules() if isinstance(each, nn.RNNBase)]))
            protect_modules(guard, *net.modules())  # restored first, being registered last
            writes = make()
            with allow_interrupts():
                check()
            for before, after, unit_map in writes.tensors.values():
                if isinstance(before, nn.Parameter):
                    RESIZED.record(before, after, [unit_map])
            for live in lives:
                _advance(live, writes)
        for live in lives:
            with Guard(deferred=True):
                join_edits(live.version)
    for owner, named in zip(owners, params, strict=True):
        REMOVED.mark(named, owner)  # for optimizers of parameter lists, which do not follow modules


def write_tensors(net: nn.Module, tensors: Mapping[int, tuple[Tensor, Tensor, UnitMap]]) -> None:
    """Replace tensors by new ones, under all their names."""
    for module in net.modules():
        for registry in (module._parameters, module._buffers):
            for name, tensor in list(registry.items()):
                if tensor is not None and id(tensor) in tensors:
                    registry[name] = tensors[id(tensor)][1]  # type: ignore[assignment]
        if isinstance(module, nn.RNNBase):
            _reset_lists([module])


def _reset_lists(modules: Sequence[nn.RNNBase]) -> None:
    """Update the list of weights that recurrent layers have beside their registries."""
    for module in modules:
        for name, param in list(module._parameters.items()):
            nn.RNNBase.__setattr__(module, name, param)  # the `__setattr__` of particles would make another edit


def follow_relatives(net: nn.Module) -> None:
    """Bring the particles in a model, or the one that it is in, to the newest version."""
    for root in _list_roots(net):
        bring_up(root)


class _Live(NamedTuple):
    """A particle that is being edited: its record and version, and its parts and contents before the edit."""

    root: nn.Module
    record: ParticleRecord
    version: Version
    before: Any
    parts: Parts
    slots: list[PastSlots]


def _list_roots(net: nn.Module) -> list[nn.Module]:
    """Return the particles in a model, or the one that it is in, that have a version."""
    inside = [each for each in net.modules() if isinstance(each, NytoModuleBase)]
    roots = {id(root): root for root in (each._particle_root for each in inside)}
    return [root for root in roots.values() if record_of(root).version is not None]


@contextlib.contextmanager
def _begin(root: nn.Module) -> Iterator[_Live]:
    at: Any = record_of(root).version
    with at.species.lock:
        version_of(root)
        bring_up(root)
        record, version = record_of(root), version_of(root)
        parts = version.locate(read(root))
        slots = [snapshot_slots(module, key) for key, module in parts.modules.items()]
        yield _Live(root, record, version, recall(record), parts, slots)


def _advance(live: _Live, writes: ResizeWrites) -> None:
    """Make the version of a resized particle; relatives will resize their own values."""
    reading = read(live.root)
    edited = compare(live.version, reading, live.before)
    if edited is None:
        return
    following, edit = edited
    sources = {id(after): (before, unit_map) for before, after, unit_map in writes.tensors.values()}
    ids = {id(param): key for key, param in live.parts.params.items()}
    for key, param in zip(following.params, reading.parameters, strict=True):
        if key not in edit.add_params or id(param) not in sources:
            continue
        before, unit_map = sources[id(param)]
        if id(before) in ids:
            del edit.add_params[key]
            edit.own_params.pop(key, None)
            edit.resized[key] = ids[id(before)], [unit_map]
    keys = {id(module): key for key, module in zip(following.modules, reading.modules, strict=True)}
    for module in reading.modules:
        resized = {name: sources[id(buffer)][1] for name, buffer in module._buffers.items() if id(buffer) in sources}
        for name, buffer_map in resized.items():
            edit.touched.add(keys[id(module)])
            edit.resized_buffers[keys[id(module)], name] = [buffer_map]
            edit.own_buffers.pop((keys[id(module)], name), None)
    for module, name, value in writes.attributes:
        if id(module) in keys:
            edit.touched.add(keys[id(module)])
            edit.attributes.setdefault(keys[id(module)], {})[name] = value
    edit.text, edit.names = [writes.sentence], [""]
    removal = Removal(find_removed(edit, live.parts), live.slots)
    advance(live.root, live.record, following, edit, reading, removal)
