"""Optimizers in checkpoints.

Optimizers of this library have their state by name, and it is saved unmodified. Torch's have it by position: the names and
shapes of the parameters are saved with it, so that it can be matched after parameters were reordered, renamed or added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from torch import Tensor, nn

from .._encoding import encode
from ..layout import Reorder, UnitMap, list_names, map_tensors, reorder_state
from ._basics import CheckpointError, DamagedFileError, has_form
from ._module import Match
from ._read import SavedFile
from ._tree import Tensors, class_name

# The entries of a group of torch's optimizers that are not settings.
_OWN: Final = ("params", "param_names")


def parameter_names(module: Any) -> dict[int, list[str]]:
    """Return every name of each parameter of a module, by `id`."""
    names: dict[int, list[str]] = {}
    if isinstance(module, nn.Module):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    return names


def describe(optimizer: Any, state: Any, names: Mapping[int, list[str]]) -> dict[str, Any]:
    """Return the names, if known, and shapes of an optimizer's parameters, if its state is by position.

    Args:
        optimizer: The optimizer.
        state: Its state dict.
        names: The names of parameters by `id`.
    """
    if not _is_by_position(state):
        return {}
    facts: dict[str, Any] = {"shapes": [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]}
    names_by_group = _names(optimizer, names)
    if names_by_group is not None:
        facts["names"] = [[each[0] for each in group] for group in names_by_group]
    return facts


def _is_by_position(state: Any) -> bool:
    """Whether a state dict has the form of torch's optimizers."""
    if not has_form(state, {"state": dict, "param_groups": [{"params": [int]}]}):
        return False
    return {"state", "param_groups"} <= state.keys() and all("params" in group for group in state["param_groups"])


def _names(optimizer: Any, names: Mapping[int, list[str]]) -> list[list[list[str]]] | None:
    """Return the names of each parameter in each group: those in the module, or the group's `param_names`; None if unknown."""
    groups = []
    for group in optimizer.param_groups:
        own = group.get("param_names")
        called = [names.get(id(p)) or ([own[at]] if own else None) for at, p in enumerate(group["params"])]
        if None in called:
            return None
        groups.append(called)
    return groups  # type: ignore[return-value]


