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
from ._foreign_state import is_of_torch, is_portable, read_portable, read_torch, refuse_flattened
from ._renaming import VECTOR, Vector, rename
from ._shard_state import find_key, join_owned, pack_value, unpack_value
from ._state import StandIns, decode, encode

if TYPE_CHECKING:
    from .optimizer import Optimizer


FORMAT = 1
ALL = "@all"


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
        for param, row in link.state.items() if optimizer.rows is None else optimizer.rows.list_states(link):
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
    binding, shards = optimizer.binding, optimizer.shards
    params = [param for group in optimizer.param_groups for param in group["params"]]
    active = [param for param in params if param.requires_grad]
    saved = rename(saved, {binding.names[param]: tuple(param.shape) for param in params})
    _check(optimizer, saved, strict)
    options = _read_options(optimizer, saved, strict)
    known = dict(optimizer._links)
    _make_stand_ins(optimizer, saved)
    if optimizer.rows is not None:
        optimizer.rows.dissolve()
    if binding.members is not None and any("[" in name for name in saved["state"]):
        _members.views(binding, active, binding.members)
    by_name = _names(optimizer)
    by_name.update({name: tensor for tensor, name in _stand_in_names(optimizer).items()})
    vectors = {
        path: Vector(saved, saved["links"][path]["global"].get(VECTOR), active, binding.names, binding.members)
        for path, link in known.items()
        if link.vector_state and path in saved["links"] and not _is_of_stand_ins(saved["links"][path]["global"])
    }
    rows: dict[str, dict[Tensor, dict[str, Any]]] = {path: {} for path in known}
    gone = [name for name in saved["shapes"] if name not in by_name and saved.get("user", {}).get(name)]
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
            found = _cast(found, saved.get("dtypes", {}).get(name.partition("[")[0]), param)
            link, kept = known[path], param
            if shards is None:
                found = map_tensors(found, make_whole)
            else:
                found, kept = unpack_value(shards, link, param, found), find_key(shards, link, param)  # type: ignore[assignment]
            if kept is not None:
                rows[path].setdefault(kept, {})[field] = vectors[path].permute(found) if whole else found
    dropped = [f"saved state of {name} has no parameter here" for name in sorted(set(gone))]
    dropped += [
        f"{path} would start afresh: its state is over all parameters together, and they are not the same"
        for path, vector in vectors.items()
        if vector.fresh
    ]
    if dropped and strict:
        raise ValueError(f"{'; '.join(dropped)}. Load with strict=False to leave it out")
    for path, link in known.items():
        entry = saved["links"].get(path)
        if entry is None:
            continue
        extra = decode(entry["extra"], None)
        shared = decode(entry["global"], active[0].device if active else None)
        link.reset()
        link.global_state.clear()
        link.global_state.update(vectors[path].keep_shared(shared) if path in vectors else shared)
        link._extra_unpack(extra)
    for path, link in known.items():
        for param, row in rows[path].items():
            link.state[param] = row
    for group in optimizer.param_groups:  # options follow the parameters: those of the first that is known
        names = (binding.names[param] for param in group["params"])
        group.update(next((options[name] for name in names if name in options), {}))
    optimizer._sync()
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


def _read_options(optimizer: Optimizer, saved: Mapping[str, Any], strict: bool) -> dict[str, dict[str, Any]]:
    """The saved settings of each parameter.

    Refused where parameters of one group here were saved with different ones, of which some would be lost.
    """
    links = [link for _, link in optimizer._links]
    out: dict[str, dict[str, Any]] = {}
    for saved_group in saved["param_groups"]:
        options = {
            key: decode(value, None)
            for key, value in _groups.options(saved_group).items()
            if strict or _groups.is_known(key, links)
        }
        _groups.check_keys(options, links)
        out.update(dict.fromkeys(saved_group["params"], options))
    for i, group in enumerate(optimizer.param_groups if strict else ()):
        names = [name for param in group["params"] if (name := optimizer.binding.names[param]) in out]
        for name in names:
            one, other = out[names[0]], out[name]
            key = next((key for key in {**one, **other} if not _are_equal(one.get(key), other.get(key))), None)
            if key is not None:
                raise ValueError(
                    f"{names[0]!r} was saved with {key}={one.get(key)!r} and {name!r} with {other.get(key)!r}, and both are in "
                    f"group {i} here; make the groups that were saved, or load with strict=False for the settings of the first"
                )
    return out


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)
