"""Look-up of labels on an axis: one, several, all between two, or the nearest; dates by text and by any type of date."""

from __future__ import annotations

import bisect
import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch

from ._axes import Axes, cache_by_axes
from ._dates import Period, count_attoseconds, find_instant, has_resolution_of, parse_duration, parse_period
from ._errors import UnknownLabelError
from ._instants import as_instant, get_dates, mixed_label
from ._label_sequences import ArrayLabels, show_label, show_labels
from ._space import Space
from ._tensor import Tensor


def freeze_labels(given: Any, *lists: type[Iterable[Any]]) -> tuple[bool, Any]:
    """Return whether several labels are given, and the labels in a hashable form."""
    if isinstance(getattr(given, "dtype", None), np.dtype) and getattr(given, "ndim", 0) == 1:
        return True, Space(given)  # an array, or an object with the interface of arrays
    labels = given.tolist() if isinstance(given, (Tensor, torch.Tensor)) else given
    if isinstance(labels, lists):
        return True, tuple(map(freeze_label, labels))
    return isinstance(labels, Space), freeze_label(labels)


def freeze_label(label: Any) -> Any:
    """Return one label in the form of labels of a Space: Python's numbers and NumPy's dates."""
    if isinstance(label, (np.ndarray, np.generic)):
        label = np.asarray(label)[()] if label.dtype.kind in "mM" else label.tolist()
    return mixed_label(label)


def convert_labels(axes: Axes, axis: int, labels: Iterable[Any]) -> list[Any]:
    """Convert text to labels of an axis: on dates the start of the named period, on durations the named duration.

    Args:
        axes: The axes of a tensor.
        axis: The position of one of them.
        labels: Labels and text; other labels are unmodified.
    """
    kind = _find_kind(axes.spaces[axis])
    if kind == "m":
        return [_read_duration(axes, axis, label) for label in labels]
    return [
        _read_period(axes, axis, label).start if kind == "M" and isinstance(label, str) else label for label in labels
    ]


def _find_kind(space: Space | None) -> str | None:
    """Return "M" for labels that are dates, "m" for durations, None for others."""
    dates = None if space is None else get_dates(space)
    return None if dates is None else dates.dtype.kind


def locate_labels(axes: Axes, axis: int, several: bool, labels: Any) -> int | slice | Space:
    """Return the position of a label, the Space of several, or the slice of a period of several dates.

    Args:
        axes: The axes of a tensor.
        axis: The position of one of them.
        several: Whether several labels are given.
        labels: The label or labels, from `freeze_labels`.
    """
    # NumPy compares durations of months equal to integers, so the cache needs to distinguish them.
    each = labels if type(labels) is tuple else (labels,)
    return _locate(axes, axis, several, labels, any(isinstance(label, np.timedelta64) for label in each))


@cache_by_axes
def _locate(axes: Axes, axis: int, several: bool, labels: Any, lasting: bool) -> int | slice | Space:
    """Locate labels; `lasting` says whether there are durations among them."""
    if several:
        return labels if isinstance(labels, Space) else Space(convert_labels(axes, axis, labels))
    # The size of a positional axis is checked by the caller.
    space = axes.spaces[axis] or Space(sys.maxsize)
    labels = _read_duration(axes, axis, labels)
    if isinstance(labels, str):
        dates = get_dates(space)
        if dates is not None:
            period = _read_period(axes, axis, labels)
            if not has_resolution_of(dates, period):
                return _locate_period(axes, axis, space, period, labels)
            labels = period.start
    if labels not in space:
        raise _describe_unknown(axes, axis, labels)
    return space.index(labels)


def _describe_unknown(axes: Axes, axis: int, label: Any) -> UnknownLabelError:
    space = axes.spaces[axis]
    listed = "positional" if space is None else show_labels(space._labels)
    return UnknownLabelError(f"{axes.describe(axis)} has no label {show_label(label)}; its labels are {listed}")


def _read_period(axes: Axes, axis: int, text: str) -> Period:
    try:
        return parse_period(text)
    except ValueError as error:
        raise UnknownLabelError(f"{axes.describe(axis)} has dates for labels, and {error}") from None


