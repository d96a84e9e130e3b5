"""Along named axes: ``sel`` by label, ``isel`` by position, ``interp`` between labels, ``groupby`` over several."""

from __future__ import annotations

import bisect
import numbers
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from ._axes import Axes, DimLike, cache_by_axes
from ._errors import UnknownLabelError
from ._index import get
from ._pairing import Gather, index_of, lay_along
from ._space import Space, show_labels
from ._tensor import Tensor, finish, method


@method
def isel(t: Tensor, indexers: Mapping[Any, Any] | None = None, /, **named: Any) -> Tensor:
    """Select by position along named axes.

    Args:
        t: The tensor.
        indexers: Axis (name or position) to index, as a mapping.
        named: Axis name to index: a position (the axis disappears), slice, list, mask or index tensor.

    Raises:
        UnknownLabelError: If an axis does not exist.
        IndexError: If a position is out of range.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([[1.0, 2.0], [3.0, 4.0]], row=["a", "b"], column=["p", "q"])
        >>> t.isel(column=0)
        Tensor(row: a=1., b=3.)
    """
    key: list[Any] = [slice(None)] * t._data.ndim
    for which, index in {**(indexers or {}), **named}.items():
        key[t._axes.axis(which)] = index
    return get(t, tuple(key))


@method
def sel(
    t: Tensor,
    indexers: Mapping[Any, Any] | None = None,
    /,
    method: str | None = None,
    tolerance: Any = None,
    **named: Any,
) -> Tensor:
    """Select by label along named axes.

    Args:
        t: The tensor.
        indexers: Axis (name or position) to labels, as a mapping.
        method: What to take for a label that the axis does not have: its neighbour below (``"pad"``), above
            (``"backfill"``) or the nearer one (``"nearest"``, the greater of two as near). None refuses it.
        tolerance: How far that neighbour may be.
        named: Axis name to a label (the axis disappears), to a list of labels or a Space (the axis is reordered), or to a
            slice of labels, both ends included.

    Raises:
        UnknownLabelError: If an axis or a label does not exist, or no neighbour is within the tolerance.
        TypeError: If a slice is taken of a positional axis, or labels that have no order are compared.
        ValueError: If two of the labels have the same neighbour, or method is none of these.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, 0.5, 2.0], channel=["r", "g", "b"])
        >>> float(t.sel(channel="g")), t.sel(channel=["b", "r"]), t.sel(channel=slice("g", "b"))
        (0.5, Tensor(channel: b=2., r=1.), Tensor(channel: g=0.5000, b=2.0000))
        >>> mo.tensor([0.0, 1.0, 4.0], time=[0.0, 1.0, 2.0]).sel(time=1.2, method="nearest").item()
        1.0
    """
    if method is None and tolerance is not None:
        raise ValueError("a tolerance needs a method: 'nearest', 'pad' or 'backfill'")
    key: list[Any] = [slice(None)] * t._data.ndim
    for which, labels in {**(indexers or {}), **named}.items():
        axis = t._axes.axis(which)
        if isinstance(labels, slice):
            key[axis] = _locate_slice(t._axes, axis, labels.start, labels.stop, labels.step)
            continue
        several, wanted = _freeze(labels, list, range)  # a tuple is one label
        if method is not None:
            wanted = _locate_neighbours(t._axes, axis, several, wanted, method, tolerance)
        key[axis] = found = _locate_labels(t._axes, axis, several, wanted)
        if t._axes.spaces[axis] is None and isinstance(found, int) and found >= t._data.shape[axis]:
            raise UnknownLabelError(
                f"{t._axes.describe(axis)} has size {t._data.shape[axis]} and no position {labels!r}"
            )
    return get(t, tuple(key))


def _freeze(given: Any, *lists: type[Iterable[Any]]) -> tuple[bool, Any]:
    """Whether several labels are given, and what is given, in a form that can be remembered."""
    if isinstance(given, Tensor):
        given = given._data
    if isinstance(given, (torch.Tensor, np.ndarray, np.generic)):
        given = given.tolist()
    if isinstance(given, lists):
        return True, tuple(given)
    return isinstance(given, Space), given


