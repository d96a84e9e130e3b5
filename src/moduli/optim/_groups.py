"""The optimizer's parameter groups: who is in them, what may be in them, and which link each setting is for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._arguments import as_schedule
from ._settings import check_number, is_per_member

if TYPE_CHECKING:
    from .module import Module


# What torch, its schedulers and its averaging helpers write into a group for themselves.
_FOREIGN = {
    "params",
    "param_names",
    "name",
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_momentum",
    "max_momentum",
    "swa_lr",
    "step_size_up",
    "step_size_down",
    "foreach",
    "fused",
}
_SHOWN = ("lr", "momentum", "weight_decay")


# What wrappers of torch put into the names of the parameters that they hold.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class MissingSettingError(KeyError):
    """A group has no such setting; the sentence says why, and what to do."""

    def __str__(self) -> str:
        return str(self.args[0])


class ParamGroup(dict[str, Any]):
    """A parameter group. Where a scheduler looks for a setting that is not there, the error says why."""

    missing: Mapping[str, str] = {}

    def __missing__(self, key: str) -> Any:
        raise MissingSettingError(
            self.missing.get(key, f"the parameter group has no {key!r}; it has {', '.join(self)}")
        )


def explain_missing(links: Sequence[Module]) -> dict[str, str]:
    """Why groups have no learning rate that a scheduler could change."""
    chain = ", ".join(type(link).__name__ for link in links)
    holders = [link for link in links if "lr" in link.defaults]
    values = [link.defaults["lr"] for link in holders]
    names = " and ".join(type(link).__name__ for link in holders)
    if not holders:
        text = f"no link of {chain} has a learning rate 'lr' for a scheduler to change; add one: m.LR(1e-3)"
    elif any(callable(value) for value in values):
        text = (
            f"the lr of {names} is a function of the step already, which a scheduler can't change. Give it a number, "
            "m.LR(1e-3), or use the function without a scheduler"
        )
    else:
        text = (
            f"{names} have different learning rates ({', '.join(map(str, values))}), so a scheduler can't tell which to "
            "change. Keep one m.LR, and multiply by the others with m.Mul"
        )
    return {"lr": text}


def clean_name(name: str) -> str:
    """A parameter's name without what torch.compile, FSDP and checkpointing put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_parameters(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters of a module by the names they have without wrappers around it."""
    wraps = isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel)
    cut = len("module.") if wraps else 0
    return [(clean_name(name[cut:]), param) for name, param in model.named_parameters()]


def select(named: Sequence[tuple[str, Tensor]], pattern: str) -> list[tuple[str, Tensor]]:
    """The parameters whose names match a pattern; there must be some."""
    found = [(name, param) for name, param in named if fnmatchcase(name, pattern)]
    if not found:
        names = [name for name, _ in named]
        near = difflib.get_close_matches(pattern, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"no parameter is called {pattern!r}{hint} (there are {', '.join(names[:20]) or 'none'})")
    return found


