"""Saving and loading an optimizer: state by link path and parameter name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import is_flat_shard
from ..layout import make_whole, map_tensors
from . import _groups, _members
from ._plain import decode, encode
from ._portable import is_portable, read_portable, refuse_flattened
from ._renaming import rename
from ._shard_state import find_key, join_owned, pack_value, unpack_value
from ._stand_ins import StandIns
from ._torch_state import is_of_torch, read_torch
from ._vector_state import VECTOR, Vector

if TYPE_CHECKING:
    from .module import Module
    from .optimizer import Optimizer


FORMAT = 1
ALL = "@all"


def pack_link(link: Module, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """One link and what is inside it."""
    where = type(link).__name__
    return {
        "state": {
            names.get(param, f"?{i}"): encode(dict(row), where) for i, (param, row) in enumerate(link.state.items())
        },
        "global": encode(link.global_state, where),
        "extra": encode(link._extra_pack(), where),
        "children": {
            key: pack_link(child, {**names, **{p: str(i) for i, p in enumerate(child.state) if p not in names}})
            for key, child in link.children.items()
        },
    }


def _stand_in_names(optimizer: Optimizer) -> dict[Tensor, str]:
    return {
        tensor: f"@{path}:{key}:{i}"
        for path, link in optimizer._links
        for key, stand_ins in link._stand_ins.items()
        for i, tensor in enumerate(stand_ins.tensors)
    }


def pack(optimizer: Optimizer) -> dict[str, Any]:
    """Everything that was learnt, as plain data."""
    binding = optimizer.binding
    names = {**binding.names, **_stand_in_names(optimizer)}
    shards = optimizer.shards
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state: dict[str, dict[str, Any]] = {}
    links: dict[str, Any] = {}
    for path, link in optimizer._links:
        for param, row in link.state.items() if optimizer.rows is None else optimizer.rows.rows(link):
            if not row or param not in names:
                continue
            # Where a link runs member by member, each has a vector of its own.
            whole = link.vector_state and param in binding.names and param not in binding.sources
            name = f"{ALL}:{path}" if whole else names[param]
            into = state.setdefault(name, {})
            for key, value in row.items():
                shown = value if shards is None else pack_value(shards, param, value)
                into[f"{path}/{key}"] = encode(shown, f"{path}: state {key!r}")
        links[path] = {
            "global": encode(link.global_state, f"{path}: global state"),
            "extra": encode(link._extra_pack(), f"{path}: extra"),
        }
    groups = []
    for group in optimizer.param_groups:
        kept = {
            key: encode(value, f"param group: {key}")
            for key, value in _groups.options(group).items()
            if not callable(value)
        }
        groups.append({**kept, "params": [binding.names[param] for param in group["params"]]})
    packed = {
        "format": FORMAT,
        "state": state,
        "param_groups": groups,
        "links": links,
        # A piece of a flat vector has the size that it has with this number of processes.
        "shapes": {binding.names[param]: None if is_flat_shard(param) else tuple(param.shape) for param in params},
        "dtypes": {binding.names[param]: str(param.dtype) for param in params},
        "user": {
            binding.names[param]: encode(dict(row), "optimizer.state")
            for param, row in optimizer.state.own.items()
            if row and param in binding.names
        },
        "order": [binding.names[param] for param in params if param.requires_grad],
        **({"rehearsed": True} if optimizer.rehearsed else {}),
        "current_step": optimizer.current_step,
        "num_evaluations": optimizer.num_evaluations,
        "should_terminate": optimizer.should_terminate,
        "reasons": list(optimizer.reasons),
        "members": binding.members,
        "made_with": {
            "torch": str(torch.__version__),
            "kernels": os.environ.get("MODULI_KERNELS", "auto"),
            "threads": torch.get_num_threads(),
        },
    }
    return packed if shards is None else join_owned(shards, packed, {link: path for path, link in optimizer._links})


def unpack(optimizer: Optimizer, saved: Mapping[str, Any], strict: bool) -> None:
    """Take over saved state; everything is checked before anything changes."""
    if is_portable(saved):
        saved = read_portable(saved)
    elif is_of_torch(saved):
        refuse_flattened(saved)
        saved = read_torch(optimizer, saved, strict)
    _check_format(saved)
    binding = optimizer.binding
    params = [param for group in optimizer.param_groups for param in group["params"]]
    saved = rename(saved, {binding.names[param]: tuple(param.shape) for param in params})
    _check(optimizer, saved, strict)
    by_name = _names(optimizer)
    known = dict(optimizer._links)
    shards = optimizer.shards
    dtypes = saved.get("dtypes", {})
    _make_stand_ins(optimizer, saved)
    if optimizer.rows is not None:
        optimizer.rows.dissolve()
    if binding.members is not None and any("[" in name for name in saved["state"]):
        params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
        _members.views(binding, params, binding.members)
        by_name = _names(optimizer)
    by_name.update({name: tensor for tensor, name in _stand_in_names(optimizer).items()})
    active = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    vectors = {
        path: Vector(saved, saved["links"][path]["global"].get(VECTOR), active, binding.names, binding.members)
        for path, link in known.items()
        if link.vector_state and path in saved["links"] and not _is_of_stand_ins(saved["links"][path]["global"])
    }
    rows: dict[str, dict[Tensor, dict[str, Any]]] = {path: {} for path in known}
    gone = []
    for name, entries in saved["state"].items():
        whole = name.startswith(f"{ALL}:")
        for key, value in entries.items():
            path, _, field = key.rpartition("/")
            if path not in known or (whole and vectors[path].fresh):
                continue
            param = vectors[path].first if whole else by_name.get(name)
            if param is None:
                gone.append(name)
                break
            found = decode(value, param.device if param.numel() else None)
            found = _cast(found, dtypes.get(name.partition("[")[0]), param)
            link = known[path]
            found = map_tensors(found, make_whole) if shards is None else unpack_value(shards, link, param, found)
            kept = param if shards is None else find_key(shards, link, param)
            if kept is not None:
                rows[path].setdefault(kept, {})[field] = vectors[path].permute(found) if whole else found
    gone += [name for name in saved["shapes"] if name not in by_name and saved.get("user", {}).get(name)]
    fresh = [path for path, vector in vectors.items() if vector.fresh]
    dropped = [f"saved state of {name} has no parameter here" for name in sorted(set(gone))]
    dropped += [
        f"{path} would start afresh: its state is over all parameters together, and they are not the same"
        for path in fresh
    ]
    if dropped and strict:
        raise ValueError(f"{'; '.join(dropped)}. Load with strict=False to leave it out")
    for path, link in known.items():
        entry = saved["links"].get(path)
        if entry is None:
            continue
        extra = decode(entry["extra"], None)
        shared = decode(entry["global"], active[0].device if active else None)
        if path in vectors:
            shared = vectors[path].keep_shared(shared)
        link.reset()
        link.global_state.clear()
        link.global_state.update(shared)
        link._extra_unpack(extra)
    for path, link in known.items():
        for param, row in rows[path].items():
            link.state[param] = row
    _take_groups(optimizer, saved)
    optimizer.current_step = int(saved["current_step"])
    optimizer.num_evaluations = int(saved["num_evaluations"])
    optimizer.should_terminate = bool(saved["should_terminate"])
    optimizer.reasons = list(saved["reasons"])
    optimizer._carried = None
    optimizer.rehearsed = bool(saved.get("rehearsed"))
    optimizer.state.own.clear()
    for name, row in saved.get("user", {}).items():
        if name in by_name:
            optimizer.state.own[by_name[name]] = decode(row, by_name[name].device)
    for text in dropped:
        warnings.warn(f"{text}, and is left out", stacklevel=4)


def _names(optimizer: Optimizer) -> dict[str, Tensor]:
    """What has a name; the forms in which links see a parameter have that of the parameter."""
    forms = () if optimizer.shards is None else optimizer.shards.places
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    names = optimizer.binding.names
    return {name: param for param, name in names.items() if id(param) in own or id(param) not in forms}


def _cast(value: Any, saved: str | None, param: Tensor) -> Any:
    """Numbers in the precision of the saved parameter, in that of the parameter here; others (counts, scales) as they are."""
    before = getattr(torch, saved.removeprefix("torch.")) if saved else param.dtype
    kinds = {before.to_real(): param.dtype.to_real(), before: param.dtype}
    return map_tensors(value, lambda tensor: tensor.to(kinds.get(tensor.dtype, tensor.dtype)))


def _check_format(saved: Mapping[str, Any]) -> None:
    for key in ("format", "state", "param_groups", "links", "shapes", "order", "current_step"):
        if key not in saved:
            raise ValueError(
                f"this is not the state of a moduli Optimizer: it has no {key!r} (it has {', '.join(map(str, saved))})"
            )
    if saved["format"] > FORMAT:
        raise ValueError(f"the state was saved in format {saved['format']}; this version reads up to {FORMAT}")


def _check(optimizer: Optimizer, saved: Mapping[str, Any], strict: bool) -> None:
    if saved.get("members") != optimizer.binding.members:
        raise ValueError(
            f"the state is of {saved.get('members') or 'no'} members, here are {optimizer.binding.members or 'none'}"
        )
    here, there = [path for path, _ in optimizer._links], list(saved["links"])
    if strict and here != there:
        missing = [path for path in there if path not in here]
        extra = [path for path in here if path not in there]
        raise ValueError(
            "the chains differ: "
            + (f"the saved one has {', '.join(missing)}" if missing else f"only this one has {', '.join(extra)}")
            + "; build the same chain, or load with strict=False to take over the links that agree"
        )
    for group in _keep_known_options(optimizer, saved) if not strict else saved["param_groups"]:
        options = {key: decode(value, None) for key, value in _groups.options(group).items()}
        _groups.check_keys(options, [link for _, link in optimizer._links])
    if strict:
        _check_groups(optimizer, saved)
    by_name = _names(optimizer)
    for name, shape in saved["shapes"].items():
        if name in by_name and shape is not None and tuple(by_name[name].shape) != tuple(shape):
            raise ValueError(
                f"parameter {name!r} has shape {tuple(by_name[name].shape)}, its saved state is for {tuple(shape)}"
            )


def _make_stand_ins(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    known = dict(optimizer._links)
    for name in saved["state"]:
        if not name.startswith("@") or name.startswith(f"{ALL}:"):
            continue
        path, key, position = name[1:].rsplit(":", 2)
        if path in known:
            stand_ins = known[path]._stand_ins.setdefault(key, StandIns())
            while len(stand_ins.tensors) <= int(position):
                stand_ins.tensors.append(torch.empty(0))


def _is_of_stand_ins(state: Mapping[str, Any]) -> bool:
    """Whether a link's vector is of stand-ins, which have no names: who shows them to it keeps their order."""
    return any(part.startswith("?:") for part in state.get(VECTOR) or ())


