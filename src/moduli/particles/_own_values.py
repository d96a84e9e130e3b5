"""The values of its own that a particle keeps when it follows an edit of a relative.

A relative receives the tensors that an edit assigned. If the edit only changed the sizes of a layer or parameter, the relative
keeps its own values in the entries that the old and the new tensor have in common: by label where an axis has labels, otherwise
by position. New entries have the assigned values. If no size changed, the assigned values replace its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from moduli.layout import (
    BufferEntry,
    Entry,
    Overlap,
    Structure,
    UnitMap,
    cut_like,
    find_overlap,
    is_sharded,
    make_whole,
)

from ._facts import unwrap_kind

if TYPE_CHECKING:
    from ._version import Version
    from .edits import ParticleEdit

WAYS = ("keep", "copy")
_ATTRIBUTE = "on_follow"
_override: ContextVar[str | None] = ContextVar("on_follow", default=None)


class OwnValue(NamedTuple):
    """The source of a particle's own values for a tensor that an edit adds.

    Attributes:
        source: The identifier of its parameter, or the module and the name of its buffer; a `ComputedValue` of these; None if it
            has none.
        overlap: The entries of the new tensor that the particle keeps.
        value: The values of the other entries if they are not the assigned ones, as after two edits that were joined.
        owners: The identifiers of the modules that contain the source, the innermost first.
        back: For a tensor that `rollback` restores: its identifier, and the number of the last version that had it.
    """

    source: Any
    overlap: Overlap | None
    value: Tensor | None = None
    owners: tuple[int, ...] = ()
    back: tuple[Any, int] | None = None


_NOTHING = OwnValue(None, None)


@dataclass(frozen=True, eq=False)
class ComputedValue:
    """Own values that have to be computed, because several edits were joined into one.

    Attributes:
        source: The source of the particle's values; None if they are computed from `base`.
        base: A tensor that an earlier edit added.
        own: The particle's own values in that tensor.
        maps: The resizes of axes after that.
    """

    source: Any
    base: Tensor | None = None
    own: OwnValue = _NOTHING
    maps: tuple[UnitMap, ...] = ()


class Slot(NamedTuple):
    """One parameter or buffer of a version: its key, layout entry, the class of its module, and the modules that contain it."""

    key: Any
    entry: Entry | BufferEntry
    kind: Any
    owners: tuple[int, ...]


# -- when an edit is made ------------------------------------------------------------------------------------------------


def find_own_values(version: Version, following: Version, edit: ParticleEdit) -> None:
    """Record in an edit the values that particles keep when they follow it.

    Args:
        version: The version before.
        following: The version after.
        edit: The edit, whose tensors and names are complete.
    """
    adds, had = edit.add_params or edit.buffers or edit.add_modules, version.params or version.structure.layout.buffers
    if not (adds and had):
        return
    units: dict[str, list[tuple[Slot, Slot, Overlap]]] = {}
    resized = set[str]()
    for unit, slot, old, overlap in _pair_slots(version, following, edit):
        units.setdefault(unit, []).append((slot, old, overlap))
        if not overlap.covers(slot.entry.shape, old.entry.shape):
            resized.add(unit)
    for unit in resized:
        for slot, old, overlap in units[unit]:
            table: dict[Any, OwnValue] = edit.own_buffers if isinstance(slot.key, tuple) else edit.own_params
            table.setdefault(slot.key, OwnValue(old.key, overlap, None, old.owners))


def _pair_slots(version: Version, following: Version, edit: ParticleEdit) -> Iterator[tuple[str, Slot, Slot, Overlap]]:
    """Yield each new tensor with the former one of its name and their overlap, after the assigned attribute they are in."""
    assigned = set(edit.names)
    before = dict(_list_slots(version, assigned))
    for name, slot in _list_slots(following, assigned):
        old = before.get(name)
        if old is None or not _is_new(slot.key, edit) or _has_moved(old, following):
            continue
        unit = next((prefix for prefix in _list_prefixes(name) if prefix in assigned), None)
        overlap = _find_common(slot, old)
        if unit is not None and overlap is not None:
            yield unit, slot, old, overlap


def _list_slots(version: Version, assigned: Set[str]) -> Iterator[tuple[str, Slot]]:
    """Yield the parameters and buffers of a version inside assigned attributes, under every name."""
    structure: Structure = version.structure
    layout, keys = structure.layout, version.modules
    parents, tops = {name.rpartition(".")[0] for name in assigned}, {name.partition(".")[0] for name in assigned}
    paths: dict[str, int] = {}
    for place, module in enumerate(structure.modules):
        path = module.path
        paths[path] = keys[place]
        if path not in parents and (path.partition(".")[0] not in tops or assigned.isdisjoint(_list_prefixes(path))):
            continue
        kind, prefix = unwrap_kind(module.kind), f"{path}." if path else ""
        # A module comes after those that contain it, so their paths are known.
        owners = tuple(paths[each] for each in _list_owners(path) if each in paths)
        for name, at in module.parameters:
            if at >= 0:
                entry = layout.entries[at]
                slot = Slot(version.params[at], entry, kind, owners)
                yield from ((each, slot) for each in dict.fromkeys((prefix + name, *entry.names)))
        for name, at in module.buffers:
            if at >= 0:
                yield prefix + name, Slot((keys[place], name), layout.buffers[at], kind, owners)


def _has_moved(old: Slot, following: Version) -> bool:
    """Whether a former tensor has another name in the next version, such as an item of a list after an insertion."""
    if isinstance(old.key, tuple):
        key, _ = old.key
        place = following.modules.index(key) if key in following.modules else -1
        return place >= 0 and following.structure.modules[place].path != old.entry.name.rpartition(".")[0]
    if old.key not in following.params:
        return False
    names = following.structure.layout.entries[following.params.index(old.key)].names
    return isinstance(old.entry, Entry) and not set(names).issubset(old.entry.names)


def _list_owners(path: str) -> list[str]:
    """Return the paths of a module and of those that contain it, its own first and that of the root last."""
    return [*_list_prefixes(path), ""] if path else [""]


def _list_prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _is_new(key: Any, edit: ParticleEdit) -> bool:
    if isinstance(key, tuple):
        return key[0] in edit.add_modules or key in edit.buffers
    return key in edit.add_params


def _find_common(slot: Slot, old: Slot) -> Overlap | None:
    """Return the overlap of two tensors of one name; None unless both are real, complex or integers in modules of one class."""
    new, before = slot.entry.dtype, old.entry.dtype
    alike = new.is_floating_point == before.is_floating_point and new.is_complex == before.is_complex
    if not alike or slot.kind is not old.kind:
        return None
    return find_overlap(slot.entry.shape, old.entry.shape, slot.entry.axes, old.entry.axes)


# -- when a particle follows ---------------------------------------------------------------------------------------------


@contextmanager
def follow_by(way: str) -> Iterator[None]:
    """Override `on_follow` of all modules inside a block: particles keep their own values, or copy the assigned ones."""
    token = _override.set(check_way(way, "touch"))
    try:
        yield
    finally:
        _override.reset(token)


def check_way(way: str, where: str) -> str:
    """Return `way` if it is a valid value of `on_follow`.

    Raises:
        ValueError: If it is not.
    """
    if way not in WAYS:
        raise ValueError(
            f"{where}: on_follow is {way!r}; choose 'keep' (a relative keeps its own values where an edit only changes sizes) or "
            "'copy' (it takes those that the edit assigned)"
        )
    return way


def keeps_own(modules: Mapping[int, nn.Module], owners: Sequence[int]) -> bool:
    """Whether a particle keeps its own values in a module: by the argument of `touch`, or by the innermost `on_follow`."""
    way = _override.get()
    if way is None:
        for key in owners:
            module = modules.get(key)
            choice = (
                None if module is None else module.__dict__.get(_ATTRIBUTE, getattr(type(module), _ATTRIBUTE, None))
            )
            if isinstance(choice, str):
                return check_way(choice, f"{type(module).__name__}.{_ATTRIBUTE}") == "keep"
    return way != "copy"


def write_own(target: Any, own: OwnValue, find: Callable[[Any, int | None], Any]) -> None:
    """Write a particle's own values into a new tensor, which gets their dtype, and is trained if they were.

    Args:
        target: The tensor, which has the assigned values.
        own: The source of the particle's values.
        find: Returns a tensor of the particle by identifier, for a removed one with the number of a version; or None.
    """
    _keep_kind(target, _find_original(own.source, find))
    returned = None if own.back is None else find(*own.back)
    if returned is not None and returned.shape == target.shape:
        _write(target, returned, find_overlap(target.shape, target.shape))
        return
    if own.value is not None:
        _write(target, own.value, find_overlap(target.shape, target.shape))
    source = _find_source(own.source, find)
    if source is not None:
        _write(target, source, own.overlap)


def _keep_kind(target: Any, original: Any) -> None:
    """Give a new tensor the dtype of a particle's former one, and its flag `requires_grad`: a frozen teacher stays frozen."""
    if original is None or is_sharded(target) or target.is_floating_point() != original.is_floating_point():
        return
    if target.dtype != original.dtype:
        target.data = target.data.to(original.dtype)
    if isinstance(target, nn.Parameter):
        target.requires_grad_(original.requires_grad)


