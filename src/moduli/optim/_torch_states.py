"""State dicts of torch's own optimizers: read into the state of a chain with the same algorithm, and written from one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .module import Module
    from .optimizer import Optimizer


@dataclasses.dataclass(frozen=True)
class _Algorithm:
    """The correspondence between one of torch's optimizers and links.

    Attributes:
        has: The settings by which its groups are recognised.
        lacks: Settings of other optimizers by which groups are recognised as not its own.
        links: The links that store entries of its state, with the names of these entries in the link.
        settings: Its settings that have another name here, or become several.
        beside: Other links that a chain may have: none of their state is in that of the optimizer.
        marks: The links by which a chain is recognised; by default those that store state.
    """

    has: frozenset[str]
    links: Mapping[str, Mapping[str, str]]
    lacks: frozenset[str] = frozenset()
    settings: Mapping[str, str | tuple[str, str]] = dataclasses.field(default_factory=dict)
    beside: frozenset[str] = frozenset()
    marks: frozenset[str] = frozenset()


def _entries(*names: str) -> dict[str, str]:
    """Return names of entries that are the same in the link."""
    return {name: name for name in names}


_BETAS: dict[str, str | tuple[str, str]] = {"betas": ("beta1", "beta2")}
_MOMENTUM = {"momentum_buffer": "exp_avg"}
# In the order in which chains are recognised.
_ALGORITHMS: dict[str, _Algorithm] = {
    "Muon": _Algorithm(
        frozenset({"ns_coefficients", "ns_steps"}),
        {"NAG": _MOMENTUM},
        settings={"ns_steps": "steps"},
        beside=frozenset({"Orthogonalize", "Split", "Adam"}),
        marks=frozenset({"NAG", "Orthogonalize"}),
    ),
    "Adam": _Algorithm(
        frozenset({"betas", "amsgrad"}),
        {"Adam": _entries("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")},
        settings=_BETAS,
    ),
    "NAdam": _Algorithm(
        frozenset({"momentum_decay"}),
        {"NAdam": _entries("step", "mu_product", "exp_avg", "exp_avg_sq")},
        settings=_BETAS,
    ),
    "RAdam": _Algorithm(
        frozenset({"betas", "decoupled_weight_decay"}),
        {"RAdam": _entries("step", "exp_avg", "exp_avg_sq")},
        frozenset({"amsgrad", "momentum_decay"}),
        _BETAS,
    ),
    "Adamax": _Algorithm(
        # Groups of chains may have betas and nothing else; those of torch also say how it runs.
        frozenset({"betas", "foreach", "differentiable"}),
        {"Adamax": _entries("step", "exp_avg", "exp_inf")},
        frozenset({"amsgrad", "momentum_decay", "decoupled_weight_decay"}),
        _BETAS,
    ),
    "Adadelta": _Algorithm(frozenset({"rho"}), {"Adadelta": _entries("step", "square_avg", "acc_delta")}),
    "Rprop": _Algorithm(
        frozenset({"etas", "step_sizes"}),
        {"Rprop": {"step": "step", "prev": "previous", "step_size": "size"}},
        settings={"etas": ("nminus", "nplus"), "step_sizes": ("lb", "ub"), "lr": "alpha"},
    ),
    "RMSprop": _Algorithm(
        frozenset({"alpha", "centered"}),
        {"RMSprop": {"step": "step", "square_avg": "exp_avg_sq", "grad_avg": "exp_avg"}, "HeavyBall": _MOMENTUM},
        settings={"alpha": "smoothing"},
        marks=frozenset({"RMSprop"}),
    ),
    "Adagrad": _Algorithm(
        frozenset({"lr_decay", "initial_accumulator_value"}), {"Adagrad": {"step": "step", "sum": "accumulator"}}
    ),
    "SGD": _Algorithm(
        frozenset({"dampening", "nesterov"}), {"HeavyBall": _MOMENTUM, "NAG": _MOMENTUM}, marks=frozenset({"LR"})
    ),
}


def read_torch(
    optimizer: Optimizer, frame: Mapping[str, Any], given: Mapping[str, Any], strict: bool
) -> dict[str, Any]:
    """Return the state as this chain would have saved it.

    Args:
        optimizer: The optimizer that loads it.
        frame: The saved form of this optimizer, without state.
        given: The state dict of torch's optimizer.
        strict: Whether an entry or a setting without a counterpart here raises ValueError; otherwise it is left out.
    """
    groups = given["param_groups"]
    algorithm = _recognise(optimizer, groups)
    order = [key for group in groups for key in group["params"]]
    if len(order) != len(frame["shapes"]):
        raise ValueError(f"the saved state is of {len(order)} parameters, here are {len(frame['shapes'])}")
    names = dict(zip(order, frame["shapes"], strict=True))
    packed = {**frame, "shapes": dict(frame["shapes"]), "dtypes": {}, "state": {}}
    packed.update(current_step=0, should_terminate=False, reasons=[], rehearsed=False)
    mapping = _ALGORITHMS[algorithm]
    entries = [(names[key], *entry) for key, row in given["state"].items() for entry in row.items()]
    for name, field, value in entries:
        if value is not None:
            for path, key in _find_takers(optimizer, mapping, field, strict):
                _add_entry(packed, name, field, value, path, key)
    if strict:
        _check_groups(optimizer, algorithm, groups)
    settings = {key for _, link in optimizer._links for key in (*link.defaults, *link.aliases, "initial_lr")}
    packed["param_groups"] = []
    for group in groups:
        options = {key: value for key, value in _rename(mapping, group).items() if key in settings}
        packed["param_groups"].append({**options, "params": [names[key] for key in group["params"]]})
    return {**packed, "num_evaluations": packed["current_step"]}


def _find_takers(optimizer: Optimizer, algorithm: _Algorithm, field: str, strict: bool) -> list[tuple[str, str]]:
    """Return the paths of the links that store an entry of torch's state, with its name there.

    Args:
        optimizer: The optimizer.
        algorithm: The algorithm of torch's optimizer.
        field: The name of the entry.
        strict: Whether an entry that no link stores raises ValueError.
    """
    keepers = {kind: own[field] for kind, own in algorithm.links.items() if field in own}
    kinds = [(path, type(link).__name__) for path, link in optimizer._links]
    takers = [(path, keepers[kind]) for path, kind in kinds if kind in keepers]
    if field == "step" and not keepers:
        return []
    if len(takers) != 1 and (takers or strict):
        what = " or ".join(keepers) or "no link"
        raise ValueError(f"the state has what {what} keeps here, but the chain has {len(takers)} of those")
    return takers


def _rename(algorithm: _Algorithm, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group of torch's optimizer under the names that they have here."""
    options: dict[str, Any] = {}
    for key, value in group.items():
        names = algorithm.settings.get(key, key)
        if isinstance(names, str) or key == "betas":
            options[key if key == "betas" else str(names)] = value
        else:
            options |= zip(names, value, strict=True)
    return options


