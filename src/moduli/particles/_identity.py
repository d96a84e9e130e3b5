"""Particles in pickles: what identifies a version, so that copies made elsewhere belong to the species again."""

from __future__ import annotations

import uuid
from typing import Any
from weakref import WeakValueDictionary

from ._record import Record, Unborn
from .mtype import ParamConfig

__all__ = ["pack", "remember", "unpack"]

_known: WeakValueDictionary[str, Any] = WeakValueDictionary()


def remember(uid: str, version: Any) -> None:
    """Note which version an identifier stands for."""
    _known[uid] = version


def pack(record: Record) -> Any:
    """What a pickle holds of a record: how to make it again."""
    version = record.version
    order = list(record.order)
    if version is None:
        return unpack, (None, {}, order)
    if isinstance(version, Unborn) and version.version is not None:
        version = version.version
    holder: Any = version if isinstance(version, Unborn) else version.data
    if holder.uid is None:
        holder.uid = uuid.uuid4().hex
        remember(holder.uid, version)
    config: dict[str, ParamConfig] = {}
    if isinstance(version, Unborn):
        config = version.config
    elif version.data.species.configured:
        names = version.data.names
        config = {names[pid]: each for pid, each in version.data.config.items() if each != ParamConfig()}
    return unpack, (holder.uid, config, order)


def unpack(uid: str | None, config: dict[str, ParamConfig], order: list[str]) -> Record:
    """Make a record again. A version that this process knows is found; one from elsewhere starts a species here."""
    version: Any = None
    if uid is not None:
        version = _known.get(uid)
        if version is None:
            version = Unborn()
            version.uid, version.config = uid, config
            version.species.configured = bool(config)
            _known[uid] = version
    record = Record(version)
    record.order = dict.fromkeys(order)
    return record
