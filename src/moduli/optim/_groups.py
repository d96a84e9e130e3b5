"""The optimizer's parameter groups: their parameters, the settings they may have, and the link that each setting is for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import is_expanded, unwrapped_name
from ..layout import select as select_names
from ._link_type import as_schedule, suggest
from ._settings import check_values, is_per_member
from ._vectors import resolve_lazy
from ._writes import CountedSettings
from .offload import check_place

if TYPE_CHECKING:
    from ..population import Population
    from . import Module, Optimizer


# Keys that torch, its schedulers and its averaging helpers write into a group, and those of the optimizer itself.
_RESERVED = {
    "params",
    "param_names",
    "name",
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
    "swa_lr",
    "foreach",
    "fused",
    "offload",
}
# Settings that schedulers read from groups.
_EXPORTED = ("lr", "momentum", "weight_decay")


class ParamGroup(CountedSettings):
    """A parameter group.

    Attributes:
        missing: For settings that a scheduler may read, and that are missing, the text of the error.
    """

    missing: Mapping[str, str] = {}

    def __missing__(self, key: str) -> Any:
        raise KeyError(self.missing.get(key, f"the parameter group has no {key!r}; it has {', '.join(self)}"))


def explain_missing(links: Sequence[Module]) -> dict[str, str]:
    """Return the text of `ParamGroup.missing` for "lr": why there is no learning rate that a scheduler could change."""
    holders = [link for link in links if "lr" in link.defaults]
    names = " and ".join(type(link).__name__ for link in holders or links)
    text = f"no link of {names} has a learning rate 'lr' for a scheduler to change; add one: m.LR(1e-3)"
    if any(callable(link.defaults["lr"]) for link in holders):
        text = f"the lr of {names} is a function of the step already; for a scheduler give it a number, m.LR(1e-3)"
    elif holders:
        text = f"{names} have different learning rates, and a scheduler needs one: multiply by the others with m.Mul"
    return {"lr": text}


def named_parameters(model: torch.nn.Module | Population) -> list[tuple[str, Tensor]]:
    """Return the parameters of a module or population, by their names without wrappers such as DistributedDataParallel."""
    wraps = isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel)
    cut = len("module.") if wraps else 0
    return [(unwrapped_name(name[cut:]), param) for name, param in model.named_parameters()]


def select(named: Sequence[tuple[str, Tensor]], pattern: str) -> list[tuple[str, Tensor]]:
    """Return the parameters whose names match a pattern.

    Raises:
        UnknownNameError: If there are none.
    """
    return [named[index] for index in select_names(pattern, [name for name, _ in named])]


def make_groups(params: Any, patterns: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a group for each set of patterns that match the same parameters.

    If several patterns match a parameter, the settings of later ones have priority. The first group has the parameters that no
    pattern matches, if there are any.

    Args:
        params: (name, parameter) pairs.
        patterns: The settings for the names that match each pattern.
    """
    named = list(params)
    if not all(isinstance(item, tuple) and len(item) == 2 for item in named):
        raise ValueError("groups= goes by the names of parameters, but they have none here; give the module itself")
    for pattern, settings in patterns.items():
        if not isinstance(settings, Mapping) or "params" in settings:
            raise ValueError(f"groups[{pattern!r}] is {settings!r}; give a dictionary of settings, {{'lr': 1e-3}}")
    chosen = {pattern: {name for name, _ in select(named, pattern)} for pattern in patterns}
    groups: dict[tuple[str, ...], list[tuple[str, Tensor]]] = {}
    for name, param in named:
        groups.setdefault(tuple(pattern for pattern in patterns if name in chosen[pattern]), []).append((name, param))
    out: list[dict[str, Any]] = []
    for key in sorted(groups, key=lambda key: [list(patterns).index(pattern) for pattern in key]):
        group: dict[str, Any] = {"params": groups[key], **({"name": name_group(key)} if key else {})}
        for pattern in key:
            group.update(patterns[pattern])
        out.append(group)
    return out


def name_group(patterns: Sequence[str]) -> str | None:
    """Return the name of the group of the parameters that these patterns match; None if there are no patterns."""
    return " & ".join(patterns) if patterns else None


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a group without its parameters."""
    return {key: value for key, value in group.items() if key != "params" and key != "param_names"}


def _address(key: str, link: Module) -> str | None:
    """Return the setting of this link that a key such as "adam.beta1" names; None for other links."""
    name, _, rest = key.rpartition(".")
    return rest if name and name.lower() == type(link).__name__.lower() else None


def overrides(link: Module, group: Mapping[str, Any], exported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group for one link.

    An alias such as "betas" applies only if it differs from the value that the optimizer wrote into the group.

    Args:
        link: The link.
        group: The group.
        exported: The values that the optimizer itself wrote into its groups.
    """
    out: dict[str, Any] = {}
    # Settings addressed to one link are applied after those for all.
    for key in sorted(group, key=lambda key: key not in link.defaults):
        value, name = group[key], key if key in link.defaults else _address(key, link)
        if name in link.defaults:
            default = link.defaults[name]
            out[name] = as_schedule(_scale_members(default, value, exported.get(key)), default)
        elif key in link.aliases and value is not exported.get(key) and value != exported.get(key):
            out.update(link.resolve_aliases({key: value}))
    return out