@dataclass(frozen=True)
class StateFitter:
    """Converts the optimizer state of a checkpoint for an optimizer.

    Attributes:
        saved: The checkpoint.
        match: The matching of its module with the live one.
        names: The names of the live parameters, by `id`.
        strict: Whether every parameter that the module matches must match.
    """

    saved: SavedFile
    match: Match
    names: Mapping[int, list[str]]
    strict: bool

    def fit(self, optimizer: Any, part: Mapping[str, Any], state: Any) -> tuple[Any, list[str], list[str]]:
        """Return the state to load, the names of parameters without a saved state, and those whose saved state is not used.

        Args:
            optimizer: The optimizer.
            part: The optimizer's entry in the checkpoint.
            state: The state in the checkpoint.

        Raises:
            CheckpointError: If they do not fit.
        """
        here = getattr(optimizer, "describe_state", optimizer.state_dict)()
        positions = _is_by_position(state)
        if isinstance(state, dict) and positions != _is_by_position(here):
            forms = ("by position", "by name") if positions else ("by name", "by position")
            here = (
                f"{class_name(optimizer)} keeps its state {forms[1]}; load it into the kind of optimizer that wrote it"
            )
            raise CheckpointError(
                f"the checkpoint has the state of {part.get('class')}, which is {forms[0]}, and {here}"
            )
        return (self._fit_positions if positions else self._fit_names)(optimizer, part, state, here)

    def _fit_names(self, optimizer: Any, part: Any, state: Any, here: Any) -> tuple[Any, list[str], list[str]]:
        """Return a state by name under the live names, without unmatched entries."""
        new: dict[str, str | None] = dict.fromkeys(self.match.dropped)
        new |= {self.saved.source(source): name for name, source in self.match.taken.items()}
        shapes, ours = (each.get("shapes") if isinstance(each, dict) else None for each in (state, here))
        fresh: list[str] = []
        dropped: list[str] = []
        if isinstance(shapes, dict) and isinstance(ours, dict):
            live = {name: ([name], shape) for name, shape in ours.items()}
            pairs, fresh, dropped = self._pair(optimizer, shapes, live)
            new |= {source: name for name, source in pairs.items()} | dict.fromkeys(dropped)
            links, own = state.get("links"), here.get("links")
            if isinstance(links, dict) and isinstance(own, dict) and not self.strict:
                fresh += [f"link {path}" for path in own if path not in links]
                dropped += [f"link {path}" for path in links if path not in own]
        return _rename_keys(state, {name: here for name, here in new.items() if name != here}), fresh, dropped

    def _fit_positions(self, optimizer: Any, part: Any, state: Any, here: Any) -> tuple[Any, list[str], list[str]]:
        """Return a state by position at the live positions; if names are unknown, positions are used as names."""
        if not has_form(part, {"names": [[str]], "shapes": [[[int]]]}):
            raise DamagedFileError("the names or shapes of its optimizer's parameters are malformed")
        saved, groups = state["param_groups"], here["param_groups"]
        origins = {place: at for at, group in enumerate(saved) for place in group["params"]}
        names, shapes = (list(chain.from_iterable(part.get(key, []))) for key in ("names", "shapes"))
        called = _names(optimizer, self.names)
        if called is None or not names:
            called, names = [[[str(place)] for place in group["params"]] for group in groups], list(map(str, origins))
        if not len(origins) == len(shapes) == len(set(names)):
            raise DamagedFileError("the names or shapes of its optimizer's parameters are not those of its state")
        where = dict(zip(names, origins, strict=True))
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        live = {each[0]: (each, p.shape) for each, p in zip(chain.from_iterable(called), params, strict=True)}
        pairs, fresh, dropped = self._pair(optimizer, dict(zip(names, shapes, strict=True)), live)
        sizes = dict(zip(origins, shapes, strict=True))
        sources = {live_name: where[name] for live_name, name in pairs.items()}
        fitted = self._fit_groups(state, groups, called, sources, sizes, origins)
        return {**state, **fitted}, fresh, dropped

    def _fit_groups(
        self,
        state: Any,
        groups: Any,
        called: Any,
        sources: dict[str, int],
        sizes: dict[int, Any],
        origins: dict[int, int],
    ) -> dict[str, Any]:
        """Return the states and groups of matched parameters at the live positions.

        Args:
            state: The saved state.
            groups: The live groups.
            called: The names of each parameter in each live group.
            sources: The saved position of each matched parameter, by its first live name.
            sizes: The saved shape of each saved position.
            origins: The saved group of each saved position.
        """
        states: dict[int, Any] = {}
        new_groups: list[dict[str, Any]] = []
        for group, each in zip(groups, called, strict=True):
            rows = [(at, aliases) for at, aliases in zip(group["params"], each, strict=True) if aliases[0] in sources]
            olds = [sources[aliases[0]] for _, aliases in rows]
            for (at, aliases), old in zip(rows, olds, strict=True):
                if old in state["state"]:
                    states[at] = self._follow(state["state"][old], aliases, sizes[old])
            options = _options(group, [origins[old] for old in olds], state["param_groups"])
            new_groups.append({**options, **{key: group[key] for key in _OWN if key in group}})
        return {"state": states, "param_groups": new_groups}

    def _follow(self, row: Any, aliases: list[str], shape: Sequence[int]) -> Any:
        """Return the state of one parameter, reordered or resized as the parameter was."""
        reorder, resized = self._find_reorder(aliases), self._find_resized(aliases)
        if resized is not None:
            return _resize_state(row, resized)
        return row if reorder is None else reorder_state(row, reorder, shape)

    def _find_reorder(self, aliases: list[str]) -> Reorder | None:
        """Return the reordering of a live parameter, which its state must follow; None if it was not reordered."""
        return next((self.match.reorders[name] for name in aliases if name in self.match.reorders), None)

    def _find_resized(self, aliases: list[str]) -> UnitMap | None:
        """Return the map to the units of a live parameter; None if it was not resized."""
        return next((self.match.resized[name] for name in aliases if name in self.match.resized), None)

    def _pair(self, optimizer: Any, shapes: Any, here: Any) -> tuple[dict[str, str], list[str], list[str]]:
        """Return saved names by live names of parameters of the same shape, and the unmatched live and saved names.

        Raises:
            CheckpointError: If names are unmatched that the module matches.
        """
        pairs: dict[str, str] = {}
        for name, (aliases, shape) in here.items():
            source = self._find_source(name, aliases)
            if source is not None and self._has_shape(shapes.get(source, [-1]), aliases, shape):
                pairs[name] = source
        match, used = self.match, set(pairs.values())
        fresh, dropped = [name for name in here if name not in pairs], [name for name in shapes if name not in used]
        new, old = [n for n in fresh if n not in match.fresh], [n for n in dropped if n not in match.dropped]
        problems = [f"it has no state that fits {list_names(new)}"] if new else []
        problems += [f"nothing here takes its state of {list_names(old)}"] if old else []
        if problems and self.strict:
            raise CheckpointError(
                f"the checkpoint does not fit the {type(optimizer).__name__}: {'; '.join(problems)}. Say what has another name "
                "with mapping=, or load what fits with strict=False; without the module, parameters have no names but positions"
            )
        return pairs, fresh, dropped

    def _find_source(self, name: str, aliases: list[str]) -> str | None:
        """Return the saved name of a live parameter; None if it has no saved state."""
        match = self.match
        # A parameter that is not in the module has the same name in both.
        same = None if name in match.fresh or name in self.saved.every else name
        return next((self.saved.source(match.taken[each]) for each in aliases if each in match.taken), same)

    def _has_shape(self, saved: Sequence[int], aliases: list[str], shape: Sequence[int]) -> bool:
        """Whether a saved shape is that of a live parameter, before it was reordered or resized."""
        resized, reorder = self._find_resized(aliases), self._find_reorder(aliases)
        if resized is not None and list(saved) == list(resized.shape):
            return True
        return list(saved if reorder is None else reorder.permute_shape(saved)) == list(shape)


