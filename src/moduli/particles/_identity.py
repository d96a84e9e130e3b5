"""Particles in pickles: what identifies a version, so that copies made elsewhere belong to the species again."""

from __future__ import annotations

import uuid
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

from moduli.layout import LayoutError, read

from ._record import ParticleRecord
from .base import VersionDataImp
from .kernel import VersionKernel
from .mtype import ParamConfig

_known: WeakValueDictionary[str, Any] = WeakValueDictionary()


def pack(record: ParticleRecord) -> Any:
    """What a pickle holds of a record: how to make it again."""
    version = record.version
    order = tuple(record.order)
    if version is None:
        return unpack, (None, {}, order)
    data = version.data
    if data.uid is None:
        data.uid = uuid.uuid4().hex
        _known[data.uid] = version
    config: dict[str, ParamConfig] = {}
    if data.species.configured:
        config = {data.names[pid]: each for pid, each in data.config.items() if each != ParamConfig()}
    return unpack, (data.uid, config, order)


def unpack(uid: str | None, config: dict[str, ParamConfig], order: tuple[str, ...]) -> ParticleRecord:
    """Make a record again. A version that this process knows is found; one from elsewhere starts a species here."""
    version = None if uid is None else _known.get(uid)
    record = ParticleRecord(version, tuple(order))
    if uid is not None and version is None:
        record.origin = uid, config
    return record


def begin_here(module: nn.Module, record: ParticleRecord) -> None:
    """Let the species of a particle that came from another process begin here, at the version it had there."""
    if record.origin is None:
        return
    (uid, config), record.origin = record.origin, None
    version = _known.get(uid)
    if version is None:
        try:
            read(module)
        except LayoutError:
            # What is lazy has taken no part in operations yet.
            return
        data = VersionDataImp.of(module, config)
        data.uid = uid
        version = _known[uid] = VersionKernel(data)
    record.version = version