def _scale_members(own: Any, value: Any, exported: Any) -> Any:
    """Return a group's value for a setting with one number per member: the largest is set to it, the others keep their ratios.

    Args:
        own: The link's default.
        value: The value in the group.
        exported: The largest number, as the optimizer wrote it into the group.
    """
    if not is_per_member(own) or isinstance(value, Tensor) or not isinstance(exported, float | int):
        return value
    if value == exported:
        return own
    return own * (value / exported) if exported and not callable(value) else value


def export_settings(links: Iterable[Module]) -> dict[str, Any]:
    """Return the settings that torch's schedulers expect in every group, if the links agree on them."""
    out: dict[str, Any] = {}
    for key, (first, *others) in _collect_exported(links).items():
        alike = all(other is first or (not isinstance(other, Tensor) and other == first) for other in others)
        if alike and isinstance(first, float | int | tuple | Tensor):
            # For one number per member, the largest.
            out[key] = float(torch.as_tensor(first).max()) if is_per_member(first) else first
    return out


def _collect_exported(links: Iterable[Module]) -> dict[str, list[Any]]:
    """Return the values that links have of settings, and of aliases of several settings, which torch's schedulers expect."""
    values: dict[str, list[Any]] = {}
    for link in links:
        for key in _EXPORTED:
            if key in link.defaults:
                values.setdefault(key, []).append(link.defaults[key])
        for key, names in link.aliases.items():
            if len(names) > 1 and all(name in link.defaults for name in names):
                values.setdefault(key, []).append(tuple(link.defaults[name] for name in names))
    return values


def check_keys(group: Mapping[str, Any], links: Sequence[Module], members: int | None = None) -> None:
    """Raise ValueError for settings that no link has, and for values that are no valid numbers.

    Args:
        group: The group.
        links: The links of the optimizer.
        members: The number of members of a population; None for one model.
    """
    for key, value in group.items():
        if key in _RESERVED:
            continue
        if not is_known(key, links):
            every = sorted({key for link in links for key in (*link.defaults, *link.aliases)})
            hint = f"settings here: {', '.join(every) or 'none'}; 'adam.beta1' is that of one link"
            what = f"a parameter group sets {key!r}, which no link of the chain has{suggest(key, every)}"
            raise ValueError(f"{what} ({hint})")
        owners = [type(link).__name__ for link in links if is_known(key, [link])]
        check_values(f"a parameter group, for {' and '.join(dict.fromkeys(owners))}", {key: value}, members)
        for link in links:
            count = len(link.aliases.get(key, ()))
            if count > 1 and (not isinstance(value, tuple | list) or len(value) != count):
                what = f"for {type(link).__name__} it is {count} numbers, {' and '.join(link.aliases[key])}"
                raise ValueError(f"a parameter group sets {key}={value!r}; {what}")


def is_known(key: str, links: Sequence[Module]) -> bool:
    """Return whether a key may be in a group: a setting of a link, or a reserved entry."""
    if key in _RESERVED:
        return True
    return any(key in link.defaults or key in link.aliases or _address(key, link) in link.defaults for link in links)


def apply_groups(optimizer: Optimizer) -> None:
    """Check the settings in the groups of an optimizer, and pass them to its links.

    Raises:
        ValueError: A group sets what no link has, or gives two values to a link that has one for all parameters.
    """
    links, groups = [link for _, link in optimizer._links], optimizer.param_groups
    settings = [options(group) for group in groups]
    optimizer.binding.offload = {i: own["offload"] for i, own in enumerate(settings) if own.get("offload")}
    for own in settings:
        check_place(own.get("offload"))
        check_keys(own, links, optimizer.binding.members)
    for link in links:
        link.settings.overrides = [overrides(link, own, optimizer._exported) for own in settings]
        link.settings.refresh()
    params = [param for group in groups for param in group["params"]]
    for top in optimizer.modules:
        top.check_shared(params)


