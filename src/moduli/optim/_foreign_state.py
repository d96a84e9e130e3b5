"""The state in other shapes than ours: by position, as tools of torch take it apart, and that of torch's own optimizers.

`torch.distributed.checkpoint` and FSDP1 keep of an optimizer's state what is under "state" by position of the parameter, and
the settings of groups. Tensors with the shape of their parameter are there, so that they are resharded like it; everything
else that links keep is in one entry of the first group, as bytes.

Checkpoints are read into the tensors that an optimizer has. One that has none yet is stepped by torch, with gradients of
zeros, which moves nothing here. Chains that evaluate a closure can't be stepped so: all that they keep is bytes.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import make_whole, map_tensors
from ._plain_state import encode
from ._shards import join_rows

if TYPE_CHECKING:
    from .optimizer import Optimizer


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
    names = [optimizer.binding.names[param] for param in params]
    positions = {name: i for i, name in enumerate(names)}
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


def is_portable(given: Mapping[str, Any]) -> bool:
    """Whether a saved state has this shape."""
    return any(REST in group for group in given.get("param_groups", ()))


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
        raise ValueError(
            f"the state has no tensor for {', '.join(lost[:5])}: checkpoints load into what an optimizer has; make a step before"
        )
    kept = [{key: value for key, value in group.items() if key not in (REST, NAMES)} for group in groups]
    return {
        **saved,
        "state": state,
        "param_groups": [{**group, "params": [find(key) for key in group["params"]]} for group in kept],
    }


# ---------------------------------------------------------------------- of an optimizer of torch


# For each optimizer: settings by which its groups are recognised, and for each entry of its state the links that keep it,
# with the name it has there.
_ALGORITHMS: dict[str, tuple[set[str], dict[str, tuple[tuple[str, ...], str]]]] = {
    "Adam": (
        {"betas", "amsgrad"},
        {key: (("Adam",), key) for key in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")},
    ),
    "SGD": ({"dampening", "nesterov"}, {"momentum_buffer": (("HeavyBall", "NAG"), "exp_avg")}),
    "Adagrad": (
        {"lr_decay", "initial_accumulator_value"},
        {"step": (("Adagrad",), "step"), "sum": (("Adagrad",), "accumulator")},
    ),
    "RMSprop": (
        {"alpha", "centered"},
        {
            "step": (("RMSprop",), "step"),
            "square_avg": (("RMSprop",), "exp_avg_sq"),
            "grad_avg": (("RMSprop",), "exp_avg"),
            "momentum_buffer": (("HeavyBall",), "exp_avg"),
        },
    ),
}
# Settings that have another name here.
_RENAMED = {"alpha": "smoothing"}


def is_of_torch(given: Mapping[str, Any]) -> bool:
    """Whether a state dict is one of an optimizer of torch."""
    return "format" not in given and {"state", "param_groups"} <= set(given)


def read_torch(optimizer: Optimizer, given: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """The saved state as this chain would have saved it; without what it has no place for, where that is asked for."""
    saved = given["param_groups"]
    found = next((name for name, (keys, _) in _ALGORITHMS.items() if all(keys <= set(group) for group in saved)), None)
    if found is None:
        raise ValueError(
            f"this is neither the state of a moduli Optimizer nor that of torch's {', '.join(_ALGORITHMS)} (its groups have "
            f"{', '.join(map(str, saved[0]))}); flatten_optimizer_state_dict drops what links keep"
        )
    entries = _ALGORITHMS[found][1]
    named = {name: {kind for kinds, _ in own.values() for kind in kinds} for name, (_, own) in _ALGORITHMS.items()}
    others = set().union(*named.values()) - named[found]
    other = next((path for path, link in optimizer._links if type(link).__name__ in others), None)
    if other is not None:
        raise ValueError(
            f"the state is that of torch's {found}, which has no {other}; build the same algorithm of links"
        )
    packed = optimizer.named_state_dict()
    order = [key for group in saved for key in group["params"]]
    if len(order) != len(packed["shapes"]):
        raise ValueError(f"the saved state is of {len(order)} parameters, here are {len(packed['shapes'])}")
    names = dict(zip(order, packed["shapes"], strict=True))
    state: dict[str, dict[str, Any]] = {}
    shapes, dtypes, steps = packed["shapes"], {}, 0
    for key, row in given["state"].items():
        name = names[key]
        into = state.setdefault(name, {})
        for field, value in row.items():
            if value is None or (field == "step" and "step" not in entries):
                continue
            if field not in entries:
                raise ValueError(f"torch's {found} keeps {field!r}, which no link here knows")
            kinds, own = entries[field]
            paths = [path for path, link in optimizer._links if type(link).__name__ in kinds]
            if len(paths) != 1 and (paths or strict):
                raise ValueError(
                    f"the state is that of torch's {found}, which {' or '.join(kinds)} keeps here, but the chain has "
                    f"{len(paths)} of those: {', '.join(packed['links'])}"
                )
            for path in paths:
                if field == "step":
                    value = int(value)
                    steps = max(steps, value)
                else:
                    dtypes[name], shapes[name] = str(value.dtype), tuple(value.shape)
                    into.setdefault(f"{path}/step", 1)
                into[f"{path}/{own}"] = value
    if strict:
        _check_groups(optimizer, found, named[found], saved)
    known = {key for _, link in optimizer._links for key in (*link.defaults, *link.aliases, "initial_lr")}
    groups = []
    for group in saved:
        options = {_RENAMED.get(key, key): value for key, value in group.items()}
        kept = {key: value for key, value in options.items() if key in known}
        groups.append({**kept, "params": [names[key] for key in group["params"]]})
    links = {path: {"global": {}, "extra": encode(link._extra_pack(), path)} for path, link in optimizer._links}
    read = {"state": state, "param_groups": groups, "links": links, "shapes": shapes, "dtypes": dtypes}
    return {**packed, **read, "current_step": steps, "num_evaluations": steps, "should_terminate": False, "reasons": []}


def _check_groups(optimizer: Optimizer, found: str, kinds: set[str], groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse another direction, and weight decay that acts elsewhere."""
    chain = [type(link).__name__ for _, link in optimizer._links]
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
                f"{'after' if decoupled else 'before'} {' or '.join(sorted(kinds))} here; the chain is {', '.join(chain)}"
            )