def _read_duration(axes: Axes, axis: int, label: Any) -> Any:
    """Return the duration that text names on an axis of durations; other labels unmodified."""
    if not isinstance(label, str) or _find_kind(axes.spaces[axis]) != "m":
        return label
    try:
        return freeze_label(parse_duration(label))
    except ValueError as error:
        raise UnknownLabelError(f"{axes.describe(axis)} has durations for labels, and {error}") from None


def _locate_period(axes: Axes, axis: int, space: Space, period: Period, text: str) -> slice | Space:
    places = sort_labels(axes, axis, "a period")[1]
    first, last = (_find_place(axes, axis, end) for end in (period.start, period.end))
    if first == last:
        raise _describe_unknown(axes, axis, text)
    if _direction(places) > 0:
        return slice(first, last)
    chosen: Space = space[sorted(places[first:last])]
    return chosen


# -- labels that have an order -------------------------------------------------------------------------------------------


@cache_by_axes
def sort_labels(axes: Axes, axis: int, what: str) -> tuple[Sequence[Any], Sequence[int]]:
    """Return the labels of an axis in ascending order, and their positions.

    Args:
        axes: The axes of a tensor.
        axis: The position of one of them.
        what: The name of the operation in errors.
    """
    space = require_labels(axes, axis, what)
    labels: Sequence[Any] = space._labels
    if isinstance(labels, ArrayLabels):
        ordered, places = labels.order()
        return ArrayLabels(ordered), range(len(labels)) if places is None else tuple(places.tolist())
    try:
        order = sorted(range(len(labels)), key=labels.__getitem__)
    except TypeError as error:
        raise TypeError(f"{what} needs an order, and the labels of {axes.describe(axis)} have none: {error}") from None
    return tuple(labels[at] for at in order), tuple(order)


def require_labels(axes: Axes, axis: int, what: str) -> Space:
    """Return the Space of an axis; raise TypeError if it is positional.

    Args:
        axes: The axes of a tensor.
        axis: The position of one of them.
        what: The name of the operation in errors.
    """
    space = axes.spaces[axis]
    if space is None or not space.labelled:
        raise TypeError(f"{what} goes by label, and {axes.describe(axis)} is positional; use isel with positions")
    return space


def _direction(places: Sequence[int]) -> int:
    """1 for labels that ascend along their axis, -1 for those that descend, 0 for those in another order."""
    count = len(places)
    if isinstance(places, range) or all(map(int.__eq__, places, range(count))):
        return 1
    return -1 if all(map(int.__eq__, places, range(count - 1, -1, -1))) else 0


def _find_place(axes: Axes, axis: int, label: Any) -> int:
    """Return the number of labels of an axis that are less than a label."""
    labels, _ = sort_labels(axes, axis, "an order of labels")
    try:
        if isinstance(labels, ArrayLabels) and labels.kind in "mM":
            instant = as_instant(label)
            if instant is None or instant.dtype.kind != labels.kind:
                raise TypeError(f"its labels are {labels.values.dtype}, and this is a {type(label).__name__}")
            return find_instant(labels.values, instant)
        return bisect.bisect_left(labels, label)
    except TypeError as error:
        raise TypeError(
            f"{show_label(label)} can't be compared with the labels of {axes.describe(axis)}: {error}"
        ) from None


@cache_by_axes
def locate_slice(axes: Axes, axis: int, start: Hashable, stop: Hashable, step: int | None) -> slice:
    """Return the slice of positions from one label up to and including another.

    Between labels that are in order, an end need not be one of them.

    Args:
        axes: The axes of a tensor.
        axis: The position of one of them.
        start: The first label; None for the start of the axis.
        stop: The last label; None for the end of the axis.
        step: The step in positions.
    """
    space = require_labels(axes, axis, "a slice of labels")
    if step is not None and (not isinstance(step, int) or step < 1):
        raise ValueError(f"the step of a slice of labels is a positive number of positions, not {step!r}")
    first = 0 if start is None else _locate_end(axes, axis, space, freeze_label(start), last=False)
    last = len(space) if stop is None else _locate_end(axes, axis, space, freeze_label(stop), last=True)
    return slice(first, max(first, last), step)


