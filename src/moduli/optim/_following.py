"""Following edits of a module: an optimizer updates its groups, and keeps the state of parameters that stay.

Parameters that the module does not have any more leave the groups, and new ones join the group whose pattern matches their name.
A parameter that has the name of an earlier one takes its position in the groups, and its state if the shapes are equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..layout import REMOVED, RESIZED, Guard, ParameterWatch, is_sharded, match_name
from ._follow_events import describe_change, list_some
from ._followed_groups import check_names, edit_groups, place_joined
from ._followed_rows import (
    ParameterKind,
    convert_rows,
    convert_state,
    drop_rows,
    find_sizes,
    has_other_kind,
    read_kinds,
    reorder_rows,
    resize_rows,
)
from ._groups import check_tensors, named_parameters
from ._label_order import find_moved_labels, list_parameter_axes
from ._matrix_link import take_axes
from ._needs import ChainError
from ._vector_state import VECTOR
from ._watching import PopulationWatch, watch
from .state import PER_PARAMETER

if TYPE_CHECKING:
    from ..layout import Reorder
    from ..population import Population
    from . import Module, Optimizer

Named = list[tuple[str, Tensor]]
_SHOWN_EVENTS = 5
_NONE = ParameterKind(torch.empty(0), torch.empty(0).dtype, torch.empty(0).device)


class Following:
    """The parameters that a module had when its optimizer last looked, and the update of the optimizer after an edit.

    Args:
        model: The module, or population.
        patterns: The patterns of `groups=`, with their settings.
        first: The first group of the optimizer.

    Attributes:
        events: Sentences about the last few edits.
        default: The group of the parameters that no pattern matches; None while there are none.
        busy: Whether a step runs or an edit is being followed; further edits are followed at the next step.
    """

    def __init__(
        self,
        model: torch.nn.Module | Population,
        patterns: Mapping[str, Mapping[str, Any]],
        first: dict[str, Any],
    ) -> None:
        self.model = model
        self.named = named_parameters(model)
        self.kinds = read_kinds(self.named)
        self.axes = list_parameter_axes(model)
        self.patterns = {pattern: dict(settings) for pattern, settings in patterns.items()}
        self.events: list[str] = []
        self.default = first if "name" not in first else None
        self.busy = False
        #: Parameters that joined since the last step, which a program may still put into a group of its own.
        self._recent: list[Tensor] = []
        self._watch: ParameterWatch | PopulationWatch | None = watch(model)

    def begin_step(self, optimizer: Optimizer) -> None:
        """Follow an edit of the module, or a conversion of all its parameters (`net.double()`); mark the optimizer as busy."""
        current = self._watch
        param, dtype, device = self.kinds[0] if self.kinds else _NONE
        if current is None or current.has_changed() or param.dtype != dtype or param.device != device:
            self.follow(optimizer)
        self.busy, self._recent = True, []

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Defer edits until the end of a block."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def follow_quietly(self, optimizer: Optimizer) -> None:
        """Follow an edit of the module when groups are read; errors are raised by the next step instead.

        Otherwise such an optimizer could be neither printed nor saved.
        """
        if optimizer.shards is None and (self._watch is None or self._watch.has_changed()):
            with contextlib.suppress(ValueError, ChainError):
                self.follow(optimizer)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watch": None, "busy": False}  # a copy of the optimizer watches a copy of the module

    def release(self, optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
        """Take parameters that have just joined out of their group, where a program adds them in a group of its own.

        Args:
            optimizer: The optimizer.
            group: The group that is to be added.

        Returns:
            The group, with a list where its parameters were an iterator.
        """
        params = group.get("params", ())
        if isinstance(params, Iterator):
            params = list(params)
        wanted: list[Any] = [params] if isinstance(params, Tensor) else list(params)
        if isinstance(params, str):
            wanted = [param for name, param in named_parameters(self.model) if match_name(name, [params])]
        ids = {id(item[1] if isinstance(item, tuple) else item) for item in wanted}
        chosen = {param for param in self._recent if id(param) in ids} if not self.busy else set()
        if chosen:
            edit_groups(optimizer._group_list, Change([("", param) for param in chosen], [], [], {}, False), {})
            self.named = [pair for pair in self.named if pair[1] not in chosen]
            self._watch = None
        return {**group, "params": params}

    def follow(self, optimizer: Optimizer) -> None:
        """Update the optimizer for the current parameters of the module; all of it or nothing.

        Raises:
            ChainError: If parameters are sharded, so that their state is in other processes.
            ValueError: If the optimizer was given axes, and there are parameters without.
        """
        with self.wait():
            self._follow(optimizer)

    def _follow(self, optimizer: Optimizer) -> None:
        """Compare the module with its earlier parameters, and update state, groups and slots."""
        current = watch(self.model)
        now = named_parameters(self.model)
        change: Change | None = find_change(optimizer, self.named, now)
        if change is not None and optimizer.shards is not None:
            change = _check_shards(change)
        if optimizer.rows is not None and (change or has_other_kind(self.kinds)):
            optimizer.rows.dissolve()
        if has_other_kind(self.kinds):
            links = [link for _, link in optimizer._links]
            with Guard(deferred=True) as guard:
                _protect(optimizer, links, guard)
                event = convert_state(optimizer, links, self.kinds)
            self.events = [*self.events, event][-_SHOWN_EVENTS:]
        if change:
            with Guard(deferred=True) as guard:
                guard.add(partial(setattr, self, "default", self.default))
                event = _apply_change(optimizer, change, self, guard)
            self.events = [*self.events, event][-_SHOWN_EVENTS:]
            self._recent += [param for _, param in change.joined]
        self.named, self.kinds, self._watch = now, read_kinds(now), current
        self.axes = list_parameter_axes(self.model)


def check_removed(optimizer: Optimizer, evaluated: bool) -> None:
    """Check an optimizer that was given parameters, and no module, after edits of modules.

    Args:
        optimizer: The optimizer.
        evaluated: Whether the step evaluates a closure. Otherwise parameters with a gradient are still trained.

    Raises:
        ChainError: If an edit of a `mo.Module` has removed parameters, so that the step would not train them.
    """
    names = REMOVED.find(param for param in optimizer.list_params() if evaluated or param.grad is None)
    if names:
        raise ChainError(
            f"an edit of the model has removed parameters of this optimizer ({list_some(names)}), which a step would not train. "
            "Give the optimizer the module itself, mo.Optimizer(net, ...), and it follows edits; or make a new one of the "
            "parameters that are there"
        )
    optimizer._removals = REMOVED.count


class Change(NamedTuple):
    """The difference between the parameters in an optimizer's groups and those of its module.

    Attributes:
        left: Parameters in the groups that the module does not have any more.
        joined: Parameters that are in no group yet.
        replaced: For each name in the groups that belongs to another tensor now: the name, the tensor before and after.
        names: The current names of the module's parameters.
        renamed: Whether a parameter in the groups has another name now.
    """

    left: Named
    joined: Named
    replaced: list[tuple[str, Tensor, Tensor]]
    names: dict[Tensor, str]
    renamed: bool

    def __bool__(self) -> bool:
        return bool(self.left or self.joined or self.replaced or self.renamed)


def find_change(optimizer: Optimizer, before: Named, now: Named) -> Change:
    """Return the difference between the groups of an optimizer and its module.

    Only parameters that came from the module are compared: those that a program added to the groups stay there, and those that it
    removed from them do not come back.

    Args:
        optimizer: The optimizer.
        before: The parameters that the module had, by name.
        now: The parameters that it has.
    """
    grouped = set(optimizer.list_params())
    old_names, names = {param: name for name, param in before}, {param: name for name, param in now}
    gone = {name: param for name, param in before if param not in names}
    new = {name: param for name, param in now if param not in old_names and param not in grouped}
    replaced = [(name, gone[name], param) for name, param in new.items() if gone.get(name) in grouped]
    joined = [(name, param) for name, param in new.items() if name not in gone]
    taken = {name for name, _, _ in replaced}
    left = [(name, param) for name, param in gone.items() if param in grouped and name not in taken]
    renamed = any(old_names.get(param, name) != name for param, name in names.items() if param in grouped)
    return Change(left, joined, replaced, names, renamed)


def _check_shards(change: Change) -> Change | None:
    """Return None for the temporary tensors that FSDP puts into a module during a pass.

    Raises:
        ChainError: If the module was edited.
    """
    replaced = [name for name, _, after in change.replaced if is_sharded(after)]
    names = [name for name, _ in (*change.left, *change.joined)] + replaced
    if not names:
        return None
    raise ChainError(
        f"the module was edited ({list_some(names)}), and an optimizer of sharded parameters can't follow, since "
        "other processes hold parts of its state; make a new Optimizer and load this one's state_dict() with strict=False"
    )


def _apply_change(optimizer: Optimizer, change: Change, following: Following, guard: Guard) -> str:
    """Update groups, slots and state after an edit, and return a sentence about it.

    Args:
        optimizer: The optimizer.
        change: The difference between its groups and the module.
        following: The object that follows the module.
        guard: Undoes everything if this fails.
    """
    links, slots, groups = [link for _, link in optimizer._links], optimizer.binding.slots, optimizer.param_groups
    _check_tensors(links, change)
    _protect(optimizer, links, guard)
    fresh, moved = _find_reshaped(change, following)
    restarted = _restart(optimizer, links, change, fresh | moved.keys())
    resized, reordered = dict[str, list[str]](), dict[str, list[str]]()
    for name, before, after in change.replaced:
        slot = slots.replace(before, after)
        maps = RESIZED.find(before, after)
        if maps is not None:
            resized[name] = resize_rows(optimizer, links, slot, maps, after)
        elif name in fresh:
            drop_rows(optimizer, links, slot)
        elif (reorder := moved.get(name)) is not None:
            reordered[name] = reorder_rows(optimizer, links, slot, reorder, name, before.shape)
        if name not in fresh and (before.dtype != after.dtype or before.device != after.device):
            convert_rows(links, slot, before.dtype, before.device, after)
    for _, param in change.left:
        drop_rows(optimizer, links, slots.number(param))
        slots.remove(param)
    swapped = {before: after for _, before, after in change.replaced}
    for link in links:
        link.replace_params(swapped)
    edit_groups(groups, change, swapped)
    pending = place_joined(groups, change, following)
    slots.name_params(groups)
    optimizer.binding.writes.add()
    optimizer._carried = None
    for group in pending:
        optimizer.add_param_group(group)
        if "name" not in group:
            following.default = groups[-1]
    check_names(groups)
    optimizer._find_shards()
    _attach(optimizer, links, find_sizes(change.replaced))
    return describe_change(optimizer, change, fresh, resized, reordered, restarted)


def _check_tensors(links: Sequence[Module], change: Change) -> None:
    """Raise an error for new parameters without memory, and for sharded ones if links have state of whole ones."""
    tensors = [after for _, _, after in change.replaced] + [param for _, param in change.joined]
    check_tensors(tensors)
    if any(map(is_sharded, tensors)) and any(link.rows for link in links):
        raise ChainError(
            f"the module has sharded parameters now ({list_some(list(change.names.values()))}), and the optimizer has state of "
            "whole ones; shard the module before the first step, or make a new Optimizer and load the state_dict() of this one"
        )


def _find_reshaped(change: Change, following: Following) -> tuple[set[str], dict[str, Reorder | None]]:
    """Return the names of resized parameters and of those with another shape, and how labels of others were reordered."""
    # A reordering of units is a resize, too, though the shapes are equal.
    units = {name for name, before, after in change.replaced if RESIZED.find(before, after) is not None}
    others = [each for each in change.replaced if each[0] not in units]
    moved = find_moved_labels(others, following.axes, list_parameter_axes(following.model))
    fresh = {
        name
        for name, before, after in others
        if (moved[name] is None if name in moved else before.shape != after.shape)
    }
    return units | fresh, moved


def _protect(optimizer: Optimizer, links: Sequence[Module], guard: Guard) -> None:
    """Register everything that `_apply_change` changes with a guard; tensors of states are not written to."""
    slots, groups = optimizer.binding.slots, optimizer.param_groups
    before = list(groups)
    lists = [(group, list(group["params"]), list(group.get("param_names", ()))) for group in groups]
    axes, carried = optimizer.binding.axes, optimizer._carried

    def restore_groups() -> None:
        groups[:] = before
        for group, params, names in lists:
            group["params"][:] = params
            if "param_names" in group:
                group["param_names"] = names
        optimizer.binding.axes, optimizer._carried = axes, carried
        slots.name_params(groups)
        optimizer.binding.writes.add()

    guard.add(restore_groups)
    guard.add(partial(slots.restore_tables, slots.copy_tables()))
    for link in links:
        guard.add(link.row_writes.add)
        guard.mappings(link.rows, link.global_state, link.settings.local, link._stand_ins, link.__dict__)


def _restart(optimizer: Optimizer, links: Sequence[Module], change: Change, fresh: Iterable[str]) -> list[str]:
    """Reset links whose state is over several parameters, if those have changed; return the names of the links.

    Args:
        optimizer: The optimizer.
        links: Its links.
        change: The difference between its groups and the module.
        fresh: The names of parameters that were resized or have another shape.
    """
    names = {name for name, _ in change.left} | {name for name, _, _ in change.replaced}
    active = [param for param in optimizer.list_params() if param.requires_grad]
    grown = any(param.requires_grad for _, param in change.joined)
    restarted: list[str] = []
    for link in links:
        in_vector = [part.rpartition(":")[0] for part in link.global_state.get(VECTOR, ())]
        lacks_new = grown and len(in_vector) == len(active)
        outside = link.keeps_outside and bool(fresh)
        if outside or (in_vector and (lacks_new or names & set(in_vector))):
            link.reset()
            restarted.append(type(link).__name__)
        if names or grown:
            restarted += _drop_placeholders(link)
    return restarted


def _drop_placeholders(link: Module) -> list[str]:
    """Drop placeholders that belong to all parameters, or to one by its position; return the names of the reset children."""
    shared = [key for key in link._stand_ins if not key.startswith(PER_PARAMETER)]
    if not shared:
        return []
    for key in shared:
        del link._stand_ins[key]
    for child in link.children.values():
        child.reset()
    return [type(child).__name__ for child in link.children.values()]


def _attach(optimizer: Optimizer, links: Sequence[Module], sizes: Mapping[str, int]) -> None:
    """Refresh the settings of links that depend on the axes of the model."""
    axes = optimizer.binding.axes if optimizer._axes_given else None
    if axes is not None and sizes and all(name in axes for name in sizes):
        resized = axes.resize(sizes)
        for link in links:
            if getattr(link, "axes", None) is axes:
                vars(link)["axes"] = resized
        axes = resized
    try:
        optimizer.binding.axes = take_axes(optimizer, axes)
    except ValueError as error:
        error.add_note(
            "The module was edited. Trace it again, make a new Optimizer(net, ..., axes=...), and load this one's state_dict()."
        )
        raise
    for link in links:
        if link.reads_axes:
            link.attached(optimizer)
