"""Indexing: ``t[...]`` with labels that follow exactly, ``sel`` by label, ``isel`` by position.

An index is parsed into tokens, one per axis, and applied in the order of torch: first selections along single axes
(positions, slices, Spaces, new axes), then index tensors, which are paired with each other. The labels of the first kind depend
on the index alone and are cached; those of a mask or an index tensor depend on its values.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from ._axes import Axes, Pair, as_pair, cache_by_axes, intern_pairs, make_unnamed
from ._errors import UnknownLabelError
from ._gather import Gather, gather
from ._pairing import align_all, align_to_fixed, pair
from ._space import BROADCAST, Space
from ._tensor import Tensor, finish

# A hashable token of the first kind.
_Token = tuple[Any, ...]
_new: Final = object.__new__
_ALL: Final[_Token] = ("slice", None, None, None)


def get(t: Tensor, key: Any) -> Tensor:
    """``t[key]``."""
    try:
        if type(key) is int and t._axes.rest is not None:  # the common case
            return finish(t._data[key], t._axes.rest)
        return _get(t, key)
    except UnknownLabelError:
        raise
    except IndexError as error:
        raise IndexError(f"{error}; {t._axes.listing()}, of shape {tuple(t._data.shape)}") from None


def _get(t: Tensor, key: Any) -> Tensor:
    if isinstance(key, Mapping):
        key = place_keys(t, key)
    tokens, advanced = _parse(t, key)
    moves, gathers, limits, axes = t._axes.run(_plan_basic, tokens)
    data = t._data
    for axis, least, exact in limits:
        size = data.shape[axis]
        if size < least or (exact and size != least):
            raise UnknownLabelError(f"{t._axes.describe(axis)} has size {size} and no position {least - 1}")
    if moves is not None:
        data = data[tuple(slice(*move[1:]) if move[0] == "slice" else move[1] for move in moves)]
    for at, plan in gathers:
        data = gather(data, at, plan, 0.0)
    if len(advanced) == 1 and isinstance(advanced[0][1], torch.Tensor) and advanced[0][1].ndim == 1:
        data, axes = _index_by_vector(data, axes, *advanced[0])
    elif advanced:
        data, axes = _index_together(data, axes, advanced)
    return finish(data, axes)


def place_keys(t: Tensor, keys: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Return the indices of named axes as one key, in the order of the axes."""
    key: list[Any] = [slice(None)] * t._data.ndim
    for which, index in keys.items():
        key[t._axes.axis(which)] = index
    return tuple(key)


# -- parsing a key -----------------------------------------------------------------------------------------------------


def _parse(t: Tensor, key: Any) -> tuple[tuple[_Token, ...], list[tuple[int, Any]]]:
    """Return the tokens of the first kind for every axis, and the index tensors with the index of their token."""
    keys, several = _expand_keys(t, key)
    tokens: list[_Token] = []
    advanced: list[tuple[int, Any]] = []
    axis = 0
    for each in keys:
        if isinstance(each, slice):
            each = _convert_slice(each, t._data.shape[axis])
        # The size may be symbolic in compiled code, where negative positions of a list can't be resolved.
        if type(each) is list and (several or (t._axes.spaces[axis] is None and min(each, default=0) < 0)):
            each = torch.tensor(each, dtype=torch.int64, device=t._data.device)
        if isinstance(each, (torch.Tensor, Tensor)):
            # The axis counts from the tensor after single positions are dropped and new axes inserted.
            advanced.append((sum(token[0] != "at" for token in tokens), each))
            tokens += [_ALL] * _count_consumed(each)
        elif isinstance(each, list):
            tokens.append(("list", tuple(each)))
        elif isinstance(each, tuple):
            tokens.append(each)
        else:
            kind = "new" if each is None or isinstance(each, bool) else "at" if isinstance(each, int) else "space"
            tokens.append((kind, each))
        axis += 1 if isinstance(each, tuple) else _count_consumed(each)
    return tuple(tokens), advanced


def _expand_keys(t: Tensor, key: Any) -> tuple[list[Any], bool]:
    """Return the parts of a key with '...' replaced by slices, and whether it has several index tensors."""
    keys = [_convert_key(each) for each in (key if isinstance(key, tuple) else (key,))]
    several = sum(isinstance(each, (torch.Tensor, Tensor, list, bool)) for each in keys) > 1
    if several and any(isinstance(each, bool) for each in keys):
        raise IndexError(f"the index {key!r} has a single truth value beside another index tensor; use one of them")
    used = sum(map(_count_consumed, keys))
    dots = [i for i, each in enumerate(keys) if each is Ellipsis] or [len(keys)]
    if len(dots) > 1 or used > t._data.ndim:
        raise IndexError(f"the index {key!r} has more than one '...', or is for more axes than there are: {used}")
    keys[dots[0] : dots[0] + 1] = [slice(None)] * (t._data.ndim - used)
    return keys, several