@cache_by_axes
def _locate_labels(axes: Axes, axis: int, several: bool, labels: Any) -> int | Space:
    if several:
        return Space(labels)
    # How many positions there are is the data's business; here it only matters that they are positions.
    known = axes.spaces[axis] or Space(sys.maxsize)
    if labels not in known:
        listed = "positional" if axes.spaces[axis] is None else show_labels(known.labels)
        raise UnknownLabelError(f"{axes.describe(axis)} has no label {labels!r}; its labels are {listed}")
    return known.index(labels)


# -- between labels ------------------------------------------------------------------------------------------------------


@method
def interp(t: Tensor, points: Mapping[Any, Any] | None = None, /, fill: complex | None = None, **named: Any) -> Tensor:
    """Values between the labels of axes, by linear interpolation; differentiable in the data.

    Along several axes it is multilinear: one axis after the other.

    Args:
        t: The tensor. Integers become the default dtype.
        points: Axis (name or position) to points, as a mapping.
        fill: The value of points outside of the labels; None refuses them.
        named: Axis name to a number (the axis disappears), or to several distinct ones, which become its labels.

    Raises:
        UnknownLabelError: If an axis does not exist.
        TypeError: If an axis is positional, or its labels are not numbers.
        ValueError: If a point is outside of the labels.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([0.0, 10.0, 40.0], time=[0, 1, 2])
        >>> t.interp(time=0.5).item(), t.interp(time=[0.5, 1.5])
        (5.0, Tensor(time: 0.5=5., 1.5=25.))
    """
    data, axes = t._data, t._axes
    if not data.is_floating_point() and not data.is_complex():
        data = data.to(torch.get_default_dtype())
    for which, wanted in {**(points or {}), **named}.items():
        axis = axes.axis(which)
        several, frozen = _freeze(wanted, list, range, tuple)
        below, above, weights, outside, left = _plan_points(axes, axis, several, frozen, fill is not None)
        low, high = (data.index_select(axis, index_of(each, data)) for each in (below, above))
        weight = torch.tensor(weights, dtype=data.real.dtype, device=data.device)
        data = low + (high - low) * lay_along(weight, axis, data.ndim)
        if any(outside):
            mask = lay_along(torch.tensor(outside, device=data.device), axis, data.ndim)
            data = torch.where(mask, torch.as_tensor(fill, dtype=data.dtype, device=data.device), data)
        data, axes = (data if several else data.squeeze(axis)), left
    return finish(data, axes)


@cache_by_axes
def _plan_points(
    axes: Axes, axis: int, several: bool, wanted: Any, fills: bool
) -> tuple[Gather, Gather, tuple[float, ...], tuple[bool, ...], Axes]:
    """The positions below and above each point, the weight of the one above, whether it is outside, and the axes left."""
    sorted_labels, order = _sort_labels(axes, axis, "interp")
    wanted = tuple(wanted) if several else (wanted,)
    if not all(isinstance(each, numbers.Real) for each in (*sorted_labels, *wanted)):
        raise TypeError(
            f"interp needs numbers, unlike the labels of {axes.describe(axis)} or the points {list(wanted)}"
        )
    labels, points = np.array(sorted_labels, np.float64), np.array(wanted, np.float64)
    if not len(labels):
        raise ValueError(f"{axes.describe(axis)} has no labels to interpolate between")
    outside = ~((points >= labels[0]) & (points <= labels[-1]))
    if outside.any() and not fills:
        raise ValueError(
            f"{wanted[int(outside.argmax())]!r} is outside of the labels of {axes.describe(axis)}, from "
            f"{sorted_labels[0]!r} to {sorted_labels[-1]!r}; give fill= for such points"
        )
    below = np.clip(np.searchsorted(labels, points, side="right") - 1, 0, len(labels) - 1)
    # On a label itself, its neighbour has no part in the value, not even as a NaN.
    above = np.where((labels[below] == points) | outside, below, np.minimum(below + 1, len(labels) - 1))
    width = labels[above] - labels[below]
    weights = np.where(width > 0, (points - labels[below]) / np.where(width > 0, width, 1.0), 0.0)
    positions = np.array(order)
    left = axes.put(axis, (axes.names[axis], Space(wanted))) if several else axes.drop(axis)
    low, high = Gather(positions[below]), Gather(positions[above])
    return low, high, tuple(weights.tolist()), tuple(outside.tolist()), left


# -- groups of the entries of an axis ----------------------------------------------------------------------------------


