"""The state in other shapes than ours: by position, as tools of torch take it apart, and that of torch's own optimizers.

`torch.distributed.checkpoint` and FSDP1 keep of an optimizer's state what is under "state" by position of the parameter, and
the settings of groups. Tensors with the shape of their parameter are there, so that they are resharded like it; everything
else that links keep is in one entry of the first group, as bytes.

Checkpoints are read into the tensors that an optimizer has. One that has none yet is stepped by torch, with gradients of
zeros: `rehearse` sees to it that nothing moves. Chains that evaluate a closure can't be stepped so: all that they keep is bytes.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import make_whole, map_tensors
from ._processes import is_called_from
from ._shard_state import join_rows
from ._state import encode

if TYPE_CHECKING:
    from .optimizer import Optimizer


REST = "moduli"
SENT = "sent"  # which tensors torch's tools were given, by parameter
NAMES = "param_names"
_TOOL = "torch.distributed.checkpoint.state_dict"


def wants_portable(optimizer: Optimizer) -> bool:
    """Whether tools of torch may ask: there are processes, or its checkpoints were imported."""
    if optimizer.population is not None:
        return False
    distributed = torch.distributed
    return _TOOL in sys.modules or (distributed.is_available() and distributed.is_initialized())


def is_rehearsal() -> bool:
    """Whether torch's checkpoints make a step with gradients of zeros, so that an optimizer has state."""
    return is_called_from(_TOOL)


def rehearse(optimizer: Optimizer, step: Callable[[], object]) -> None:
    """Make the state of a first step without moving anything; the first real step begins anew."""
    if optimizer._evaluated or optimizer.differentiable or optimizer.current_step:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [param.detach().clone() for param in params]
    try:
        step()
    finally:
        with torch.no_grad():
            for param, value in zip(params, before, strict=True):
                param.copy_(value)
        optimizer.current_step = optimizer.num_evaluations = 0
    optimizer.rehearsed = True