def _convert_key(key: Any) -> Any:
    """Convert one part of a key to an int, slice, None, ..., bool, Space, list of ints, or an index tensor."""
    if key is None or key is Ellipsis or isinstance(key, (bool, slice, Space)):
        return key
    if isinstance(key, (list, range)):
        values = list(key)
        nested = any(isinstance(each, (list, tuple, torch.Tensor, Tensor, np.ndarray)) for each in values)
        if not nested and not (values and all(isinstance(each, (bool, np.bool_)) for each in values)):
            return [_position(each) for each in values]
        key = torch.as_tensor(values)
    if isinstance(key, (np.ndarray, np.bool_)):
        key = torch.as_tensor(key)
    return _convert_index(key) if isinstance(key, (Tensor, torch.Tensor)) else _position(key)


def _convert_index(key: Tensor | torch.Tensor) -> Any:
    """Return an index tensor as positions or a mask; one without axes as an int or a bool."""
    data = key._data if isinstance(key, Tensor) else key
    if data.is_floating_point() or data.is_complex():
        raise IndexError(f"a tensor of {data.dtype} can't be an index; integers select positions, booleans are masks")
    if data.dtype not in (torch.bool, torch.int64, torch.int32):
        key = key.to(torch.int64)  # torch reads uint8 as a mask and rejects other integers
    if data.ndim:
        return key
    return bool(data) if data.dtype is torch.bool else int(data)


def _position(key: Any) -> int:
    # NumPy gives durations an `__index__`.
    if not isinstance(key, (str, bytes, bool, np.timedelta64)) and hasattr(key, "__index__"):
        return operator.index(key)
    raise TypeError(
        f"an index is a position, slice, list, mask, Space, None or '...', not {key!r}; "
        f"select by label with t.sel(axis={key!r})"
    )


def _count_consumed(key: Any) -> int:
    if key is None or key is Ellipsis or isinstance(key, bool):
        return 0
    data = key._data if isinstance(key, Tensor) else key
    return data.ndim if isinstance(data, torch.Tensor) and data.dtype is torch.bool else 1


def _convert_slice(key: slice, size: int) -> _Token | list[int]:
    parts = [None if part is None else operator.index(part) for part in (key.start, key.stop, key.step)]
    if parts[2] is None or parts[2] > 0:
        return ("slice", *parts)
    return list(range(*slice(*parts).indices(size)))


# -- positions, slices, spaces, new axes -------------------------------------------------------------------------------


def _plan_basic(
    axes: Axes, tokens: tuple[_Token, ...]
) -> tuple[tuple[_Token, ...] | None, tuple[tuple[int, Gather], ...], tuple[tuple[int, int, bool], ...], Axes]:
    """Return the index for torch, the gathers after it, the least or exact sizes of axes, and the axes of the result."""
    limits: list[tuple[int, int, bool]] = []
    moves: list[_Token] = []
    gathers: list[tuple[int, Gather]] = []
    pairs: list[Pair] = []
    picks: dict[str, slice | Sequence[int]] = {}
    axis = 0
    for token in tokens:
        if token[0] == "new":
            moves.append(token)
            pairs.append((None, BROADCAST if token[1] is None else None))
            continue
        moves.append(token if token[0] in ("at", "slice") else _ALL)
        if token == _ALL:
            pairs.append((axes.names[axis], axes.spaces[axis]))
        elif token[0] == "slice":
            name, space = axes.names[axis], axes.spaces[axis]
            part = slice(*token[1:])
            if name is not None:
                picks[name] = part
            pairs.append((name, None if space is None else as_pair(space[part])[1]))
        elif token[0] != "at":
            choose = _choose_positions if token[0] == "space" else _choose_listed
            name, chosen, positions = choose(axes, axis, token[1])
            if positions is not None:
                plan = Gather(positions)
                gathers.append((len(pairs), plan))
                limits.append((axis, plan.highest + 1, False))
                if name is not None:
                    picks[name] = positions
            elif axes.spaces[axis] is None:
                limits.append((axis, len(token[1]), True))
            pairs.append((name, chosen))
        axis += 1
    index = tuple(moves) if set(moves) != {_ALL} else None
    return index, tuple(gathers), tuple(limits), axes.carry(intern_pairs(pairs), picks)


def _choose_listed(
    axes: Axes, axis: int, positions: Sequence[int]
) -> tuple[str | None, Space | None, Sequence[int] | None]:
    """Return the name and Space of an axis indexed by a list of positions, and the positions counted from the start."""
    name, space = axes.names[axis], axes.spaces[axis]
    if space is None:
        return name, None, positions
    return name, _pick_labels(space, positions, axes.describe(axis)), [at % len(space) for at in positions]


