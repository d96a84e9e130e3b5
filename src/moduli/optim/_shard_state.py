"""The state of links over parameters in pieces, as it is saved: whole under parameter names, and back into pieces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import cut, is_sharded, make_whole, map_tensors, piece_like, piece_of
from ._needs import Across

if TYPE_CHECKING:
    from ._shards import ShardedParams
    from .module import Module


def find_key(shards: ShardedParams, link: Module, param: Any) -> Tensor | None:
    """The tensor under which a link keeps the state of a parameter; None where another process keeps it."""
    i = shards.places[id(param)] if id(param) in shards.places else _find_place(shards, param)
    if i < 0:
        return param  # type: ignore[no-any-return]
    form, exchange = shards.forms[link], shards.exchange
    if form is Across.NOTHING or exchange is None:
        return shards.locals[i]
    if form is Across.MATRICES and exchange.owners[i] != exchange.rank:
        return None
    known = shards.wholes.get(i)
    if known is None:
        known = shards.keep_whole(i, hollow(param, shards.locals[i].device))
    return known


def hollow(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape and dtype with the memory of one element."""
    return torch.empty((), dtype=like.dtype, device=device).expand(like.shape)


def _find_place(shards: ShardedParams, param: Any) -> int:
    return next((i for i, own in enumerate(shards.params) if own is param), -1)


def pack_value(shards: ShardedParams, param: Tensor, value: Any) -> Any:
    """A value of the state of a local tensor, as it is saved: what has its shape is a piece of something."""
    i = shards.places.get(id(param), -1)
    if i < 0 or param is not shards.locals[i] or not is_sharded(shards.params[i]):
        return value
    axes = param.dim()

    def pack(tensor: Tensor) -> Any:
        if tensor.shape[:axes] != param.shape:
            return tensor
        return piece_like(tensor, shards.params[i], tuple(tensor.shape[axes:]))

    return map_tensors(value, pack)


def unpack_value(shards: ShardedParams, link: Module, param: Any, value: Any) -> Any:
    """A saved value, as the link keeps it here."""
    i, exchange = _find_place(shards, param), shards.exchange
    pieces = i >= 0 and exchange is not None and shards.forms[link] is Across.NOTHING and is_sharded(param)

    def unpack(tensor: Any) -> Any:
        if not pieces or exchange is None:
            return make_whole(tensor)
        if is_sharded(tensor):
            return piece_of(tensor.redistribute(param.device_mesh, param.placements)).clone()
        (starts, sizes), axes = exchange.boxes[i][exchange.rank], param.dim()
        if tuple(tensor.shape[:axes]) != tuple(param.shape):
            return tensor
        rest = tuple(tensor.shape[axes:])
        return cut(tensor, ((*starts, *(0 for _ in rest)), (*sizes, *rest))).clone()

    return map_tensors(value, unpack)


def join_owned(shards: ShardedParams, saved: dict[str, Any], paths: Mapping[Module, str]) -> dict[str, Any]:
    """The saved state with what links have learnt in other processes, of the tensors that those own."""
    owned = [paths[link] for link, form in shards.forms.items() if form is Across.MATRICES]
    if not owned or shards.exchange is None:
        return saved
    own = {
        name: {key: value for key, value in row.items() if key.rpartition("/")[0] in owned}
        for name, row in saved["state"].items()
    }
    learnt = {path for row in own.values() for path in {key.rpartition("/")[0] for key in row}}
    every: list[Any] = [None] * shards.exchange.size
    shared = {path: saved["links"][path] for path in owned if path in learnt}
    torch.distributed.all_gather_object(every, (own, shared), group=shards.group)
    state = {name: dict(row) for name, row in saved["state"].items()}
    links = dict(saved["links"])
    for rows, theirs in reversed(every):
        links.update(theirs)
        for name, row in rows.items():
            if row:
                state.setdefault(name, {}).update(row)
    order = {name: i for i, name in enumerate(saved["shapes"])}
    state = dict(sorted(state.items(), key=lambda item: order.get(item[0], len(order))))
    return {**saved, "state": state, "links": links}
