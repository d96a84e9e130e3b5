"""Optimizers in checkpoints.

Ours keep their state by name, and it is saved as it is. Torch's own keep it by position: here the names and shapes of the
parameters are saved with it, so that it finds them again after they were reordered, renamed or joined by others.
"""

from collections.abc import Mapping
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

# What a group of torch's own optimizers has beside settings.
_OWN: Final = ("params", "param_names")


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
    """Whether it looks as `state_dict()` of torch's own optimizers does."""
    if not has_form(state, {"state": dict, "param_groups": [{"params": [int]}]}):
        return False
    return {"state", "param_groups"} <= state.keys() and all("params" in group for group in state["param_groups"])


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
class StateFitter:
    """Makes the state of a checkpoint one that an optimizer takes.

    Attributes:
        saved: The checkpoint.
        match: Which name of its module goes where.
        names: The names of parameters here, by `id`.
        strict: Whether everything must match but what the module leaves out.
    """

    saved: SavedFile
    match: Match
    names: Mapping[int, list[str]]
    strict: bool

    def fit(self, optimizer: Any, part: Mapping[str, Any], state: Any) -> tuple[Any, list[str], list[str]]:
        """The state to load, the names of parameters that start fresh, and those whose state is not used.

        Args:
            optimizer: The optimizer.
            part: What the checkpoint says about its optimizer.
            state: The state in the checkpoint.

        Raises:
            CheckpointError: If they do not fit.
        """
        here = getattr(optimizer, "describe_state", optimizer.state_dict)()
        positions = _is_by_position(state)
        if isinstance(state, dict) and positions != _is_by_position(here):
            told = ("by position", "by name") if positions else ("by name", "by position")
            here = (
                f"{class_name(optimizer)} keeps its state {told[1]}; load it into the kind of optimizer that wrote it"
            )
            raise CheckpointError(
                f"the checkpoint has the state of {part.get('class')}, which is {told[0]}, and {here}"
            )
        return (self._fit_positions if positions else self._fit_names)(optimizer, part, state, here)

    def _fit_names(self, optimizer: Any, part: Any, state: Any, here: Any) -> tuple[Any, list[str], list[str]]:
        """A state that is by name, under the names here, without what finds nothing here."""
        new: dict[str, str | None] = dict.fromkeys(self.match.dropped)
        new |= {self.saved.source(source): name for name, source in self.match.taken.items()}
        shapes, ours = (each.get("shapes") if isinstance(each, dict) else None for each in (state, here))
        fresh: list[str] = []
        dropped: list[str] = []
        if isinstance(shapes, dict) and isinstance(ours, dict):
            live = {name: ([name], shape) for name, shape in ours.items()}
            found, fresh, dropped = self._pair(optimizer, shapes, live)
            new |= {source: name for name, source in found.items()} | dict.fromkeys(dropped)
            links, own = state.get("links"), here.get("links")
            if isinstance(links, dict) and isinstance(own, dict) and not self.strict:
                fresh += [f"link {path}" for path in own if path not in links]
                dropped += [f"link {path}" for path in links if path not in own]
        return _rename_keys(state, {name: here for name, here in new.items() if name != here}), fresh, dropped

    def _fit_positions(self, optimizer: Any, part: Any, state: Any, here: Any) -> tuple[Any, list[str], list[str]]:
        """A state that is by position, at the positions here. Where names are not known, positions are names."""
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
        found, fresh, dropped = self._pair(optimizer, dict(zip(names, shapes, strict=True)), live)
        sizes = dict(zip(origins, shapes, strict=True))
        names_here = {
            at: each
            for group, aliases in zip(groups, called, strict=True)
            for at, each in zip(group["params"], aliases, strict=True)
        }
        states: dict[int, Any] = {}
        made: list[dict[str, Any]] = []
        for group, each in zip(groups, called, strict=True):
            taken = {at: where[found[a[0]]] for at, a in zip(group["params"], each, strict=True) if a[0] in found}
            for (at, old), row in (
                (pair, state["state"][pair[1]]) for pair in taken.items() if pair[1] in state["state"]
            ):
                reorder, resized = self._find_reorder(names_here[at]), self._find_resized(names_here[at])
                states[at] = row if reorder is None else reorder_state(row, reorder, sizes[old])
                if resized is not None:
                    states[at] = _resize_state(row, resized)
            options = _options(group, [origins[old] for old in taken.values()], saved)
            made.append({**options, **{key: group[key] for key in _OWN if key in group}})
        return {**state, "state": states, "param_groups": made}, fresh, dropped

    def _find_reorder(self, aliases: list[str]) -> Reorder | None:
        """Return how a parameter that is called so here was reordered, which its state has to follow."""
        return next((self.match.reorders[name] for name in aliases if name in self.match.reorders), None)

    def _find_resized(self, aliases: list[str]) -> UnitMap | None:
        """Return how a parameter that is called so here gets the units that it has here."""
        return next((self.match.resized[name] for name in aliases if name in self.match.resized), None)

    def _pair(self, optimizer: Any, shapes: Any, here: Any) -> tuple[dict[str, str], list[str], list[str]]:
        """The names in the checkpoint by names here, of parameters of the same shape, and those that are left on either side.

        Raises:
            CheckpointError: If more are left than in the module.
        """
        found: dict[str, str] = {}
        match, every = self.match, set(self.saved.every)
        for name, (aliases, shape) in here.items():
            # What is not in the module has the same name in both.
            same = None if name in match.fresh or name in every else name
            source = next((self.saved.source(match.taken[each]) for each in aliases if each in match.taken), same)
            reorder = self._find_reorder(aliases)
            size = list(shapes.get(source, [-1]))
            resized = self._find_resized(aliases)
            if source is not None and resized is not None and size == list(resized.shape):
                found[name] = source
                continue
            if source is not None and (size if reorder is None else list(reorder.permute_shape(size))) == list(shape):
                found[name] = source
        used = set(found.values())
        fresh, dropped = [name for name in here if name not in found], [name for name in shapes if name not in used]
        new, old = [n for n in fresh if n not in match.fresh], [n for n in dropped if n not in match.dropped]
        problems = [f"it has no state that fits {list_names(new)}"] if new else []
        problems += [f"nothing here takes its state of {list_names(old)}"] if old else []
        if problems and self.strict:
            raise CheckpointError(
                f"the checkpoint does not fit the {type(optimizer).__name__}: {'; '.join(problems)}. Say what has another name "
                "with mapping=, or load what fits with strict=False; without the module, parameters have no names but positions"
            )
        return found, fresh, dropped


def _resize_state(row: Any, unit_map: UnitMap) -> Any:
    """Return the state of a parameter of torch's own optimizers with the units that the parameter has here."""

    def resize(tensor: Tensor) -> Tensor:
        return unit_map.resize_state(tensor) if tuple(tensor.shape) == unit_map.shape else tensor

    return map_tensors(row, resize)


def _options(group: dict[str, Any], origins: list[int], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of a group: those of the saved group that its parameters were in."""
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
    """Trees are the same JSON where their tensors have the same values."""

    def put(self, tensor: Tensor, path: tuple[Any, ...]) -> str:
        return f"{tensor.dtype} {tensor.tolist()}"


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
