"""Indexing: ``t[...]`` with labels that follow exactly, ``sel`` by label, ``isel`` by position.

An index is taken apart into tokens, one per axis, and applied as torch applies it: first what selects along single axes
(positions, slices, Spaces, new axes), then the index tensors, which are paired with each other. The labels of the first
kind depend on the index alone and are remembered; a mask or an index tensor has to be looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from ._axes import SCALAR, Axes, Pair, as_pair, cache_by_axes, intern_pairs, make_unnamed
from ._errors import UnknownLabelError
from ._gather import Gather, gather
from ._pairing import align_all, align_to_fixed, pair
from ._space import BROADCAST, Space
from ._tensor import Tensor, finish

# A token of the first kind, in a form that can be remembered.
_Token = tuple[Any, ...]
_new: Final = object.__new__
_ALL: Final[_Token] = ("slice", None, None, None)


def get(t: Tensor, key: Any) -> Tensor:
    """``t[key]``."""
    if type(key) is int:
        axes = t._axes.rest()
        try:
            data = t._data[key]
        except IndexError:
            raise IndexError(_describe_out_of_range(t, 0, key)) from None
        if axes is SCALAR:
            return finish(data, axes)
        made = _new(Tensor)
        made._data = data
        made._axes = axes
        return made
    tokens, advanced = parse(t, key)
    data, axes = _apply_basic(t, tokens)
    if advanced:
        data, axes = _apply_advanced(data, axes, advanced)
    return finish(data, axes)


def _describe_out_of_range(t: Tensor, axis: int, at: int) -> str:
    if not t._data.ndim:
        return "a tensor without axes can't be indexed by a position; use .item()"
    return f"position {at} is out of range for {t._axes.describe(axis)} of size {t._data.shape[axis]}"


# -- taking a key apart ------------------------------------------------------------------------------------------------


def parse(t: Tensor, key: Any) -> tuple[tuple[_Token, ...], list[tuple[int, Any]]]:
    """The tokens of the first kind for every axis, and the index tensors with the place of their token."""
    keys = list(key) if isinstance(key, tuple) else [key]
    keys = [_convert_key(each) for each in keys]
    dots = [i for i, each in enumerate(keys) if each is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index has at most one '...'")
    truths = sum(isinstance(each, bool) for each in keys)
    if truths > 1 or (truths and any(isinstance(each, (torch.Tensor, Tensor, list)) for each in keys)):
        raise IndexError(f"the index {key!r} has a single truth value beside another index tensor; use one of them")
    used = 0
    for each in keys:
        used += _count_consumed(each)
    if used > t._data.ndim:
        raise IndexError(f"the index {key!r} is for {used} axes, but there are {t._data.ndim}; {t._axes.listing()}")
    fill = [slice(None)] * (t._data.ndim - used)
    at = dots[0] if dots else len(keys)
    keys[at : at + 1] = fill
    tokens: list[_Token] = []
    advanced: list[tuple[int, Any]] = []
    axis = 0
    for each in keys:
        if type(each) is list:
            paired = sum(isinstance(other, (torch.Tensor, Tensor, list)) for other in keys) > 1
            # A compiler need not know how many positions there are, and then can't count them from the end.
            if paired or (t._axes.spaces[axis] is None and min(each, default=0) < 0):
                each = torch.tensor(each, dtype=torch.int64, device=t._data.device)
        if isinstance(each, (torch.Tensor, Tensor)):
            # Positions will be gone and new axes there when the index tensors are applied.
            advanced.append((sum(token[0] != "at" for token in tokens), each))
            for _ in range(_count_consumed(each)):
                tokens.append(_ALL)
        else:
            tokens.append(_token(t, axis, each))
        axis += _count_consumed(each)
    return tuple(tokens), advanced


def _convert_key(key: Any) -> Any:
    """One part of a key as an int, slice, None, ..., bool, Space, list of ints, or an index tensor."""
    if key is None or key is Ellipsis or isinstance(key, (bool, slice, Space)):
        return key
    if isinstance(key, (Tensor, torch.Tensor)):
        data = key._data if isinstance(key, Tensor) else key
        if data.is_floating_point() or data.is_complex():
            raise IndexError(
                f"a tensor of {data.dtype} can't be an index; integers select positions, booleans are masks"
            )
        if data.dtype not in (torch.bool, torch.int64, torch.int32):
            key = key.to(torch.int64)  # positions, as any integers; torch takes bytes for a mask and refuses others
        if data.ndim:
            return key
        return bool(data) if data.dtype is torch.bool else int(data)
    if isinstance(key, np.ndarray):
        if key.dtype.kind not in "biu":
            raise IndexError(
                f"an array of {key.dtype} can't be an index; integers select positions, booleans are masks"
            )
        return _convert_key(torch.as_tensor(key))
    if isinstance(key, np.bool_):
        return bool(key)
    if isinstance(key, (list, range)):
        values = list(key)
        if any(isinstance(each, (list, tuple, torch.Tensor, Tensor, np.ndarray)) for each in values):
            return _convert_key(torch.as_tensor(values))
        if values and all(isinstance(each, (bool, np.bool_)) for each in values):
            return torch.as_tensor(values)
        return [_position(each) for each in values]
    return _position(key)


def _position(key: Any) -> int:
    if isinstance(key, (str, bytes, bool)):
        raise TypeError(f"{key!r} is not a position; select by label with t.sel(axis={key!r})")
    try:
        return operator.index(key)
    except TypeError:
        raise TypeError(
            f"an index is a position, slice, list, mask, Space, None or '...', not a {type(key).__name__}; "
            "select by label with t.sel(axis=label)"
        ) from None


def _count_consumed(key: Any) -> int:
    if key is None or key is Ellipsis or isinstance(key, bool):
        return 0
    if isinstance(key, Tensor):
        key = key._data
    if isinstance(key, torch.Tensor) and key.dtype is torch.bool:
        return key.ndim
    return 1


def _token(t: Tensor, axis: int, key: Any) -> _Token:
    if key is None:
        return ("new", None)
    if isinstance(key, bool):
        return ("new", key)
    if isinstance(key, int):
        size = t._data.shape[axis]
        if not -size <= key < size:
            raise IndexError(_describe_out_of_range(t, axis, key))
        return ("at", key)
    if isinstance(key, slice):
        start, stop, step = (None if part is None else operator.index(part) for part in (key.start, key.stop, key.step))
        if step is not None and step <= 0:
            if step == 0:
                raise ValueError("the step of a slice can't be zero")
            key = list(range(*slice(start, stop, step).indices(t._data.shape[axis])))
        else:
            return ("slice", start, stop, step)
    if isinstance(key, list):
        size = t._data.shape[axis]
        for at in key:
            if not -size <= at < size:
                raise IndexError(_describe_out_of_range(t, axis, at))
        return ("list", tuple(key))
    return ("space", key)


# -- positions, slices, spaces, new axes -------------------------------------------------------------------------------


def _apply_basic(t: Tensor, tokens: tuple[_Token, ...]) -> tuple[torch.Tensor, Axes]:
    moves, gathers, sizes, axes = t._axes.run(_basic, tokens)
    data = t._data
    for axis, size in sizes:
        if data.shape[axis] != size:
            raise UnknownLabelError(
                f"{t._axes.describe(axis)} has size {data.shape[axis]} and can't be indexed by a Space of size {size}"
            )
    for axis, _, plan in gathers:
        if plan.highest >= data.shape[axis]:
            raise UnknownLabelError(
                f"{t._axes.describe(axis)} has size {data.shape[axis]} and no position {plan.highest}"
            )
    if moves is not None:
        data = data[tuple(slice(*move[1:]) if move[0] == "slice" else move[1] for move in moves)]
    for _, at, plan in gathers:
        data = gather(data, at, plan, 0.0)
    return data, axes


def _basic(
    axes: Axes, tokens: tuple[_Token, ...]
) -> tuple[tuple[_Token, ...] | None, tuple[tuple[int, int, Gather], ...], tuple[tuple[int, int], ...], Axes]:
    """What torch is to do, what is to be gathered then (of which axis, now where), sizes that must be so, and the axes."""
    sizes: list[tuple[int, int]] = []
    moves: list[_Token] = []
    gathers: list[tuple[int, int, Gather]] = []
    pairs: list[Pair] = []
    axis = 0
    for token in tokens:
        if token[0] == "new":
            moves.append(token)
            pairs.append((None, BROADCAST if token[1] is None else None))
            continue
        name, space = axes.names[axis], axes.spaces[axis]
        if token[0] == "at":
            moves.append(token)
        elif token[0] == "slice":
            moves.append(token)
            if space is not None and token != _ALL:
                space = space[slice(*token[1:])]
                space = None if space.positional else space
            pairs.append((name, space))
        elif token[0] == "list":
            moves.append(_ALL)
            positions = token[1] if space is None else [at % len(space) for at in token[1]]
            gathers.append((axis, len(pairs), Gather(positions)))
            pairs.append((name, _pick_labels(space, positions, axes.describe(axis))))
        else:
            moves.append(_ALL)
            chosen, positions = _choose_positions(axes, axis, token[1])
            if positions is not None:
                gathers.append((axis, len(pairs), Gather(positions)))
            elif space is None:
                sizes.append((axis, len(chosen)))
            pairs.append(as_pair(chosen))
        axis += 1
    nothing = all(move == _ALL for move in moves)
    return None if nothing else tuple(moves), tuple(gathers), tuple(sizes), intern_pairs(pairs)


def _pick_labels(space: Space | None, positions: Sequence[int], called: str) -> Space | None:
    if space is None:
        return None
    if space.labelled and len({at % len(space) for at in positions}) != len(positions):
        places = [at % len(space) for at in positions]
        twice = next(space[at] for at in places if places.count(at) > 1)
        raise ValueError(
            f"the index takes label {twice!r} of {called} more than once, and labels are distinct; "
            "make the axis positional first: t.relabel(axis, None)"
        )
    picked = space[list(positions)]
    return None if picked.positional else picked


def _choose_positions(axes: Axes, axis: int, wanted: Space) -> tuple[Space, list[int] | None]:
    """The Space of an axis indexed by a Space, and the positions to take; None for all as they are."""
    name, space = axes.names[axis], axes.spaces[axis]
    called = axes.describe(axis)
    if wanted.name is not None and name is not None and wanted.name != name:
        raise UnknownLabelError(f"{called} can't be indexed by {wanted!r}, which has another name")
    wanted = wanted.rename(name if name is not None else wanted.name)
    if wanted.broadcast or (space is not None and space.broadcast):
        if space is not None and space.broadcast and wanted.broadcast:
            return space, None
        raise UnknownLabelError(
            f"{called}, {space or 'positional'!r}, can't be indexed by {wanted!r}: only one is BROADCAST"
        )
    if space is None:
        if wanted.positional:
            return wanted, None
        positions = [_position(label) for label in wanted]
        if min(positions, default=0) < 0:
            raise UnknownLabelError(
                f"{called} is positional and has no position {min(positions)} of the index {wanted!r}"
            )
        return wanted, positions
    if wanted.positional:
        if len(wanted) != len(space):
            raise UnknownLabelError(f"{called} has {len(space)} labels and can't be indexed by {wanted!r}")
        return space, None
    missing = [label for label in wanted if label not in space]
    if missing:
        raise UnknownLabelError(f"{called}, {space!r}, has no label {missing[0]!r} of the index {wanted!r}")
    positions = [space.index(label) for label in wanted]
    return wanted, None if positions == list(range(len(space))) else positions


# -- index tensors and masks -------------------------------------------------------------------------------------------


def _apply_advanced(data: torch.Tensor, axes: Axes, advanced: list[tuple[int, Any]]) -> tuple[torch.Tensor, Axes]:
    """Apply index tensors to what the tokens of the first kind have left, exactly where torch puts them."""
    if len(advanced) == 1:
        at, index = advanced[0]
        if isinstance(index, torch.Tensor) and index.ndim == 1:
            return _index_by_vector(data, axes, at, index)
    return _index_together(data, axes, advanced)


@cache_by_axes
def _pick_axes(axes: Axes, at: int, positions: tuple[int, ...]) -> Axes:
    return axes.put(at, (axes.names[at], _pick_labels(axes.spaces[at], positions, axes.describe(at))))


def _index_by_vector(data: torch.Tensor, axes: Axes, at: int, index: torch.Tensor) -> tuple[torch.Tensor, Axes]:
    """A plain vector of positions, or a mask, along one axis: the labels are picked as the entries are."""
    space = axes.spaces[at]
    if index.dtype is torch.bool and index.shape[0] != data.shape[at]:
        raise IndexError(
            f"a mask of {index.shape[0]} entries does not fit {axes.describe(at)} of size {data.shape[at]}"
        )
    try:
        result = data[(slice(None),) * at + (index,)]
    except IndexError as error:
        raise IndexError(f"an index of {axes.describe(at)} of size {data.shape[at]} is out of range: {error}") from None
    if space is None:
        return result, axes
    positions = index.nonzero().flatten() if index.dtype is torch.bool else index
    return result, _pick_axes(axes, at, tuple(positions.tolist()))


def _index_together(data: torch.Tensor, axes: Axes, advanced: list[tuple[int, Any]]) -> tuple[torch.Tensor, Axes]:
    """Several index tensors, or one with axes of its own: they are paired, and their axes replace those indexed."""
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
    # A position that is missing can't be filled with a number, whatever the join policy says.
    plan = pair(index_axes[0], tuple(index_axes[1:]), "exact", 0.0)
    indices = align_all(plan, indices)
    key: list[Any] = [slice(None)] * data.ndim
    for place, index in zip(places, indices, strict=True):
        key[place] = index
    replaced = _replace_axes(axes, tuple(places), plan.axes)
    try:
        return data[tuple(key)], replaced
    except IndexError as error:
        which = ", ".join(f"{axes.describe(place)} of size {data.shape[place]}" for place in places)
        raise IndexError(f"an index of {which} is out of range: {error}") from None


@cache_by_axes
def _replace_axes(axes: Axes, places: tuple[int, ...], new: Axes) -> Axes:
    adjacent = places == tuple(range(places[0], places[0] + len(places)))
    kept = [pair for i, pair in enumerate(axes.pairs()) if i not in places]
    front = places[0] if adjacent else 0
    kept[front:front] = new.pairs()
    return intern_pairs(kept)