@method
def groupby(t: Tensor, dim: DimLike | None = None, groups: Any = None, /, **named: Any) -> Groups:
    """The entries of an axis, put into groups; what is computed of them has one entry per group.

    Args:
        t: The tensor.
        dim: The axis, by name or position, if it is not given as a keyword.
        groups: Which group each label belongs to: a mapping from labels, a function of a label, or a sequence with one
            group per entry.
        named: Axis name to groups, as one keyword.

    Returns:
        The groups, in the order in which they first occur. Their methods are ``sum``, ``mean``, ``amax``, ``amin`` and
        ``count``.

    Raises:
        UnknownLabelError: If the axis does not exist, or a label has no group.
        ValueError: If a sequence has another length than the axis.
        TypeError: If there is not exactly one axis.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, 3.0, 10.0], city=["Rome", "Milan", "Paris"])
        >>> t.groupby(city={"Rome": "Italy", "Milan": "Italy", "Paris": "France"}).mean()
        Tensor(city: Italy=2., France=10.)
    """
    given: dict[Any, Any] = {**({} if dim is None else {dim: groups}), **named}
    if len(given) != 1:
        raise TypeError(f"groupby takes one axis and its groups, as in t.groupby(city=countries), got {list(given)}")
    ((which, wanted),) = given.items()
    axis = t._axes.axis(which)
    labels = t._axes.dims(t._data.shape)[axis].labels
    return Groups(t, axis, _assign_groups(t._axes, axis, labels, wanted))


def _assign_groups(axes: Axes, axis: int, labels: Sequence[Hashable], groups: Any) -> list[Hashable]:
    if isinstance(groups, Mapping):
        missing = [label for label in labels if label not in groups]
        if missing:
            raise UnknownLabelError(f"{axes.describe(axis)} has labels that belong to no group: {show_labels(missing)}")
        return [groups[label] for label in labels]
    if callable(groups):
        return [groups(label) for label in labels]
    found = list(groups.tolist() if hasattr(groups, "tolist") else groups)
    if len(found) != len(labels):
        raise ValueError(f"{axes.describe(axis)} has size {len(labels)}, but {len(found)} groups were given")
    return found


class Groups:
    """The entries of an axis of a tensor in groups; made by `groupby`.

    Example:
        >>> import moduli as mo
        >>> groups = mo.tensor([1.0, 3.0, 10.0], "t").groupby("t", lambda at: at // 2)
        >>> groups.sum(), groups.count()
        (Tensor(t: 0=4., 1=10.), Tensor(t: 0=2, 1=1))
    """

    def __init__(self, t: Tensor, axis: int, groups: list[Hashable]) -> None:
        self._t, self._axis = t, axis
        numbers = {group: at for at, group in enumerate(dict.fromkeys(groups))}
        self.labels: Final = Space(numbers)
        self._index = Gather([numbers[group] for group in groups])
        self._axes = t._axes.put(axis, (t._axes.names[axis], self.labels))

    def sum(self) -> Tensor:
        """The sum of each group.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1, 3, 10], "t").groupby("t", ["a", "b", "a"]).sum()
            Tensor(t: a=11, b=3)
        """
        data = self._t._data
        made = data.new_zeros(self._shape(), dtype=torch.int64 if data.dtype is torch.bool else data.dtype)
        return finish(made.index_add(self._axis, index_of(self._index, data), data.to(made.dtype)), self._axes)

    def mean(self) -> Tensor:
        """The mean of each group.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 10.0], "t").groupby("t", ["a", "a", "b"]).mean()
            Tensor(t: a=2., b=10.)
        """
        counts = lay_along(self._counts(), self._axis, self._t._data.ndim)
        return finish(self.sum()._data / counts, self._axes)

    def amax(self) -> Tensor:
        """The greatest of each group.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 10.0], "t").groupby("t", ["a", "a", "b"]).amax()
            Tensor(t: a=3., b=10.)
        """
        return self._extreme("amax")

    def amin(self) -> Tensor:
        """The least of each group.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 10.0], "t").groupby("t", ["a", "a", "b"]).amin()
            Tensor(t: a=1., b=10.)
        """
        return self._extreme("amin")

    def count(self) -> Tensor:
        """How many entries each group has.

        Example:
            >>> import moduli as mo
            >>> mo.zeros(2, 3).groupby(1, ["a", "b", "a"]).count()
            Tensor(a=2, b=1)
        """
        return finish(self._counts(), self._axes.take([self._axis]))

    def _counts(self) -> torch.Tensor:
        return torch.bincount(index_of(self._index, self._t._data), minlength=len(self.labels))

    def _extreme(self, how: str) -> Tensor:
        data = self._t._data
        index = lay_along(index_of(self._index, data), self._axis, data.ndim).expand(data.shape)
        made = data.new_zeros(self._shape()).scatter_reduce(self._axis, index, data, how, include_self=False)
        return finish(made, self._axes)

    def _shape(self) -> list[int]:
        shape = list(self._t._data.shape)
        shape[self._axis] = len(self.labels)
        return shape


