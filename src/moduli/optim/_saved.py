"""Saving and loading an optimizer: state by link path and parameter name."""

from __future__ import annotations

import copy
import io
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._torch import is_flat_shard
from ..layout import make_whole, map_tensors
from . import _groups
from ._link_state import VECTOR, StandIns, Vector, decode, encode, match_names
from ._settings import same
from ._shards import find_key, join_owned, join_rows, pack_value, unpack_value

if TYPE_CHECKING:
    from .optimizer import Optimizer


FORMAT = 1
ALL = "@all"
# What an optimizer itself remembers.
_KEPT = ("current_step", "num_evaluations", "should_terminate", "reasons", "rehearsed")


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
        for param, row in link._state.items() if optimizer.rows is None else optimizer.rows.list_states(link):
            if not row or param not in names:
                continue
            whole = link.vector_state and param in binding.names and param not in binding.sources
            into = state.setdefault(f"{ALL}:{path}" if whole else names[param], {})
            for key, value in row.items():
                shown = value if shards is None else pack_value(shards, param, value)
                into[f"{path}/{key}"] = encode(shown, f"{path}: state {key!r}")
        shared = encode(link.global_state, f"{path}: global state")
        links[path] = {"global": shared, "extra": encode(link._extra_pack(), f"{path}: extra")}
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
        **{key: copy.copy(getattr(optimizer, key)) for key in _KEPT},
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
    if any(REST in group for group in saved.get("param_groups", ())):
        saved = read_portable(saved)
    elif "format" not in saved and {"state", "param_groups"} <= set(saved):
        saved = read_torch(optimizer, saved, strict)
    missing = [key for key in ("format", "state", "links", "shapes", "order", "current_step") if key not in saved]
    if missing:
        raise ValueError(f"this is not the state of a moduli Optimizer: it has no {missing[0]!r}")
    if saved["format"] > FORMAT:
        raise ValueError(f"the state was saved in format {saved['format']}; this version reads up to {FORMAT}")
    binding, shards = optimizer.binding, optimizer.shards
    params = optimizer.list_params()
    active = [param for param in params if param.requires_grad]
    here: dict[str, Tensor] = {binding.names[param]: param for param in params}
    names = match_names(saved["shapes"], {name: tuple(param.shape) for name, param in here.items()})
    by_name = {old: here[name] for old, name in names.items() if name in here}
    _check(optimizer, saved, by_name, strict)
    options = _read_options(optimizer, saved, by_name, strict)
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
            vectors[path] = Vector(parts, saved["order"], by_name, active, binding.members is not None)
    rows: dict[str, dict[Tensor, dict[str, Any]]] = {path: {} for path in known}
    gone: set[str] = set()
    for name, entries in saved["state"].items():
        whole = name.startswith(f"{ALL}:")
        for key, value in entries.items():
            path, _, field = key.rpartition("/")
            if path not in known or (whole and vectors[path].fresh):
                continue
            link, param = known[path], next(iter(vectors[path].order), None) if whole else by_name.get(name)
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
    afresh = [path for path, vector in vectors.items() if vector.fresh]
    dropped += [f"{path} would start afresh: its state is over all parameters, which are others" for path in afresh]
    if dropped and strict:
        raise ValueError(f"{'; '.join(dropped)}. Load with strict=False to leave it out")
    for path, link in known.items():
        if path not in saved["links"]:
            continue
        shared = decode(saved["links"][path]["global"], active[0].device if active else None)
        link.reset()
        link.global_state.clear()
        link.global_state.update(vectors[path].keep_shared(shared, binding) if path in vectors else shared)
        link._extra_unpack(decode(saved["links"][path]["extra"], None))
    for path, link in known.items():  # a link that is reset resets those inside it
        for param, row in rows[path].items():
            link.state[param] = row
    for group in optimizer.param_groups:  # options follow the parameters: those of the first that is known
        group.update(next((options[param] for param in group["params"] if param in options), {}))
    optimizer._watch.sync(optimizer.param_groups, optimizer.modules)
    for key in _KEPT:
        setattr(optimizer, key, copy.copy(saved.get(key, False)))
    optimizer._carried = None
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
        what = f"the saved one has {', '.join(there)}, this one {', '.join(here)}"
        raise ValueError(f"the chains differ: {what}; strict=False takes over the links that agree")
    for name, shape in saved["shapes"].items():
        if name in by_name and shape is not None and by_name[name].shape != tuple(shape):
            own = tuple(by_name[name].shape)
            raise ValueError(f"parameter {name!r} has shape {own}, its saved state is for {tuple(shape)}")