def _find_original(source: Any, find: Callable[[Any, int | None], Any]) -> Any:
    """Return the particle's tensor that its own values begin with; None if there is none."""
    while isinstance(source, ComputedValue):
        source = source.source if source.base is None else source.own.source
    return None if source is None else find(source, None)


def _find_source(source: Any, find: Callable[[Any, int | None], Any]) -> Any:
    """Return a particle's own values after the edits that were joined; None if it has none."""
    if not isinstance(source, ComputedValue):
        return None if source is None else find(source, None)
    if source.base is None:
        tensor = _find_source(source.source, find)
    else:
        tensor = source.base.detach().clone()
        write_own(tensor, source.own, find)
    for unit_map in source.maps if tensor is not None else ():
        tensor = unit_map.resize(tensor)
    return tensor


def _write(target: Tensor, source: Tensor, overlap: Overlap | None) -> None:
    if overlap is None:
        overlap = find_overlap(target.shape, source.shape)
    if overlap is None:
        return
    source = make_whole(source) if is_sharded(source) else source
    if not is_sharded(target):
        overlap.copy(target, source)
        return
    whole = make_whole(target).detach().clone()
    overlap.copy(whole, source)
    with torch.no_grad():
        target.detach().copy_(cut_like(whole, target))


# -- when two edits are joined -------------------------------------------------------------------------------------------