def _pick_labels(space: Space, positions: Sequence[int], called: str) -> Space | None:
    places = [at % len(space) if len(space) else at for at in positions]
    if space.labelled and len(set(places)) != len(places):
        twice = next(space[at] for at in places if places.count(at) > 1)
        raise ValueError(
            f"the index takes label {twice!r} of {called} more than once, and labels are distinct; "
            "make the axis positional first: t.relabel(axis, None)"
        )
    return as_pair(space[list(positions)])[1]


def _choose_positions(axes: Axes, axis: int, wanted: Space) -> tuple[str | None, Space | None, Sequence[int] | None]:
    """Return the name and Space of an axis indexed by a Space, and the positions to take; None for all in order."""
    name, space = axes.names[axis], axes.spaces[axis]
    refusal = f"{axes.describe(axis)}, {space or 'positional'!r}, can't be indexed by {wanted!r}"
    if None not in (wanted.name, name) and wanted.name != name:
        raise UnknownLabelError(f"{refusal}, which has another name")
    name = wanted.name if name is None else name
    if wanted.broadcast != axes.stretches(axis):
        raise UnknownLabelError(f"{refusal}: only one is BROADCAST")
    if wanted.broadcast or wanted.positional:
        if space is not None and len(wanted) != len(space):
            raise UnknownLabelError(f"{refusal}: it has {len(space)} labels")
        return name, space, None
    own = Space(sys.maxsize) if space is None else space
    positions = own.locate(wanted)
    if positions.min(initial=0) < 0:
        raise UnknownLabelError(f"{refusal}: it has no label {wanted[int(positions.argmin())]!r}")
    same = space is not None and len(positions) == len(space) and bool((positions == np.arange(len(space))).all())
    return name, wanted, None if same else positions.tolist()


# -- index tensors and masks -------------------------------------------------------------------------------------------


@cache_by_axes
def _pick_axes(axes: Axes, at: int, positions: tuple[int, ...]) -> Axes:
    name, space = axes.names[at], axes.spaces[at]
    picked = None if space is None else _pick_labels(space, positions, axes.describe(at))
    return axes.carry(axes.put(at, (name, picked)), {} if name is None else {name: positions})


def _index_by_vector(data: torch.Tensor, axes: Axes, at: int, index: torch.Tensor) -> tuple[torch.Tensor, Axes]:
    """Index one axis by a plain vector of positions, or by a mask; labels are selected like entries."""
    result = data[(slice(None),) * at + (index,)]
    if axes.spaces[at] is None and (axes.coordinates is None or not axes.coordinates.entries):
        return result, axes
    positions = index.nonzero().flatten() if index.dtype is torch.bool else index
    return result, _pick_axes(axes, at, tuple(positions.tolist()))


def _index_together(data: torch.Tensor, axes: Axes, advanced: list[tuple[int, Any]]) -> tuple[torch.Tensor, Axes]:
    """Index by several index tensors, or by one that is labelled: they are paired, and their axes replace the indexed ones."""
    indices: list[torch.Tensor] = []
    index_axes: list[Axes] = []
    places: list[int] = []
    for at, index in advanced:
        labelled = isinstance(index, Tensor)
        raw = index._data if isinstance(index, Tensor) else index
        if raw.dtype is torch.bool:
            if labelled:
                covered = axes.take(range(at, at + raw.ndim))
                raw = align_to_fixed(covered, index._axes, raw, "a mask", None)
            if tuple(raw.shape) != tuple(data.shape[at : at + raw.ndim]):
                raise IndexError(
                    f"a mask of shape {tuple(raw.shape)} does not fit the axes from {axes.describe(at)} on, of shape "
                    f"{tuple(data.shape[at : at + raw.ndim])}"
                )
            if len(advanced) == 1 and raw.ndim == 1:
                return _index_by_vector(data, axes, at, raw)
            for offset, part in enumerate(raw.nonzero(as_tuple=True)):
                indices.append(part)
                index_axes.append(make_unnamed(1))
                places.append(at + offset)
        else:
            indices.append(raw)
            index_axes.append(index._axes if labelled else make_unnamed(raw.ndim))
            places.append(at)
    # Positions are always paired exactly, because a missing position can't be filled with a number.
    plan = pair(index_axes[0], tuple(index_axes[1:]), "exact", 0.0)
    indices = align_all(plan, indices)
    key: list[Any] = [slice(None)] * data.ndim
    for place, index in zip(places, indices, strict=True):
        key[place] = index
    return data[tuple(key)], _replace_axes(axes, tuple(places), plan.axes)


@cache_by_axes
def _replace_axes(axes: Axes, places: tuple[int, ...], new: Axes) -> Axes:
    adjacent = places == tuple(range(places[0], places[0] + len(places)))
    pairs = [pair for i, pair in enumerate(axes.pairs()) if i not in places]
    front = places[0] if adjacent else 0
    pairs[front:front] = new.pairs()
    return intern_pairs(pairs)