def _resize_state(row: Any, unit_map: UnitMap) -> Any:
    """Return the state of a parameter of torch's optimizers with the units of the live parameter."""

    def resize(tensor: Tensor) -> Tensor:
        return unit_map.resize_state(tensor) if tuple(tensor.shape) == unit_map.shape else tensor

    return map_tensors(row, resize)


def _options(group: dict[str, Any], origins: list[int], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of a group: those of the saved group of its parameters."""
    if not origins:
        return group
    first, *others = (
        {key: value for key, value in saved[place].items() if key not in _OWN} for place in dict.fromkeys(origins)
    )
    if any(encode(other, (), _TensorsByValue()) != encode(first, (), _TensorsByValue()) for other in others):
        raise CheckpointError(
            "parameters of one group here had different settings in the checkpoint; make the same groups"
        )
    return first


class _TensorsByValue(Tensors):
    """A medium in which trees are equal JSON if their tensors have equal values."""

    def put(self, tensor: Tensor, path: tuple[Any, ...]) -> str:
        return f"{tensor.dtype} {tensor.tolist()}"


def _rename_keys(tree: Any, new: Mapping[str, str | None]) -> Any:
    """Return a tree with saved names, as keys or in lists, replaced by live ones; names without a live one are dropped."""
    if not new:
        return tree
    if isinstance(tree, dict):
        renamed = type(tree)()
        for key, value in tree.items():
            here = new.get(key, key) if isinstance(key, str) else key
            if here is not None:
                renamed[here] = _rename_keys(value, new)
        return renamed
    if isinstance(tree, list) and tree and all(isinstance(each, str) for each in tree):
        return [here for here in (new.get(each, each) for each in tree) if here is not None]
    if type(tree) in (list, tuple):
        return type(tree)(_rename_keys(each, new) for each in tree)
    return tree