def _recognise(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of torch's optimizer with such groups; raise ValueError if the chain has links of another one."""

    def fits(algorithm: _Algorithm) -> bool:
        return all(algorithm.has <= set(group) and not algorithm.lacks & set(group) for group in groups)

    name = next((name for name, algorithm in _ALGORITHMS.items() if fits(algorithm)), None)
    if name is None:
        raise ValueError(
            f"neither the state of a moduli Optimizer nor of torch's {', '.join(_ALGORITHMS)} (flatten_optimizer_state_dict?)"
        )
    own = _ALGORITHMS[name]
    others = {kind for algorithm in _ALGORITHMS.values() for kind in algorithm.links} - set(own.links) - own.beside
    other = next((path for path, link in optimizer._links if type(link).__name__ in others), None)
    if other is not None:
        raise ValueError(f"the state is that of torch's {name}, which has no {other}")
    waits = [link for _, link in optimizer._links if name == "Rprop" and link.defaults.get("backtrack")]
    if waits:
        raise ValueError(
            "torch's Rprop waits where a sign flips, and this one takes the step back: Rprop(backtrack=False)"
        )
    return name


def _add_entry(packed: dict[str, Any], name: str, field: str, value: Any, path: str, key: str) -> None:
    """Add an entry of torch's state to a saved state.

    Args:
        packed: The saved state.
        name: The name of the parameter.
        field: The name of torch's entry.
        value: Its value.
        path: The path of the link that stores it.
        key: The name of the entry in the link.
    """
    row = packed["state"].setdefault(name, {})
    if field == "step":
        value = int(value)
        packed["current_step"] = max(packed["current_step"], value)
    elif isinstance(value, Tensor) and value.dim() == 0 and field == "mu_product":
        value = value.item()
    else:
        packed["dtypes"][name], packed["shapes"][name] = str(value.dtype), tuple(value.shape)
        row.setdefault(f"{path}/step", 1)
    row[f"{path}/{key}"] = value


def _check_groups(optimizer: Optimizer, algorithm: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if `maximize` or the kind of weight decay differs from torch's state."""
    kinds, chain = _ALGORITHMS[algorithm].links, [type(link).__name__ for _, link in optimizer._links]
    own = next((i for i, kind in enumerate(chain) if kind in kinds), None)
    decays = [i for i, (_, link) in enumerate(optimizer._links) if "weight_decay" in link.defaults]
    for group in groups:
        if bool(group.get("maximize")) != optimizer.maximize:
            raise ValueError(
                f"the state is that of torch's {algorithm} with maximize={not optimizer.maximize}, unlike this one"
            )
        decoupled = bool(group.get("decoupled_weight_decay")) or algorithm == "Muon"
        fits = any(own is None or (place > own) is decoupled or place == own for place in decays)
        if group.get("weight_decay") and not fits:
            raise ValueError(
                f"the state is that of torch's {algorithm} with weight_decay={group['weight_decay']}, which is WeightDecay "
                f"{'after' if decoupled else 'before'} {' or '.join(kinds)} here; the chain is {', '.join(chain)}"
            )


# ---------------------------------------------------------------------- to torch


def write_torch(optimizer: Optimizer, strict: bool) -> dict[str, Any]:
    """Return the state of a chain as the state dict of torch's optimizer with the same algorithm.

    Args:
        optimizer: The optimizer.
        strict: Whether links that torch's optimizer does not have are an error.

    Raises:
        ValueError: The chain is none of torch's optimizers.
    """
    links = dict(optimizer._links)
    kinds = {type(link).__name__ for link in links.values()}
    name = _recognise_chain(optimizer, kinds)
    algorithm = _ALGORITHMS[name]
    extra = kinds - set(algorithm.links) - algorithm.beside - {"WeightDecay", "LR", "Chain"}
    if extra and strict:
        raise ValueError(f"torch's {name} has no {', '.join(sorted(extra))}; strict=False leaves out what it does")
    keepers = [link for link in links.values() if type(link).__name__ in algorithm.links]
    order = {param: i for i, param in enumerate(optimizer.list_params())}
    state = {i: row for param, i in order.items() if (row := _write_row(algorithm, keepers, param))}
    if name == "Muon" and len(state) < len(order) and optimizer.current_step:
        raise ValueError("torch's Muon takes matrices only, and the chain has other parameters too")
    groups = []
    for group in optimizer.param_groups:
        groups.append({**_write_group(name, optimizer, group), "params": [order[param] for param in group["params"]]})
    return {"state": state, "param_groups": groups}


def _recognise_chain(optimizer: Optimizer, kinds: Set[str]) -> str:
    """Return the name of torch's optimizer with links of these classes; raise ValueError if there is none."""
    name = next((name for name, each in _ALGORITHMS.items() if (each.marks or set(each.links)) <= kinds), None)
    if name is None or optimizer.population is not None:
        raise ValueError(
            f"the chain {', '.join(type(link).__name__ for link in optimizer.modules)} is none of torch's optimizers: "
            f"{', '.join(_ALGORITHMS)}, for one model"
        )
    return name


def _write_row(algorithm: _Algorithm, keepers: Sequence[Module], param: Tensor) -> dict[str, Any]:
    """Return torch's state for a parameter, from the links that store it."""
    row: dict[str, Any] = {}
    for link in keepers:
        stored = link.state.get(param, {})
        for name, key in algorithm.links[type(link).__name__].items():
            value = stored.get(key)
            if isinstance(value, int | float):
                row[name] = torch.tensor(float(value), dtype=torch.float32)
            elif isinstance(value, Tensor):
                row[name] = value.clone()
    if row and "step" not in row and any("step" in names for names in algorithm.links.values()):
        row["step"] = torch.tensor(0.0)
    return row


def _translate(settings: Mapping[str, Any], algorithm: _Algorithm, keys: Iterable[str]) -> dict[str, Any]:
    """Return settings under the names of torch's optimizer; those that the chain lacks are left out.

    Args:
        settings: The settings by their names here.
        algorithm: The algorithm of torch's optimizer.
        keys: Its names.
    """
    options: dict[str, Any] = {}
    for key in keys:
        names = algorithm.settings.get(key, key)
        if isinstance(names, str):
            if names in settings:
                options[key] = settings[names]
        elif names[0] in settings:
            options[key] = tuple(settings[each] for each in names)
    return options


def _write_group(name: str, optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group under torch's names, with torch's defaults for settings that the chain lacks."""
    kind: Any = getattr(torch.optim, name)
    options: dict[str, Any] = dict(kind([torch.zeros(1, 1)], lr=1e-3).param_groups[0])
    algorithm, chain = _ALGORITHMS[name], [link for _, link in optimizer._links]
    settings: dict[str, Any] = {}
    for link in chain:
        if group["params"] and (type(link).__name__ != "Adam" or name == "Adam"):
            settings |= link.settings[group["params"][0]]
    options |= _translate(settings, algorithm, options)
    kinds = [type(link).__name__ for link in chain]
    own = next((i for i, each in enumerate(kinds) if each in algorithm.links), -1)
    decays = [i for i, each in enumerate(kinds) if each == "WeightDecay"]
    options["weight_decay"] = settings["weight_decay"] if decays else 0.0
    if "decoupled_weight_decay" in options:
        options["decoupled_weight_decay"] = any(i > own for i in decays)
    if name == "SGD":
        options["nesterov"] = "NAG" in kinds
    options["maximize"] = optimizer.maximize
    del options["params"]
    if "initial_lr" in group:
        options["initial_lr"] = group["initial_lr"]
    return options
