"""State that is spread over processes, as it is saved: of parameters in pieces, and of a population in parts; and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import cut, find_box, is_sharded, make_whole, map_tensors, piece_like, piece_of
from ._needs import Across

if TYPE_CHECKING:
    from ..population import Shard
    from ._shards import ShardedParams
    from .module import Module
    from .optimizer import Optimizer


def find_key(shards: ShardedParams, link: Module, param: Any) -> Tensor | None:
    """The tensor under which a link keeps the state of a parameter; None where another process keeps it."""
    i = shards.places.get(id(param))
    if i is None:
        return param  # type: ignore[no-any-return]
    form = shards.forms[link]
    if form is Across.NOTHING:
        return shards.locals[i]
    if form is Across.MATRICES and shards.exchange.owners[i] != shards.exchange.rank:
        return None
    known = shards.wholes.get(i)
    return shards.keep_whole(i, hollow(param, shards.locals[i].device)) if known is None else known


def hollow(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape and dtype with the memory of one element."""
    return torch.empty((), dtype=like.dtype, device=device).expand(like.shape)


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
    """The saved state with what links have learnt in other processes, of the tensors that those own."""
    owned = [paths[link] for link, form in shards.forms.items() if form is Across.MATRICES]
    if not owned:
        return saved
    own = {
        name: {key: value for key, value in row.items() if key.rpartition("/")[0] in owned}
        for name, row in saved["state"].items()
    }
    learnt = {key.rpartition("/")[0] for row in own.values() for key in row}
    shared = join_rows({path: saved["links"][path] for path in learnt}, shards.group)
    state = dict(saved["state"])
    for name, row in join_rows(own, shards.group).items():
        state[name] = {**state.get(name, {}), **row}
    order = {name: i for i, name in enumerate(saved["shapes"])}
    state = dict(sorted(state.items(), key=lambda item: order.get(item[0], len(order))))
    return {**saved, "state": state, "links": {**saved["links"], **shared}}


def join_rows(rows: dict[str, dict[str, Any]], group: Any) -> dict[str, dict[str, Any]]:
    """What the processes of a group have, together; one that holds nothing of a parameter has learnt nothing of it."""
    every: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(every, rows, group=group)
    out: dict[str, dict[str, Any]] = {}
    for theirs in reversed(every):
        for name, row in theirs.items():
            if row:
                out.setdefault(name, {}).update(row)
    return out


# The member in a name such as `0.weight[3]`.
_MEMBER = re.compile(r"\[(\d+)\]")


def join_members(optimizer: Optimizer, shard: Shard, saved: dict[str, Any]) -> dict[str, Any]:
    """The saved state of all members, from that of the members of each process."""
    stacked, apart = _separate(saved)
    out = _map_members(optimizer, stacked, shard.join, shard.total)
    if any(apart):
        for start, (state, links) in zip(shard.starts, shard.collect(apart), strict=False):
            out["state"].update(_renumber(state, start))
            for path, kept in links.items():
                held = out["links"][path]["global"].setdefault("members", {})
                for inner, rows in kept.items():
                    held.setdefault(inner, []).extend(_renumber(rows, start))
    return out


def part_members(optimizer: Optimizer, shard: Shard, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Of the saved state of all members, that of those here."""
    if "shapes" not in saved:
        return dict(saved)  # refused where it is read
    if saved.get("members") != shard.total:
        raise ValueError(
            f"the state is of {saved.get('members') or 'no'} members, over all processes are {shard.total}"
        )
    stacked, (state, links) = _separate(saved)
    out = _map_members(optimizer, stacked, shard.part, shard.stop - shard.start)
    here = {name: row for name, row in state.items() if shard.start <= _number(name) < shard.stop}
    out["state"].update(_renumber(here, -shard.start))
    for path, kept in links.items():
        own = {inner: _renumber(shard.own(rows), -shard.start) for inner, rows in kept.items()}
        out["links"][path]["global"]["members"] = own
    return out


def _separate(saved: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[dict[str, Any], dict[str, Any]]]:
    """A saved optimizer without what links keep member by member; and that: by parameter, and by link."""
    state = {name: row for name, row in saved["state"].items() if _MEMBER.search(name)}
    links = {path: kept["global"]["members"] for path, kept in saved["links"].items() if "members" in kept["global"]}
    rest = {name: row for name, row in saved["state"].items() if name not in state}
    plain = {
        path: {**kept, "global": {key: value for key, value in kept["global"].items() if key != "members"}}
        for path, kept in saved["links"].items()
    }
    return {**saved, "state": rest, "links": plain}, (state, links)


def _number(name: str) -> int:
    """The member of a name such as `0.weight[3]`."""
    found = _MEMBER.search(name)
    return -1 if found is None else int(found[1])


def _renumber(value: Any, by: int) -> Any:
    """Plain data in which the members of names have other numbers."""
    if isinstance(value, str):
        return _MEMBER.sub(lambda found: f"[{int(found[1]) + by}]", value)
    if isinstance(value, dict):
        return {_renumber(key, by): _renumber(item, by) for key, item in value.items()}
    return [_renumber(item, by) for item in value] if isinstance(value, list) else value


def _map_members(optimizer: Optimizer, saved: dict[str, Any], act: Callable[[Any], Any], count: int) -> dict[str, Any]:
    """What is kept for members, joined or parted; not that of links that keep it for all members in every process."""
    whole = {path for path, link in optimizer._links if link.replicated}
    links = {path: kept if path in whole else act(kept) for path, kept in saved["links"].items()}
    shapes = {name: (count, *shape[1:]) for name, shape in saved["shapes"].items()}
    return {**saved, "state": act(saved["state"]), "links": links, "members": count, "shapes": shapes}