# -- labels that have an order -------------------------------------------------------------------------------------------


@cache_by_axes
def _sort_labels(axes: Axes, axis: int, what: str) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The labels of an axis in ascending order, and their positions."""
    labels: Sequence[Any] = _require_labels(axes, axis, what).labels
    try:
        order = sorted(range(len(labels)), key=labels.__getitem__)
    except TypeError as error:
        raise TypeError(f"{what} needs an order, and the labels of {axes.describe(axis)} have none: {error}") from None
    return tuple(labels[at] for at in order), tuple(order)


def _find_place(axes: Axes, axis: int, labels: tuple[Any, ...], label: Any) -> int:
    """Where a label would be among sorted ones."""
    try:
        return bisect.bisect_left(labels, label)
    except TypeError as error:
        raise TypeError(f"{label!r} can't be compared with the labels of {axes.describe(axis)}: {error}") from None


def _require_labels(axes: Axes, axis: int, what: str) -> Space:
    space = axes.spaces[axis]
    if space is None or not space.labelled:
        raise TypeError(f"{what} goes by label, and {axes.describe(axis)} is positional; use isel with positions")
    return space


@cache_by_axes
def _locate_slice(axes: Axes, axis: int, start: Hashable, stop: Hashable, step: int | None) -> slice:
    """Both ends belong to a slice of labels; between labels that are in order, an end need not be one of them."""
    space = _require_labels(axes, axis, "a slice of labels")
    if step is not None and (not isinstance(step, int) or step < 1):
        raise ValueError(f"the step of a slice of labels is a positive number of positions, not {step!r}")
    first = 0 if start is None else _locate_end(axes, axis, space, start, last=False)
    last = len(space) if stop is None else _locate_end(axes, axis, space, stop, last=True)
    return slice(first, max(first, last), step)


def _locate_end(axes: Axes, axis: int, space: Space, label: Any, last: bool) -> int:
    if label in space:
        return space.index(label) + last
    labels, order = _sort_labels(axes, axis, "a slice that ends between labels")
    upwards = tuple(range(len(order)))
    if order not in (upwards, upwards[::-1]):
        raise UnknownLabelError(
            f"{axes.describe(axis)} has no label {label!r} for a slice to end at, and its labels are not in order, so that it "
            f"has no place between them; they are {show_labels(space.labels)}"
        )
    # The label itself is not there, so both sides give the same place.
    at = _find_place(axes, axis, labels, label)
    return at if order == upwards else len(space) - at


@cache_by_axes
def _locate_neighbours(axes: Axes, axis: int, several: bool, wanted: Any, method: str, tolerance: Any) -> Any:
    """The labels that stand for those wanted, which need not be labels themselves."""
    method = {"ffill": "pad", "bfill": "backfill"}.get(method, method)
    if method not in ("nearest", "pad", "backfill"):
        raise ValueError(f"the method of sel is 'nearest', 'pad' or 'backfill', not {method!r}")
    known, _ = _sort_labels(axes, axis, f"sel with method={method!r}")
    found = []
    for label in wanted if several else (wanted,):
        at = _find_place(axes, axis, known, label)
        near = [each for each in known[max(at - 1, 0) : at + 1] if method != "backfill" or each >= label]
        if method == "pad":
            near = [each for each in near if each <= label][-1:]
        elif method == "nearest":  # of two that are as near, the one above
            near.sort(key=lambda each: (abs(each - label), each < label))
        if not near or (tolerance is not None and abs(near[0] - label) > tolerance):
            within = "" if tolerance is None else f" within {tolerance!r}"
            raise UnknownLabelError(
                f"{axes.describe(axis)} has no label for {label!r} by method {method!r}{within}; its labels are "
                f"{show_labels(known)}"
            )
        found.append(near[0])
    return tuple(found) if several else found[0]