def _keep_known_options(optimizer: Optimizer, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The saved groups without settings that no link here has."""
    links = [link for _, link in optimizer._links]
    return [
        {key: value for key, value in group.items() if key == "params" or _groups.is_known(key, links)}
        for group in saved["param_groups"]
    ]


def _check_groups(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse a group here whose parameters had different settings when they were saved: some would be lost."""
    where = {name: group for group in saved["param_groups"] for name in group["params"]}
    for i, group in enumerate(optimizer.param_groups):
        names = [name for param in group["params"] if (name := optimizer.binding.names[param]) in where]
        for name in names:
            one, other = ({**where[each], "params": None} for each in (names[0], name))
            key = next((key for key in {**one, **other} if not _are_equal(one.get(key), other.get(key))), None)
            if key is not None:
                raise ValueError(
                    f"{names[0]!r} was saved with {key}={one.get(key)!r} and {name!r} with {other.get(key)!r}, and both are in "
                    f"group {i} here; make the groups that were saved, or load with strict=False for the settings of the first"
                )


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other)


def _take_groups(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Options follow the parameters: a group takes those of the saved group that its first known parameter was in."""
    where = {name: group for group in _keep_known_options(optimizer, saved) for name in group["params"]}
    for group in optimizer.param_groups:
        for param in group["params"]:
            found = where.get(optimizer.binding.names[param])
            if found is not None:
                group.update({key: decode(value, None) for key, value in found.items() if key != "params"})
                break
    optimizer._sync()