def _name_items(items: list[Any], model: torch.nn.Module | None, others: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the parameters of a new group, with names if the parameters of the other groups have names.

    Args:
        items: Parameters, or (name, parameter) pairs.
        model: The module of the optimizer, in which names are looked up.
        others: The groups of the optimizer.

    Raises:
        ValueError: Some parameters would have names, and others none.
    """
    bare = [i for i, item in enumerate(items) if not isinstance(item, tuple)]  # without a name
    named = any("param_names" in other for other in others) or (not others and len(bare) < len(items))
    if not named and len(bare) < len(items):
        what = "the parameters of the optimizer have no names, and those of the new group have"
        raise ValueError(
            f"{what}; give parameters alone, or make the optimizer with the module or with named parameters"
        )
    if not named or not bare:
        return items
    names = {} if model is None else {id(param): name for name, param in named_parameters(model)}
    missing = next((i for i in bare if id(items[i]) not in names), None)
    if missing is not None:
        shape = tuple(items[missing].shape)
        what = f"parameter {missing} of the group (shape {shape}) has no name, and the others have"
        remedy = "give pairs, {'params': [(\"head.weight\", param)]}"
        remedy += ", or assign it to the module before, which names it" * (model is not None)
        raise ValueError(f"{what}; names address the saved state: {remedy}")
    return [item if isinstance(item, tuple) else (names[id(item)], item) for item in items]


def check_tensors(tensors: Sequence[Tensor]) -> None:
    """Raise ValueError for parameters on the meta device, which have no memory."""
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError("parameters are on the meta device; give them memory first: net.to_empty(device='cpu')")


def prepare_group(optimizer: Optimizer, entries: Mapping[str, Any]) -> ParamGroup:
    """Return a group as torch expects it, checked against the links and the other groups."""
    links, others = [link for _, link in optimizer._links], optimizer.param_groups
    group = ParamGroup(entries)
    group.writes = optimizer.binding.writes
    group.missing = explain_missing(links)
    _check_group_settings(group, links, optimizer._exported)
    params = group.get("params", ())
    if isinstance(params, str):
        params = _select_ungrouped(params, optimizer.model, others)
    if isinstance(params, set):
        raise TypeError("parameters are given as a set, which has no order; give a list")
    items = [params] if isinstance(params, Tensor) else list(params)
    tensors: list[Any] = [item[1] if isinstance(item, tuple) and len(item) == 2 else item for item in items]
    _check_params(tensors)
    items = _name_items(items, optimizer.model, others)
    group["params"] = [(unwrapped_name(item[0]), item[1]) if isinstance(item, tuple) else item for item in items]
    names = [item[0] for item in group["params"] if isinstance(item, tuple)]
    _check_memory(tensors, names)
    resolve_lazy(tensors)
    _check_unique([*names, *(name for other in others for name in other.get("param_names", ()))])
    _complete_aliases(group, links, optimizer._exported)
    return group


def _check_group_settings(group: ParamGroup, links: Sequence[Module], exported: Mapping[str, Any]) -> None:
    """Raise ValueError for settings of a group that no link has, or that a link does not accept."""
    check_keys(group, links)
    check_place(group.get("offload"))
    for link in links:
        for key, value in overrides(link, group, exported).items():
            link.check_setting(key, value)


def _select_ungrouped(
    pattern: str, model: torch.nn.Module | Population | None, others: Sequence[Mapping[str, Any]]
) -> list[tuple[str, Tensor]]:
    """Return the named parameters that match a pattern and are in no group yet.

    Args:
        pattern: The pattern.
        model: The module of the optimizer, which has the names.
        others: The groups of the optimizer.

    Raises:
        ValueError: There is no module, or all of these parameters are in groups.
    """
    if model is None:
        raise ValueError(f"the optimizer has to be given the module, to find {pattern!r} in it")
    grouped = {id(param) for other in others for param in other["params"]}
    matching = [(name, param) for name, param in select(named_parameters(model), pattern) if id(param) not in grouped]
    if not matching:
        raise ValueError(f"all parameters called {pattern!r} are in a group already")
    return matching


def _check_params(tensors: Sequence[Any]) -> None:
    """Raise TypeError or ValueError if a group has something other than tensors with memory, each once."""
    if wrong := [type(tensor).__name__ for tensor in tensors if not isinstance(tensor, Tensor)]:
        raise TypeError(f"parameters are tensors, or (name, tensor) pairs; got a {wrong[0]}")
    if len({id(tensor) for tensor in tensors}) != len(tensors):
        raise ValueError("a parameter appears twice in a group; it would be moved twice. Give each once")
    check_tensors(tensors)


def _check_memory(tensors: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise ValueError for trained parameters whose elements share memory; `names` has all names, or fewer."""
    for i, tensor in enumerate(tensors):
        if tensor.requires_grad and is_expanded(tensor):
            which = repr(names[i]) if len(names) == len(tensors) else f"{i} of a group"
            raise ValueError(
                f"parameter {which} is expanded: its elements share memory, so it can't be moved; clone() it"
            )


def _check_unique(names: Sequence[str]) -> None:
    """Raise ValueError if two parameters have the same name."""
    name, count = next(iter(Counter(names).most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(f"two parameters are named {name!r}; names address the saved state, so give each its own")


def _complete_aliases(group: ParamGroup, links: Sequence[Module], exported: Mapping[str, Any]) -> None:
    """Add to a group the aliases of several settings, such as "betas", of which it sets a part."""
    for key, parts in ((key, parts) for link in links for key, parts in link.aliases.items()):
        if key not in group and any(part in group for part in parts) and key in exported:
            group[key] = tuple(group.get(part, old) for part, old in zip(parts, exported[key], strict=True))
