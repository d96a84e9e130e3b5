"""Labels that have an order: slices of them, and the neighbours of one that an axis does not have."""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from ._axes import Axes, cache_by_axes
from ._errors import UnknownLabelError
from ._space import Space, show_labels


class Ascending(NamedTuple):
    """The labels of an axis in ascending order, and the position of each on the axis."""

    labels: tuple[Any, ...]
    positions: tuple[int, ...]


@cache_by_axes
def sort_labels(axes: Axes, axis: int, what: str) -> Ascending:
    """The labels of an axis by size, or an error that says why they have none."""
    space = _require_labels(axes, axis, what)
    labels: Sequence[Any] = space.labels
    try:
        order = sorted(range(len(labels)), key=labels.__getitem__)
    except TypeError as error:
        raise TypeError(f"{what} compares labels, but those of {axes.describe(axis)} have no order: {error}") from None
    return Ascending(tuple(labels[at] for at in order), tuple(order))


def _require_labels(axes: Axes, axis: int, what: str) -> Space:
    space = axes.spaces[axis]
    if space is None or not space.labelled:
        raise TypeError(f"{what} goes by label, and {axes.describe(axis)} is positional; use isel with positions")
    return space


@cache_by_axes
def locate_slice(axes: Axes, axis: int, start: Hashable, stop: Hashable, step: int | None) -> slice:
    """The positions of a slice of labels, both ends included.

    An end that the axis does not have is placed between its neighbours, if the labels ascend or descend along the axis.
    """
    space = _require_labels(axes, axis, "a slice of labels")
    if step is not None and (not isinstance(step, int) or step < 1):
        raise ValueError(f"the step of a slice of labels is a positive number of positions, not {step!r}")
    first = 0 if start is None else _end(axes, axis, space, start, last=False)
    last = len(space) if stop is None else _end(axes, axis, space, stop, last=True)
    return slice(first, max(first, last), step)


def _end(axes: Axes, axis: int, space: Space, label: Hashable, last: bool) -> int:
    if label in space:
        return space.index(label) + last
    known = sort_labels(axes, axis, "a slice that ends between labels")
    upwards = tuple(range(len(known.positions)))
    falls = known.positions != upwards
    if falls and known.positions != upwards[::-1]:
        raise UnknownLabelError(
            f"{axes.describe(axis)} has no label {label!r} for a slice to end at, and its labels are not in order, so that it "
            f"has no place between them; they are {show_labels(space.labels)}"
        )
    # The label itself is not there, so both sides give the same place.
    at = _place(axes, axis, known.labels, label)
    return len(space) - at if falls else at


def _place(axes: Axes, axis: int, labels: tuple[Any, ...], label: Any) -> int:
    try:
        return bisect.bisect_left(labels, label)
    except TypeError as error:
        raise TypeError(f"{label!r} can't be compared with the labels of {axes.describe(axis)}: {error}") from None


@cache_by_axes
def locate_neighbours(axes: Axes, axis: int, several: bool, wanted: Any, method: str, tolerance: Any) -> Any:
    """For each label, or for one, the label of the axis that stands for it."""
    method = {"ffill": "pad", "bfill": "backfill"}.get(method, method)
    if method not in ("nearest", "pad", "backfill"):
        raise ValueError(f"the method of sel is 'nearest', 'pad' or 'backfill', not {method!r}")
    known = sort_labels(axes, axis, f"sel with method={method!r}").labels
    if not several:
        return _neighbour(axes, axis, known, wanted, method, tolerance)
    found = tuple(_neighbour(axes, axis, known, label, method, tolerance) for label in wanted)
    if len(set(found)) != len(found):
        twice = next(label for label in found if found.count(label) > 1)
        raise ValueError(
            f"{twice!r} would be selected more than once from {axes.describe(axis)}, whose labels must be distinct; select one "
            "label at a time, or use interp"
        )
    return found


def _neighbour(axes: Axes, axis: int, known: tuple[Any, ...], label: Any, method: str, tolerance: Any) -> Any:
    at = _place(axes, axis, known, label)
    here = at < len(known) and known[at] == label
    below = known[at] if here else known[at - 1] if at else None
    above = known[at] if at < len(known) else None
    if method == "pad":
        above = None
    elif method == "backfill":
        below = None
    elif below is not None and above is not None:
        below, above = (below, None) if label - below < above - label else (None, above)
    found = below if above is None else above
    if found is None or (tolerance is not None and abs(found - label) > tolerance):
        within = "" if tolerance is None else f" within {tolerance!r}"
        raise UnknownLabelError(
            f"{axes.describe(axis)} has no label for {label!r} by method {method!r}{within}; its labels are {show_labels(known)}"
        )
    return found
