"""Optimizers in checkpoints.

Ours keep their state by name, and it is saved as it is. Torch's own keep it by position: here the names and shapes of the
parameters are saved with it, so that it finds them again after they were reordered, renamed or joined by others.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from ._errors import CheckpointError, DamagedFileError
from ._match import Rename, list_names
from ._tree import class_name


def parameter_names(module: Any) -> dict[int, list[str]]:
    """Every name of each parameter of a module, by `id`."""
    names: dict[int, list[str]] = {}
    if isinstance(module, nn.Module):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    return names


def describe(optimizer: Any, state: Any, names: Mapping[int, list[str]]) -> dict[str, Any]:
    """What tells the parameters of an optimizer apart, if its state is by position: their names, if known, and shapes."""
    if not _is_by_position(state):
        return {}
    found: dict[str, Any] = {"shapes": [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]}
    called = _names(optimizer, names)
    if called is not None:
        found["names"] = [[each[0] for each in group] for group in called]
    return found


def _is_by_position(state: Any) -> bool:
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return False
    groups = state.get("param_groups")
    return (
        isinstance(groups, list)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        and all(type(place) is int for group in groups for place in group["params"])
    )


def _names(optimizer: Any, names: Mapping[int, list[str]]) -> list[list[list[str]]] | None:
    """The names of each parameter in each group: those in the module, or those the optimizer was given; None if unknown."""
    found = []
    for group in optimizer.param_groups:
        given = group.get("param_names")
        called = [names.get(id(p)) or ([given[at]] if given else None) for at, p in enumerate(group["params"])]
        if None in called:
            return None
        found.append(called)
    return found  # type: ignore[return-value]


@dataclass(frozen=True)
class KnownState:
    """What is known about names when an optimizer is loaded.

    Attributes:
        names: The names of parameters here, by `id`.
        rename: What names of the checkpoint are called here.
        ties: Names in the checkpoint that stand for the tensor of another name.
        fresh: Names here that may start fresh.
        dropped: Names of the checkpoint that may be left out.
        strict: Whether anything else must match.
        every: All names in the checkpoint.
    """

    names: Mapping[int, list[str]]
    rename: Rename
    ties: Mapping[str, str]
    fresh: Collection[str]
    dropped: Collection[str]
    strict: bool
    every: list[str]


def fit_state(
    optimizer: Any, part: Mapping[str, Any], state: Any, known: KnownState
) -> tuple[Any, list[str], list[str]]:
    """The state of a checkpoint as an optimizer takes it.

    Args:
        optimizer: The optimizer.
        part: What the checkpoint says about its optimizer.
        state: The state in the checkpoint.
        known: Names.

    Returns:
        The state to load, the names of parameters that start fresh, and those whose state is not used.

    Raises:
        CheckpointError: If they do not fit.
    """
    here = getattr(optimizer, "named_state_dict", optimizer.state_dict)()
    if "shapes" not in part:
        if _is_by_position(here) and isinstance(state, dict) and not _is_by_position(state):
            raise CheckpointError(
                f"the checkpoint has the state of {part.get('class')}, which is by name, and {class_name(optimizer)} keeps "
                "its state by position; load it into the kind of optimizer that wrote it"
            )
        return _fit_named(optimizer, state, here, known)
    if not _is_by_position(state) or not _is_by_position(here):
        raise CheckpointError(
            f"the checkpoint has the state of {part.get('class')} by position, which {class_name(optimizer)} does not take; "
            "load it into the kind of optimizer that wrote it"
        )
    shapes = _lists(part["shapes"], state, "shapes")
    called = _names(optimizer, known.names)
    if "names" not in part or called is None:
        _check_positions(optimizer, shapes)
        return state, [], []
    return _match_by_name(optimizer, state, here, _lists(part["names"], state, "names"), shapes, called, known)


def _fit_named(optimizer: Any, state: Any, here: Any, known: KnownState) -> tuple[Any, list[str], list[str]]:
    """A state that is by name, under the names here, without what finds nothing here."""
    new = {name: known.rename(name) for name in known.every}
    shapes, ours = (each.get("shapes") if isinstance(each, dict) else None for each in (state, here))
    fresh: list[str] = []
    dropped: list[str] = []
    if isinstance(shapes, dict) and isinstance(ours, dict):
        found = {
            new.get(name, name): name for name, shape in shapes.items() if _fits(ours.get(new.get(name, name)), shape)
        }
        fresh = [name for name in ours if name not in found]
        dropped = [name for name in shapes if name not in found.values()]
        _check_leftovers(optimizer, fresh, dropped, known)
        new |= dict.fromkeys(dropped)
        links, own = state.get("links"), here.get("links")
        if isinstance(links, dict) and isinstance(own, dict) and not known.strict:
            fresh += [f"link {path}" for path in own if path not in links]
            dropped += [f"link {path}" for path in links if path not in own]
    return _rename_keys(state, {name: here for name, here in new.items() if name != here}), fresh, dropped


def _fits(here: Any, saved: Any) -> bool:
    return here is not None and isinstance(saved, list | tuple) and tuple(here) == tuple(saved)


def _lists(found: Any, state: dict[str, Any], what: str) -> list[list[Any]]:
    groups = state["param_groups"]
    if (
        not isinstance(found, list)
        or len(found) != len(groups)
        or not all(isinstance(a, list) and len(a) == len(g["params"]) for a, g in zip(found, groups, strict=True))
    ):
        raise DamagedFileError(f"the {what} of its optimizer's parameters are malformed")
    return found


def _check_positions(optimizer: Any, shapes: list[list[Any]]) -> None:
    here = [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    if here != shapes:
        counts, ours = [len(group) for group in shapes], [len(group) for group in here]
        what = f"groups of {counts} parameters in the checkpoint, {ours} here" if counts != ours else "shapes differ"
        raise CheckpointError(
            f"the parameters of the {type(optimizer).__name__} are not those of the checkpoint: {what}. Save and load the "
            "module together with its optimizer, so that parameters are matched by name"
        )


def _match_by_name(
    optimizer: Any,
    state: dict[str, Any],
    here: dict[str, Any],
    names: list[list[str]],
    shapes: list[list[Any]],
    called: list[list[list[str]]],
    known: KnownState,
) -> tuple[Any, list[str], list[str]]:
    sources: dict[str, tuple[str, int, int, Any]] = {}
    for at, group in enumerate(state["param_groups"]):
        for name, shape, place in zip(names[at], shapes[at], group["params"], strict=True):
            if not isinstance(name, str):
                raise DamagedFileError("the names of its optimizer's parameters are malformed")
            for each in (name, *(other for other, first in known.ties.items() if first == name)):
                new = known.rename(each)
                if new is not None:
                    sources[new] = name, place, at, shape
    fresh: list[str] = []
    used: set[str] = set()
    states: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    for group, live, aliases in zip(here["param_groups"], optimizer.param_groups, called, strict=True):
        origins: list[int] = []
        for place, parameter, called_here in zip(group["params"], live["params"], aliases, strict=True):
            found = next((sources[alias] for alias in called_here if alias in sources), None)
            if found is not None and found[3] == list(parameter.shape):
                used.add(found[0])
                origins.append(found[2])
                if found[1] in state["state"]:
                    states[place] = state["state"][found[1]]
            else:
                fresh.append(called_here[0])
        groups.append({**_options(group, origins, state["param_groups"]), "params": group["params"]})
        if "param_names" in group:
            groups[-1]["param_names"] = group["param_names"]
    dropped = [name for every in names for name in every if name not in used]
    _check_leftovers(optimizer, fresh, dropped, known)
    return {**state, "state": states, "param_groups": groups}, fresh, dropped


def _options(group: dict[str, Any], origins: list[int], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of a group: those of the saved group that its parameters were in."""
    if not origins:
        return group
    own = ("params", "param_names")
    first, *others = (
        {key: value for key, value in saved[place].items() if key not in own} for place in dict.fromkeys(origins)
    )
    if not all(_equal(first, other) for other in others):
        raise CheckpointError(
            "parameters that are in one group here were in groups with different settings in the checkpoint; make the same "
            "groups"
        )
    return first


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor | np.ndarray) or isinstance(right, Tensor | np.ndarray):
        return type(left) is type(right) and left.dtype == right.dtype and left.tolist() == right.tolist()
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right)