def make_portable(optimizer: Optimizer, packed: Mapping[str, Any]) -> dict[str, Any]:
    """The saved state by positions."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
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


def refuse_flattened(given: Mapping[str, Any]) -> None:
    """Refuse what `flatten_optimizer_state_dict` leaves of a state: tensors without the rest that links keep.

    Raises:
        ValueError: With what to do instead.
    """
    named = any(NAMES in group and "maximize" not in group for group in given["param_groups"])  # torch's have both
    if named or any("/" in str(key) for row in given["state"].values() for key in row):
        raise ValueError(
            "the state was flattened (StateDictOptions(flatten_optimizer_state_dict=True)), which keeps settings of groups and "
            "drops what links keep beside the tensors of parameters; save and load it without that option"
        )


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
            f"the state has no tensor for {', '.join(lost[:5])}, which was saved: torch.distributed.checkpoint loads into the "
            "tensors that an optimizer has. Make one step before, so that this one has them"
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
_ALGORITHMS: dict[str, tuple[frozenset[str], dict[str, tuple[tuple[str, ...], str]]]] = {
    "Adam": (
        frozenset({"betas", "amsgrad"}),
        {key: (("Adam",), key) for key in ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")},
    ),
    "SGD": (frozenset({"dampening", "nesterov"}), {"momentum_buffer": (("HeavyBall", "NAG"), "exp_avg")}),
    "Adagrad": (
        frozenset({"lr_decay", "initial_accumulator_value"}),
        {"step": (("Adagrad",), "step"), "sum": (("Adagrad",), "accumulator")},
    ),
    "RMSprop": (
        frozenset({"alpha", "centered"}),
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
    found = next(
        (name for name, (keys, _) in _ALGORITHMS.items() if all(keys <= set(group) for group in given["param_groups"])),
        None,
    )
    if found is None:
        keys = ", ".join(map(str, given["param_groups"][0])) if given["param_groups"] else "no groups"
        raise ValueError(
            f"this is neither the state of a moduli Optimizer nor that of torch's {', '.join(_ALGORITHMS)} (its groups have "
            f"{keys})"
        )
    expected = {kind for kinds, _ in _ALGORITHMS[found][1].values() for kind in kinds}
    others = {kind for _, entries in _ALGORITHMS.values() for kinds, _ in entries.values() for kind in kinds} - expected
    other = next((path for path, link in optimizer._links if type(link).__name__ in others), None)
    if other is not None:
        raise ValueError(
            f"the state is that of torch's {found}, which has no {other}; build the same algorithm of links"
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    order = [key for group in given["param_groups"] for key in group["params"]]
    if len(order) != len(params):
        raise ValueError(f"the saved state is of {len(order)} parameters, here are {len(params)}")
    entries = _ALGORITHMS[found][1]
    names = {key: optimizer.binding.names[param] for key, param in zip(order, params, strict=True)}
    shapes = {optimizer.binding.names[param]: tuple(param.shape) for param in params}
    state: dict[str, dict[str, Any]] = {}
    dtypes: dict[str, str] = {}
    steps = 0
    for key, row in given["state"].items():
        into = state.setdefault(names[key], {})
        for field, value in row.items():
            if value is None or (field == "step" and "step" not in entries):
                continue
            if field not in entries:
                raise ValueError(f"torch's {found} keeps {field!r}, which no link here knows")
            kinds, own = entries[field]
            path = _find_link(optimizer, found, kinds, strict)
            if path is None:
                continue
            if field == "step":
                steps = max(steps, int(value))
                value = int(value)
            elif isinstance(value, Tensor):
                dtypes[names[key]], shapes[names[key]] = str(value.dtype), tuple(value.shape)
                into.setdefault(f"{path}/step", 1)
            into[f"{path}/{own}"] = value
    for group in given["param_groups"] if strict else ():
        _check_group(optimizer, found, group)
    known = {key for _, link in optimizer._links for key in (*link.defaults, *link.aliases)}
    groups = []
    for group in given["param_groups"]:
        options = {_RENAMED.get(key, key): value for key, value in group.items() if key != "params"}
        kept = {key: value for key, value in options.items() if key in known or key == "initial_lr"}
        groups.append({**kept, "params": [names[key] for key in group["params"]]})
    return {
        "format": 1,
        "state": state,
        "param_groups": groups,
        "links": {path: {"global": {}, "extra": encode(link._extra_pack(), path)} for path, link in optimizer._links},
        "shapes": shapes,
        "dtypes": dtypes,
        "order": [optimizer.binding.names[param] for param in params if param.requires_grad],
        "current_step": steps,
        "num_evaluations": steps,
        "should_terminate": False,
        "reasons": [],
        "members": optimizer.binding.members,
        "made_with": {"torch": str(torch.__version__)},
    }


def _check_group(optimizer: Optimizer, found: str, group: Mapping[str, Any]) -> None:
    """Refuse settings of torch's optimizer that say what is no setting of a link here: the direction, and where decay acts."""
    if bool(group.get("maximize")) != optimizer.maximize:
        raise ValueError(
            f"the state is that of torch's {found} with maximize={bool(group.get('maximize'))}, and this optimizer has "
            f"maximize={optimizer.maximize}; say the same"
        )
    if not group.get("weight_decay"):
        return
    kinds = {kind for named, _ in _ALGORITHMS[found][1].values() for kind in named}
    own = next((i for i, (_, link) in enumerate(optimizer._links) if type(link).__name__ in kinds), None)
    decays = [i for i, (_, link) in enumerate(optimizer._links) if "weight_decay" in link.defaults]
    decoupled = bool(group.get("decoupled_weight_decay"))
    if not any(own is None or (place > own) is decoupled or place == own for place in decays):
        where = "after" if decoupled else "before"
        chain = ", ".join(path for path, _ in optimizer._links)
        raise ValueError(
            f"the state is that of torch's {found} with weight_decay={group['weight_decay']}, which is WeightDecay {where} "
            f"{' or '.join(sorted(kinds))} here; the chain is {chain}"
        )


def _find_link(optimizer: Optimizer, algorithm: str, kinds: tuple[str, ...], strict: bool) -> str | None:
    found = [path for path, link in optimizer._links if type(link).__name__ in kinds]
    if not found and not strict:
        return None
    if len(found) != 1:
        chain = ", ".join(path for path, _ in optimizer._links)
        raise ValueError(
            f"the state is that of torch's {algorithm}, which {' or '.join(kinds)} keeps here, but the chain has "
            f"{len(found)} of those: {chain}"
        )
    return found[0]
