"""Saved state of sharded parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...layout import cut, find_box, is_sharded, make_whole, map_tensors, piece_like, piece_of
from .._needs import Across

if TYPE_CHECKING:
    from .. import Module
    from .shards import ShardedParams


def is_stored_here(shards: ShardedParams, link: Module, param: Tensor) -> bool:
    """Return whether this process stores the state of a link for a parameter.

    Args:
        shards: The sharded parameters of the optimizer.
        link: The link.
        param: The parameter.
    """
    i = shards.find_position(param)
    return i < 0 or shards.forms[link] is not Across.MATRICES or shards.exchange.owners[i] == shards.exchange.rank


def pack_value(shards: ShardedParams, link: Module, param: Tensor, value: Any) -> Any:
    """Return a value of a link's state in its saved form: tensors with the shape of a local shard become DTensors.

    Args:
        shards: The sharded parameters of the optimizer.
        link: The link.
        param: The parameter.
        value: The value.
    """
    i = shards.find_position(param)
    if i < 0 or shards.forms[link] is not Across.NOTHING or not is_sharded(shards.params[i]):
        return value
    local = shards.locals[i]
    axes = local.dim()

    def pack(tensor: Tensor) -> Any:
        if tensor.shape[:axes] != local.shape:
            return tensor
        return piece_like(tensor, shards.params[i], tuple(tensor.shape[axes:]))

    return map_tensors(value, pack)


def unpack_value(shards: ShardedParams, link: Module, param: Any, value: Any) -> Any:
    """Return a saved value in the form in which the link stores it here.

    Args:
        shards: The sharded parameters of the optimizer.
        link: The link.
        param: The parameter.
        value: The saved value.
    """
    if not is_sharded(param) or shards.forms[link] is not Across.NOTHING:
        return map_tensors(value, make_whole)
    starts, sizes = find_box(param)

    def unpack(tensor: Any) -> Any:
        if is_sharded(tensor):
            return piece_of(tensor.redistribute(param.device_mesh, param.placements)).clone()
        if tensor.shape[: param.dim()] != param.shape:
            return tensor
        rest = tuple(tensor.shape[param.dim() :])
        return cut(tensor, ((*starts, *(0 for _ in rest)), (*sizes, *rest))).clone()

    return map_tensors(value, unpack)


def join_owned(shards: ShardedParams, saved: dict[str, Any], paths: Mapping[Module, str]) -> dict[str, Any]:
    """Return the saved state with that of tensors owned by other processes.

    Args:
        shards: The sharded parameters of the optimizer.
        saved: The saved state of this process.
        paths: The paths of the links.
    """
    owned = [paths[link] for link, form in shards.forms.items() if form is Across.MATRICES]
    if not owned:
        return saved
    own: dict[str, dict[str, Any]] = {}
    for name, row in saved["state"].items():
        own[name] = {key: value for key, value in row.items() if key.rpartition("/")[0] in owned}
    owned_paths = {key.rpartition("/")[0] for row in own.values() for key in row}
    shared = join_rows({path: saved["links"][path] for path in owned_paths}, shards.group)
    state = dict(saved["state"])
    for name, row in join_rows(own, shards.group).items():
        state[name] = {**state.get(name, {}), **row}
    order = {name: i for i, name in enumerate(saved["shapes"])}
    state = dict(sorted(state.items(), key=lambda item: order.get(item[0], len(order))))
    return {**saved, "state": state, "links": {**saved["links"], **shared}}


def join_rows(rows: dict[str, dict[str, Any]], group: Any) -> dict[str, dict[str, Any]]:
    """Return the rows of all processes of a group; a process without data of a parameter has no row for it."""
    every: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(every, rows, group=group)
    out: dict[str, dict[str, Any]] = {}
    for rows_there in reversed(every):
        for name, row in rows_there.items():
            if row:
                out.setdefault(name, {}).update(row)
    return out
