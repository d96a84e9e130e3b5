"""State dicts of torch's own optimizers, as a chain with the same algorithm would have saved its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .optimizer import Optimizer

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


def read_torch(
    optimizer: Optimizer, frame: Mapping[str, Any], given: Mapping[str, Any], strict: bool
) -> dict[str, Any]:
    """Return the state as this chain would have saved it; without strict, without what it has no place for.

    Args:
        optimizer: The optimizer that loads it.
        frame: What this optimizer saves, without state.
        given: The state dict of torch's optimizer.
        strict: Whether everything must have a place.
    """
    saved = given["param_groups"]
    algorithm = _recognise(optimizer, saved)
    order = [key for group in saved for key in group["params"]]
    if len(order) != len(frame["shapes"]):
        raise ValueError(f"the saved state is of {len(order)} parameters, here are {len(frame['shapes'])}")
    names = dict(zip(order, frame["shapes"], strict=True))
    packed = {**frame, "shapes": dict(frame["shapes"]), "dtypes": {}, "state": {}}
    packed.update(current_step=0, should_terminate=False, reasons=[], rehearsed=False)
    kinds = _ALGORITHMS[algorithm][1]
    entries = [(names[key], *entry) for key, row in given["state"].items() for entry in row.items()]
    for name, field, value in entries:
        keepers = [kind for kind, own in kinds.items() if field in own]
        takers = [(path, type(link).__name__) for path, link in optimizer._links if type(link).__name__ in keepers]
        if value is None or (field == "step" and not keepers):
            continue
        if len(takers) != 1 and (takers or strict):
            what = " or ".join(keepers) or "no link"
            raise ValueError(f"the state has what {what} keeps here, but the chain has {len(takers)} of those")
        for path, kind in takers:
            _add_entry(packed, name, field, value, path, kinds[kind][field])
    if strict:
        _check_groups(optimizer, algorithm, saved)
    settings = {key for _, link in optimizer._links for key in (*link.defaults, *link.aliases, "initial_lr")}
    packed["param_groups"] = []
    for group in saved:
        options = {_RENAMED.get(key, key): value for key, value in group.items()}
        options = {key: value for key, value in options.items() if key in settings}
        packed["param_groups"].append({**options, "params": [names[key] for key in group["params"]]})
    return {**packed, "num_evaluations": packed["current_step"]}


def _recognise(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of torch's optimizer with such groups; raise ValueError if the chain has links of another one."""
    algorithm = next((name for name, (keys, _) in _ALGORITHMS.items() if all(keys <= set(g) for g in groups)), None)
    if algorithm is None:
        raise ValueError(
            f"neither the state of a moduli Optimizer nor of torch's {', '.join(_ALGORITHMS)} (flatten_optimizer_state_dict?)"
        )
    others = {kind for _, own in _ALGORITHMS.values() for kind in own} - set(_ALGORITHMS[algorithm][1])
    other = next((path for path, link in optimizer._links if type(link).__name__ in others), None)
    if other is not None:
        raise ValueError(f"the state is that of torch's {algorithm}, which has no {other}")
    return algorithm


def _add_entry(packed: dict[str, Any], name: str, field: str, value: Any, path: str, key: str) -> None:
    """Add what torch has for one parameter under `field` to the state of the link at `path`."""
    row = packed["state"].setdefault(name, {})
    if field == "step":
        value = int(value)
        packed["current_step"] = max(packed["current_step"], value)
    else:
        packed["dtypes"][name], packed["shapes"][name] = str(value.dtype), tuple(value.shape)
        row.setdefault(f"{path}/step", 1)
    row[f"{path}/{key}"] = value


def _check_groups(optimizer: Optimizer, found: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if `maximize` or the kind of weight decay differs from torch's state."""
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