def _make_stand_ins(known: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for name in saved["state"]:
        path, key, position = name[1:].rsplit(":", 2) if name.startswith("@") and name.count(":") > 1 else ("", "", "")
        if path in known and not name.startswith(f"{ALL}:"):
            stand_ins = known[path]._stand_ins.setdefault(key, StandIns())
            while len(stand_ins.tensors) <= int(position):
                stand_ins.tensors.append(torch.empty(0))


def _read_options(
    optimizer: Optimizer, saved: Mapping[str, Any], by_name: Mapping[str, Tensor], strict: bool
) -> dict[Tensor, dict[str, Any]]:
    """The saved settings of each parameter.

    Refused where parameters of one group here were saved with different ones, of which some would be lost.
    """
    links = [link for _, link in optimizer._links]
    out: dict[Tensor, dict[str, Any]] = {}
    for group in saved["param_groups"]:
        kept = decode(_groups.options(group), None)
        options = {key: value for key, value in kept.items() if strict or _groups.is_known(key, links)}
        _groups.check_keys(options, links)
        out.update({by_name[name]: options for name in group["params"] if name in by_name})
    for i, group in enumerate(optimizer.param_groups if strict else ()):
        first, *others = [param for param in group["params"] if param in out] or [None]
        for param in others:
            one, other = out[first], out[param]
            key = next((key for key in {**one, **other} if not same({key: one.get(key)}, {key: other.get(key)})), None)
            if key is not None:
                a, b = (optimizer.binding.names[held] for held in (first, param))
                what = f"{a!r} was saved with {key}={one.get(key)!r} and {b!r} with {other.get(key)!r}"
                raise ValueError(
                    f"{what}, and both are in group {i} here; strict=False takes the settings of the first"
                )
    return out


# ---------------------------------------------------------------------- by position, as tools of torch take it apart

# `torch.distributed.checkpoint` and FSDP1 keep of an optimizer's state what is under "state" by position of the parameter, and
# the settings of groups. Tensors with the shape of their parameter are there, so that they are resharded like it; everything
# else that links keep is in one entry of the first group, as bytes.
#
# Checkpoints are read into the tensors that an optimizer has. One that has none yet is stepped by torch, with gradients of
# zeros, which moves nothing here. Chains that evaluate a closure can't be stepped so: all that they keep is bytes.

REST = "moduli"
SENT = "sent"  # which tensors torch's tools were given, by parameter
NAMES = "param_names"
TOOL = "torch.distributed.checkpoint.state_dict"


def wants_portable(optimizer: Optimizer) -> bool:
    """Whether tools of torch may ask: there are processes, or its checkpoints were imported."""
    if optimizer.population is not None:
        return False
    distributed = torch.distributed
    return TOOL in sys.modules or (distributed.is_available() and distributed.is_initialized())


def make_portable(optimizer: Optimizer, packed: Mapping[str, Any]) -> dict[str, Any]:
    """The saved state by positions."""
    params = optimizer.list_params()
    positions = {name: i for i, name in enumerate(packed["shapes"])}
    state: dict[int, dict[str, Any]] = {}
    rest: dict[str, dict[str, Any]] = {}
    sent: dict[str, dict[str, Any]] = {}
    flat = optimizer.shards is not None and optimizer.shards.flat
    resharded = flat or not optimizer._evaluated
    for name, row in packed["state"].items():
        i = positions.get(name)
        for key, value in row.items():
            if resharded and i is not None and isinstance(value, Tensor) and value.shape == params[i].shape:
                state.setdefault(i, {})[key] = value
                sent.setdefault(name, {})[key] = True
            else:
                rest.setdefault(name, {})[key] = map_tensors(value, make_whole)
    if optimizer.shards is not None and flat:
        rest, sent = join_rows(rest, optimizer.shards.group), {}  # a process gets those of which it holds something
    else:
        for i, param in enumerate(params):
            if param.requires_grad:  # torch refuses a parameter without any tensor
                state.setdefault(i, {REST: torch.zeros(1, device=param.device)})
    buffer = io.BytesIO()
    torch.save({**packed, "state": rest, SENT: sent}, buffer)
    groups = [
        {**group, "params": [positions[name] for name in group["params"]], NAMES: list(group["params"])}
        for group in packed["param_groups"]
    ]
    groups[0][REST] = buffer.getvalue()
    return {"state": state, "param_groups": groups}


def read_portable(given: Mapping[str, Any]) -> dict[str, Any]:
    """The saved state by name, from one by positions or by the names that torch's checkpoints give parameters."""
    groups = given["param_groups"]
    carried = next(group[REST] for group in groups if REST in group)
    saved: dict[str, Any] = torch.load(io.BytesIO(carried), weights_only=True)
    names = list(saved["shapes"])
    listed = [key for group in groups for key in group["params"]]

    def find(key: Any) -> Any:
        if isinstance(key, int):
            return names[key]
        return key if key in saved["shapes"] or len(listed) != len(names) else names[listed.index(key)]

    state = {name: dict(row) for name, row in saved["state"].items()}
    for key, row in given["state"].items():
        state.setdefault(find(key), {}).update((field, value) for field, value in row.items() if field != REST)
    sent = saved.pop(SENT, {})
    lost = [f"{name}: {field}" for name, row in sent.items() for field in row if field not in state.get(name, {})]
    if lost:
        raise ValueError(f"the state has no tensor for {', '.join(lost[:5])}; make a step before it is loaded")
    kept = [{key: value for key, value in group.items() if key not in (REST, NAMES)} for group in groups]
    read = [{**group, "params": [find(key) for key in group["params"]]} for group in kept]
    return {**saved, "state": state, "param_groups": read}


# ---------------------------------------------------------------------- of an optimizer of torch


# For each optimizer: settings by which its groups are recognised, and the links that keep entries of its state, with the names
# that these have there.
_ALGORITHMS: dict[str, tuple[set[str], dict[str, dict[str, str]]]] = {
    "Adam": (
        {"betas", "amsgrad"},
        {"Adam": {key: key for key in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")}},
    ),
    "SGD": ({"dampening", "nesterov"}, {key: {"momentum_buffer": "exp_avg"} for key in ("HeavyBall", "NAG")}),
    "Adagrad": ({"lr_decay", "initial_accumulator_value"}, {"Adagrad": {"step": "step", "sum": "accumulator"}}),
    "RMSprop": (
        {"alpha", "centered"},
        {
            "RMSprop": {"step": "step", "square_avg": "exp_avg_sq", "grad_avg": "exp_avg"},
            "HeavyBall": {"momentum_buffer": "exp_avg"},
        },
    ),
}
# Settings that have another name here.
_RENAMED = {"alpha": "smoothing"}


def read_torch(optimizer: Optimizer, given: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """The saved state as this chain would have saved it; without what it has no place for, where that is asked for."""
    saved = given["param_groups"]
    found = next((name for name, (keys, _) in _ALGORITHMS.items() if all(keys <= set(group) for group in saved)), None)
    if found is None:
        raise ValueError(
            f"neither the state of a moduli Optimizer nor of torch's {', '.join(_ALGORITHMS)} (flatten_optimizer_state_dict?)"
        )
    kinds = _ALGORITHMS[found][1]
    others = {kind for _, own in _ALGORITHMS.values() for kind in own} - set(kinds)
    other = next((path for path, link in optimizer._links if type(link).__name__ in others), None)
    if other is not None:
        raise ValueError(f"the state is that of torch's {found}, which has no {other}")
    packed = optimizer.named_state_dict()
    order = [key for group in saved for key in group["params"]]
    if len(order) != len(packed["shapes"]):
        raise ValueError(f"the saved state is of {len(order)} parameters, here are {len(packed['shapes'])}")
    names = dict(zip(order, packed["shapes"], strict=True))
    packed.update(state={}, dtypes={}, current_step=0, should_terminate=False, reasons=[], rehearsed=False)
    for key, row in given["state"].items():
        name = names[key]
        into = packed["state"].setdefault(name, {})
        for field, value in row.items():
            keepers = [kind for kind, own in kinds.items() if field in own]
            takers = [(path, type(link).__name__) for path, link in optimizer._links if type(link).__name__ in keepers]
            if value is None or (field == "step" and not keepers):
                continue
            if len(takers) != 1 and (takers or strict):
                what = " or ".join(keepers) or "no link"
                raise ValueError(f"the state has what {what} keeps here, but the chain has {len(takers)} of those")
            for path, kind in takers:
                if field == "step":
                    value = int(value)
                    packed["current_step"] = max(packed["current_step"], value)
                else:
                    packed["dtypes"][name], packed["shapes"][name] = str(value.dtype), tuple(value.shape)
                    into.setdefault(f"{path}/step", 1)
                into[f"{path}/{kinds[kind][field]}"] = value
    if strict:
        _check_groups(optimizer, found, saved)
    known = {key for _, link in optimizer._links for key in (*link.defaults, *link.aliases, "initial_lr")}
    packed["param_groups"] = []
    for group in saved:
        options = {_RENAMED.get(key, key): value for key, value in group.items()}
        kept = {key: value for key, value in options.items() if key in known}
        packed["param_groups"].append({**kept, "params": [names[key] for key in group["params"]]})
    packed["links"] = {path: {**kept, "global": {}} for path, kept in packed["links"].items()}
    return {**packed, "num_evaluations": packed["current_step"]}


def _check_groups(optimizer: Optimizer, found: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse another direction, and weight decay that acts elsewhere."""
    kinds, chain = _ALGORITHMS[found][1], [type(link).__name__ for _, link in optimizer._links]
    own = next((i for i, kind in enumerate(chain) if kind in kinds), None)
    decays = [i for i, (_, link) in enumerate(optimizer._links) if "weight_decay" in link.defaults]
    for group in groups:
        if bool(group.get("maximize")) != optimizer.maximize:
            raise ValueError(
                f"the state is that of torch's {found} with maximize={not optimizer.maximize}, unlike this one"
            )
        decoupled = bool(group.get("decoupled_weight_decay"))
        fits = any(own is None or (place > own) is decoupled or place == own for place in decays)
        if group.get("weight_decay") and not fits:
            raise ValueError(
                f"the state is that of torch's {found} with weight_decay={group['weight_decay']}, which is WeightDecay "
                f"{'after' if decoupled else 'before'} {' or '.join(kinds)} here; the chain is {', '.join(chain)}"
            )
