"""The parameter groups of an optimizer after an edit of its module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..layout import match_name
from ._groups import name_group

if TYPE_CHECKING:
    from ._following import Change, Following


def edit_groups(groups: Sequence[dict[str, Any]], change: Change, swapped: Mapping[Tensor, Tensor]) -> None:
    """Remove, replace and rename parameters in the lists of the groups, which stay the same objects.

    Args:
        groups: The groups of the optimizer.
        change: What the edit removed and renamed.
        swapped: New parameters that take the position of a former one, by the former one.
    """
    gone = {param for _, param in change.left}
    for group in groups:
        params, names = group["params"], list(group.get("param_names", ()))
        pairs = list(zip(params, names, strict=False))
        rest = params[len(names) :]  # unnamed parameters, added by a program
        stay = [(swapped.get(param, param), name) for param, name in pairs if param not in gone]
        params[:] = [param for param, _ in stay] + [swapped.get(param, param) for param in rest if param not in gone]
        if names:
            group["param_names"] = [change.names.get(param, name) for param, name in stay]


def place_joined(groups: Sequence[dict[str, Any]], change: Change, following: Following) -> list[dict[str, Any]]:
    """Put new parameters into the groups of their patterns; return the new groups that some of them need.

    Args:
        groups: The groups of the optimizer.
        change: What the edit added.
        following: The patterns of the groups, and the group of parameters that no pattern matches.
    """
    patterns, pending = following.patterns, dict[str | None, dict[str, Any]]()
    for name, param in change.joined:
        key = tuple(pattern for pattern in patterns if match_name(name, [pattern]))
        title = name_group(key)
        named = [group for group in groups if title is not None and group.get("name") == title]
        named += [group for group in groups if title is None and group is following.default]
        group = next(iter(named if patterns else [*named, *groups]), None)
        if group is not None:
            group["params"].insert(len(group.get("param_names", ())), param)
            group["param_names"] = [*group.get("param_names", ()), name]
            continue
        if title not in pending:
            pending[title] = {"params": [], **({} if title is None else {"name": title})}
            for pattern in key:
                pending[title].update(patterns[pattern])
        pending[title]["params"].append((name, param))
    return list(pending.values())


def check_names(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if two parameters have the same name."""
    names = [name for group in groups for name in group.get("param_names", ())]
    name, count = next(iter(Counter(names).most_common(1)), ("", 0))
    if count > 1:
        raise ValueError(
            f"the module has a new parameter {name!r}, and a group has another one with this name; names address the saved "
            "state: remove that one from the group, or give it another name"
        )
