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
from ._foreign_state import is_of_torch, is_portable, read_portable, read_torch
from ._link_state import StandIns
from ._plain_state import VECTOR, Vector, decode, encode, rename
from ._settings import same
from ._shards import find_key, join_owned, pack_value, unpack_value

if TYPE_CHECKING:
    from .optimizer import Optimizer


FORMAT = 1
ALL = "@all"


def _name_stand_ins(optimizer: Optimizer) -> dict[Tensor, str]:
    return {
        tensor: f"@{path}:{key}:{i}"
        for path, link in optimizer._links
        for key, stand_ins in link._stand_ins.items()
        for i, tensor in enumerate(stand_ins.tensors)
    }


def pack(optimizer: Optimizer) -> dict[str, Any]:
    """Everything that was learnt, as plain data."""
    binding, shards = optimizer.binding, optimizer.shards
    names = {**binding.names, **_name_stand_ins(optimizer)}
    params = optimizer.list_params()
    state: dict[str, dict[str, Any]] = {}
    links: dict[str, Any] = {}
    for path, link in optimizer._links:
        for param, row in link.state.items() if optimizer.rows is None else optimizer.rows.list_states(link):
            if not row or param not in names:
                continue
            whole = link.vector_state and param in binding.names and param not in binding.sources
            into = state.setdefault(f"{ALL}:{path}" if whole else names[param], {})
            for key, value in row.items():
                shown = value if shards is None else pack_value(shards, param, value)
                into[f"{path}/{key}"] = encode(shown, f"{path}: state {key!r}")
        links[path] = {
            "global": encode(link.global_state, f"{path}: global state"),
            "extra": encode(link._extra_pack(), f"{path}: extra"),
        }
    groups = []
    for group in optimizer.param_groups:
        kept = {key: value for key, value in _groups.options(group).items() if not callable(value)}
        groups.append({**encode(kept, "param group"), "params": [binding.names[param] for param in group["params"]]})
    packed = {
        "format": FORMAT,
        "state": state,
        "param_groups": groups,
        "links": links,
        # A piece of a flat vector has the size that it has with this number of processes.
        "shapes": {binding.names[param]: None if is_flat_shard(param) else tuple(param.shape) for param in params},
        "dtypes": {binding.names[param]: str(param.dtype) for param in params},
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
        saved = read_torch(optimizer, saved, strict)
    missing = [key for key in ("format", "state", "links", "shapes", "order", "current_step") if key not in saved]
    if missing:
        raise ValueError(
            f"this is not the state of a moduli Optimizer: it has no {missing[0]!r} (it has {', '.join(saved)})"
        )
    if saved["format"] > FORMAT:
        raise ValueError(f"the state was saved in format {saved['format']}; this version reads up to {FORMAT}")
    binding, shards = optimizer.binding, optimizer.shards
    params = optimizer.list_params()
    active = [param for param in params if param.requires_grad]
    saved = rename(_members.stack_saved(saved), {binding.names[param]: tuple(param.shape) for param in params})
    by_name: dict[str, Tensor] = {binding.names[param]: param for param in params}
    _check(optimizer, saved, by_name, strict)
    options = _read_options(optimizer, saved, strict)
    known = dict(optimizer._links)
    _make_stand_ins(known, saved)
    if optimizer.rows is not None:
        optimizer.rows.dissolve()
    by_name.update({name: tensor for tensor, name in _name_stand_ins(optimizer).items()})
    vectors: dict[str, Vector] = {}
    for path, link in known.items():
        parts = saved["links"].get(path, {"global": {}})["global"].get(VECTOR)
        # That of stand-ins has no names: who shows them to it keeps their order.
        if link.vector_state and path in saved["links"] and not any(part.startswith("?:") for part in parts or ()):
            vectors[path] = Vector(saved, parts, active, binding)
    rows: dict[str, dict[Tensor, dict[str, Any]]] = {path: {} for path in known}
    gone: set[str] = set()
    for name, entries in saved["state"].items():
        whole = name.startswith(f"{ALL}:")
        for key, value in entries.items():
            path, _, field = key.rpartition("/")
            if path not in known or (whole and vectors[path].fresh):
                continue
            link, param = known[path], vectors[path].first if whole else by_name.get(name)
            if param is None:
                gone.add(name)
                continue
            found = _cast(value, saved.get("dtypes", {}).get(name), param)
            kept: Tensor | None = param
            if shards is None:
                found = map_tensors(found, make_whole)
            else:
                found, kept = unpack_value(shards, link, param, found), find_key(shards, link, param)
            found = decode(found, param.device if param.numel() else None)
            if kept is not None:
                rows[path].setdefault(kept, {})[field] = vectors[path].permute(found) if whole else found
    dropped = [f"saved state of {name} has no parameter here" for name in sorted(gone)]
    dropped += [
        f"{path} would start afresh: its state is over all parameters together, and they are not the same"
        for path, vector in vectors.items()
        if vector.fresh
    ]
    if dropped and strict:
        raise ValueError(f"{'; '.join(dropped)}. Load with strict=False to leave it out")
    for path, link in known.items():
        if path not in saved["links"]:
            continue
        shared = decode(saved["links"][path]["global"], active[0].device if active else None)
        link.reset()
        link.global_state.clear()
        link.global_state.update(vectors[path].keep_shared(shared) if path in vectors else shared)
        link._extra_unpack(decode(saved["links"][path]["extra"], None))
    for path, link in known.items():  # a link that is reset resets those inside it
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
    for text in dropped:
        warnings.warn(f"{text}, and is left out", stacklevel=4)


def _cast(value: Any, saved: str | None, param: Tensor) -> Any:
    """Numbers in the precision of the saved parameter, in that of the parameter here; others (counts, scales) as they are."""
    before = getattr(torch, saved.removeprefix("torch.")) if saved else param.dtype
    kinds = {before.to_real(): param.dtype.to_real(), before: param.dtype}
    return map_tensors(value, lambda tensor: tensor.to(kinds.get(tensor.dtype, tensor.dtype)))


def _check(optimizer: Optimizer, saved: Mapping[str, Any], by_name: Mapping[str, Tensor], strict: bool) -> None:
    members = optimizer.binding.members
    if saved.get("members") != members:
        raise ValueError(f"the state is of {saved.get('members') or 'no'} members, here are {members or 'none'}")
    here, there = [path for path, _ in optimizer._links], list(saved["links"])
    if strict and here != there:
        missing = [path for path in there if path not in here]
        extra = [path for path in here if path not in there]
        found = f"the saved one has {', '.join(missing)}" if missing else f"only this one has {', '.join(extra)}"
        raise ValueError(
            f"the chains differ: {found}; build the same chain, or load with strict=False to take over the links that agree"
        )
    for name, shape in saved["shapes"].items():
        own = tuple(by_name[name].shape) if name in by_name and shape is not None else None
        if own is not None and own != tuple(shape):
            raise ValueError(f"parameter {name!r} has shape {own}, its saved state is for {tuple(shape)}")


def _make_stand_ins(known: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for name in saved["state"]:
        path, key, position = name[1:].rsplit(":", 2) if name.startswith("@") and name.count(":") > 1 else ("", "", "")
        if path in known and not name.startswith(f"{ALL}:"):
            stand_ins = known[path]._stand_ins.setdefault(key, StandIns())
            while len(stand_ins.tensors) <= int(position):
                stand_ins.tensors.append(torch.empty(0))


def _read_options(optimizer: Optimizer, saved: Mapping[str, Any], strict: bool) -> dict[str, dict[str, Any]]:
    """The saved settings of each parameter.

    Refused where parameters of one group here were saved with different ones, of which some would be lost.
    """
    links = [link for _, link in optimizer._links]
    out: dict[str, dict[str, Any]] = {}
    for group in saved["param_groups"]:
        kept = decode(_groups.options(group), None)
        options = {key: value for key, value in kept.items() if strict or _groups.is_known(key, links)}
        _groups.check_keys(options, links)
        out.update(dict.fromkeys(group["params"], options))
    for i, group in enumerate(optimizer.param_groups if strict else ()):
        names = [name for param in group["params"] if (name := optimizer.binding.names[param]) in out]
        for name in names:
            one, other = out[names[0]], out[name]
            key = next((key for key in {**one, **other} if not same({key: one.get(key)}, {key: other.get(key)})), None)
            if key is not None:
                raise ValueError(
                    f"{names[0]!r} was saved with {key}={one.get(key)!r} and {name!r} with {other.get(key)!r}, and both are in "
                    f"group {i} here; make the groups that were saved, or load with strict=False for the settings of the first"
                )
    return out