def join_own_values(first: ParticleEdit, later: ParticleEdit, joint: ParticleEdit) -> None:
    """Record in the union of two edits the values that particles keep when they follow it.

    Args:
        first: The first edit.
        later: The edit after it.
        joint: The union, whose tensors are complete.
    """
    for table in ("own_params", "own_buffers"):
        before: dict[Any, OwnValue] = getattr(first, table)
        after: dict[Any, OwnValue] = getattr(later, table)
        both = {key: own for key, own in before.items() if key not in after and _is_new(key, joint)}
        both |= {key: _join_one(own, before, first, _read(later, key)) for key, own in after.items()}
        both |= _resize_own(before, first, later, table)
        setattr(joint, table, both)


def _resize_own(
    before: Mapping[Any, OwnValue], first: ParticleEdit, later: ParticleEdit, table: str
) -> dict[Any, OwnValue]:
    """Return the values that particles keep in tensors that the first edit adds and the later one resizes."""
    resized: dict[Any, tuple[Any, list[UnitMap]]] = dict(later.resized)
    if table == "own_buffers":
        resized = {key: (key, maps) for key, maps in later.resized_buffers.items()}
    return {
        key: OwnValue(
            ComputedValue(None, _read(first, source), before[source], tuple(maps)), None, None, before[source].owners
        )
        for key, (source, maps) in resized.items()
        if source in before
    }


def _join_one(own: OwnValue, before: Mapping[Any, OwnValue], first: ParticleEdit, assigned: Tensor) -> OwnValue:
    if own.back is not None and _was_removed(*own.back, first):
        # A tensor that the first edit removes and the later one restores is unchanged by both.
        return OwnValue(own.back[0], find_overlap(assigned.shape, assigned.shape), None, own.owners)
    between = None if isinstance(own.source, ComputedValue) else _read(first, own.source)
    earlier = _NOTHING if between is None else before.get(own.source, _NOTHING)
    if between is None or own.overlap is None or isinstance(earlier.source, ComputedValue):
        return _rewrite_own(own, before, first)
    value = (assigned if own.value is None else own.value).detach().clone()
    own.overlap.copy(value, between if earlier.value is None else earlier.value)
    if earlier.source is None or earlier.overlap is None:
        return own._replace(source=None, overlap=None, value=value)
    return OwnValue(earlier.source, own.overlap.after(earlier.overlap), value, earlier.owners, own.back)


def _was_removed(key: Any, since: int, edit: ParticleEdit) -> bool:
    """Whether an edit removed a tensor whose last version was number `since`."""
    if not edit.start <= since < edit.stop:
        return False
    if isinstance(key, tuple):
        # A buffer's key is its name, which a replacement has too: only the one at the edit's start is identified by it.
        replaced = key[0] in edit.remove_modules or key in edit.buffers or key in edit.resized_buffers
        return replaced and since == edit.start
    return key in edit.remove_params and key not in edit.reused


def _rewrite_own(own: OwnValue, before: Mapping[Any, OwnValue], first: ParticleEdit) -> OwnValue:
    return own._replace(source=_rewrite(own.source, before, first))


def _rewrite(source: Any, before: Mapping[Any, OwnValue], first: ParticleEdit) -> Any:
    """Return the source of a particle's own values before an edit, from their source after it."""
    if source is None:
        return None
    if isinstance(source, ComputedValue):
        return replace(
            source, source=_rewrite(source.source, before, first), own=_rewrite_own(source.own, before, first)
        )
    between = _read(first, source)
    if between is not None:
        return ComputedValue(None, between, before.get(source, _NOTHING))
    if source in first.resized:
        origin, maps = first.resized[source]
        return ComputedValue(origin, maps=tuple(maps))
    if source in first.resized_buffers:
        return ComputedValue(source, maps=tuple(first.resized_buffers[source]))
    return source


def _read(edit: ParticleEdit, key: Any) -> Any:
    """Return the tensor that an edit adds under an identifier; None if it adds none."""
    if not isinstance(key, tuple):
        return edit.add_params.get(key)
    if key in edit.buffers:
        return edit.buffers[key]
    module = edit.add_modules.get(key[0])
    return None if module is None else module._buffers.get(key[1])
