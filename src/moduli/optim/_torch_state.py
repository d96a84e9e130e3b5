"""Loading the state of an optimizer of torch into a chain of the same algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._plain import encode

if TYPE_CHECKING:
    from .optimizer import Optimizer


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