def _check_leftovers(optimizer: Any, fresh: list[str], dropped: list[str], known: KnownState) -> None:
    """Refuse parameters that find no state, and states that find no parameter, unless they may."""
    new, old = [n for n in fresh if n not in known.fresh], [n for n in dropped if n not in known.dropped]
    problems = [f"it has no state that fits {list_names(new)}"] if new else []
    problems += [f"nothing here takes its state of {list_names(old)}"] if old else []
    if problems and known.strict:
        raise CheckpointError(
            f"the checkpoint does not fit the {type(optimizer).__name__}: {'; '.join(problems)}. Say what has another name "
            "with mapping=, or load what fits with strict=False"
        )


def _rename_keys(tree: Any, new: Mapping[str, str | None]) -> Any:
    """A tree in which every key that is a name in the checkpoint has become the name here; what is gone is left out."""
    if not new:
        return tree
    if isinstance(tree, dict):
        found = type(tree)()
        for key, value in tree.items():
            here = new.get(key, key) if isinstance(key, str) else key
            if here is not None:
                found[here] = _rename_keys(value, new)
        return found
    if isinstance(tree, list) and tree and all(isinstance(each, str) for each in tree):
        return [here for here in (new.get(each, each) for each in tree) if here is not None]
    if type(tree) in (list, tuple):
        return type(tree)(_rename_keys(each, new) for each in tree)
    return tree