def _locate_end(axes: Axes, axis: int, space: Space, label: Any, last: bool) -> int:
    label = _read_duration(axes, axis, label)
    period = _read_period(axes, axis, label) if isinstance(label, str) and get_dates(space) is not None else None
    end = label if period is None else period.start
    if end in space and (period is None or len(space) < 2 or not _direction(sort_labels(axes, axis, "a slice")[1])):
        return space.index(end) + last
    _, order = sort_labels(axes, axis, "a slice that ends between labels")
    direction = _direction(order)
    if not direction:
        raise UnknownLabelError(
            f"{axes.describe(axis)} has no label {show_label(label)} for a slice to end at, and its labels are not in order, so "
            f"that it has no place between them; they are {show_labels(space._labels)}"
        )
    if period is not None:  # all dates of the period belong to the slice
        end = period.end if last == (direction > 0) else period.start
    # The label is absent, or the end of a period, which is not in the period.
    at = _find_place(axes, axis, end)
    return at if direction > 0 else len(space) - at


@cache_by_axes
def locate_neighbours(axes: Axes, axis: int, several: bool, wanted: Any, method: str, tolerance: Any) -> int | Space:
    """Return the position of the neighbour of a label that need not exist, or the Space of the neighbours of several.

    Args:
        axes: The axes of a tensor.
        axis: The position of one of them.
        several: Whether several labels are given.
        wanted: The label or labels, from `freeze_labels`.
        method: Which neighbour, as in `find_neighbours`.
        tolerance: The largest distance; None for any.
    """
    labels = convert_labels(axes, axis, wanted if several else (wanted,))
    positions = find_neighbours(axes, axis, labels, method, tolerance, "sel")
    if -1 in positions:
        label, within = labels[positions.index(-1)], "" if tolerance is None else f" within {show_label(tolerance)}"
        raise UnknownLabelError(
            f"{axes.describe(axis)} has no label for {show_label(label)} by method {_METHODS.get(method, method)!r}{within}; "
            f"its labels are {show_labels(sort_labels(axes, axis, 'sel')[0])}"
        )
    if not several:
        return positions[0]
    chosen: Space = require_labels(axes, axis, "sel")[positions]
    return chosen


_METHODS: Final = {"ffill": "pad", "bfill": "backfill"}


def find_neighbours(axes: Axes, axis: int, labels: Iterable[Any], method: str, tolerance: Any, what: str) -> list[int]:
    """Return the positions of the neighbours of labels; -1 if there is none within the tolerance.

    Args:
        axes: The axes of a tensor.
        axis: The position of one of them.
        labels: The labels.
        method: Which neighbour: "nearest" (of two as near the one above), "pad" or "backfill".
        tolerance: The largest distance; None for any.
        what: The name of the operation in errors.
    """
    method = _METHODS.get(method, method)
    if method not in ("nearest", "pad", "backfill"):
        raise ValueError(f"the method of {what} is 'nearest', 'pad' or 'backfill', not {method!r}")
    ordered, places = sort_labels(axes, axis, f"{what} with method={method!r}")
    near = [_find_neighbour(axes, axis, ordered, label, method, tolerance) for label in labels]
    return [-1 if at < 0 else places[at] for at in near]


def _find_neighbour(axes: Axes, axis: int, known: Sequence[Any], label: Any, method: str, tolerance: Any) -> int:
    """Return the position of the neighbour of a label among sorted ones; -1 if there is none within the tolerance."""
    at = _find_place(axes, axis, label)
    if at < len(known) and known[at] == label:
        return at
    places = {"pad": (at - 1,), "backfill": (at,), "nearest": (at, at - 1)}[method]
    near = [place for place in places if 0 <= place < len(known)]
    if not near:
        return -1
    best = min(near, key=lambda place: _measure(known[place], label))
    return -1 if tolerance is not None and _measure(known[best], label) > count_attoseconds(tolerance) else best


def _measure(one: Any, other: Any) -> Any:
    """Return the distance of two labels; that of dates is exact, in attoseconds."""
    return abs(count_attoseconds(one) - count_attoseconds(other))