def make_groups(params: Any, patterns: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups by name: where several patterns match a parameter, the settings of the later ones win.

    The first group has the parameters that no pattern matches, if there are any.
    """
    named = list(params)
    if not all(isinstance(item, tuple) and len(item) == 2 for item in named):
        raise ValueError(
            "groups= goes by the names of parameters, but they have none here; give the module itself, or "
            "net.named_parameters()"
        )
    matched: dict[str, list[str]] = {name: [] for name, _ in named}
    for pattern, settings in patterns.items():
        if not isinstance(pattern, str):
            raise TypeError(f"groups goes by patterns of names, got {pattern!r}; write {{'*.bias': {{'lr': 1e-3}}}}")
        if isinstance(settings, Mapping) and "params" in settings:
            raise ValueError(
                f"groups[{pattern!r}] has 'params', but the pattern says which they are; give settings only"
            )
        if not isinstance(settings, Mapping):
            raise TypeError(f"groups[{pattern!r}] is {settings!r}; give a dictionary of settings, {{'lr': 1e-3}}")
        for name, _ in select(named, pattern):
            matched[name].append(pattern)
    order = sorted({tuple(found) for found in matched.values()}, key=lambda key: [list(patterns).index(p) for p in key])
    out: list[dict[str, Any]] = []
    for key in order:
        group: dict[str, Any] = {"params": [(name, param) for name, param in named if tuple(matched[name]) == key]}
        for pattern in key:
            group.update(patterns[pattern])
        if key:
            group.setdefault("name", " & ".join(key))
        out.append(group)
    return out


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {key: value for key, value in group.items() if key != "params" and key != "param_names"}


def _address(key: str, link: Module) -> str | None:
    """The setting that a key such as "adam.beta1" names in this link."""
    name, _, rest = key.rpartition(".")
    return rest if name and name.lower() == type(link).__name__.lower() else None


def overrides(link: Module, group: Mapping[str, Any], shown: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says to one link. An alias counts when it differs from what the optimizer itself put there."""
    out: dict[str, Any] = {}
    for key, value in group.items():
        if key in link.defaults:
            out[key] = as_schedule(scale_members(link.defaults[key], value, shown.get(key)), link.defaults[key])
    for key in link.aliases:
        if key in group and group[key] is not shown.get(key) and group[key] != shown.get(key):
            out.update(link.resolve_aliases({key: group[key]}))
    for key, value in group.items():
        if "." in key and (name := _address(key, link)) is not None and name in link.defaults:
            out[name] = as_schedule(value, link.defaults[name])
    return out


def scale_members(own: Any, value: Any, shown: Any) -> Any:
    """A group's value for a setting that each member has its own number of: the largest one; the others keep their ratios."""
    if not is_per_member(own) or isinstance(value, Tensor) or not isinstance(shown, float | int):
        return value
    if value == shown:
        return own
    return own * (value / shown) if shown and not callable(value) else value


def export_settings(links: Iterable[Module]) -> dict[str, Any]:
    """Settings that torch's schedulers look for in every group, where the links agree on them."""
    found: dict[str, list[Any]] = {}
    for link in links:
        for key in _SHOWN:
            if key in link.defaults:
                found.setdefault(key, []).append(link.defaults[key])
        for key, names in link.aliases.items():
            if len(names) > 1 and all(name in link.defaults for name in names):
                found.setdefault(key, []).append(tuple(link.defaults[name] for name in names))
    return {
        key: _largest(values[0])
        for key, values in found.items()
        if isinstance(values[0], float | int | tuple | Tensor)
        and all(value is values[0] or (not isinstance(value, Tensor) and value == values[0]) for value in values)
    }


def _largest(value: Any) -> Any:
    """A setting as one number: the largest of those that members have."""
    return float(value.max()) if is_per_member(value) else value


def check_keys(group: Mapping[str, Any], links: Sequence[Module]) -> None:
    """Refuse settings that no link has, and numbers that are none."""
    for key, value in group.items():
        if key in _FOREIGN:
            continue
        if not is_known(key, links):
            every = sorted({key for link in links for key in (*link.defaults, *link.aliases)})
            near = difflib.get_close_matches(key, every, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"a parameter group sets {key!r}, which no link of the chain has{hint} "
                f"(settings here: {', '.join(every) or 'none'}; 'adam.beta1' names the one of a single link)"
            )
        owners = [type(link).__name__ for link in links if _takes(link, key)]
        check_number(f"a parameter group, for {' and '.join(dict.fromkeys(owners))}", key, value)
        for link in links:
            count = len(link.aliases.get(key, ()))
            if count > 1 and (not isinstance(value, tuple | list) or len(value) != count):
                raise ValueError(
                    f"a parameter group sets {key}={value!r}; for {type(link).__name__} it is {count} numbers, "
                    f"{' and '.join(link.aliases[key])}"
                )


def is_known(key: str, links: Sequence[Module]) -> bool:
    """Whether a key may be in a group: a setting of a link, or something torch writes for itself."""
    return key in _FOREIGN or any(_takes(link, key) for link in links)


def _takes(link: Module, key: str) -> bool:
    return key in link.defaults or key in link.aliases or _address(key, link) in link.defaults


def list_params(params: Any) -> list[tuple[str | None, Tensor]]:
    """A group's "params" with their names, None where they have none; a set is refused, as torch does."""
    if isinstance(params, set):
        raise TypeError("parameters are given as a set, which has no order; give a list")
    items = [params] if isinstance(params, Tensor) else params
    return [(clean_name(item[0]), item[1]) if isinstance(item, tuple) else (None, item) for item in items]
