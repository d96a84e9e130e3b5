"""Groups of entries: reductions by group, as scatter reductions over the data, without a loop over groups.

Only `Groups.map` calls Python for each group. `_groupby.py` computes the group of each entry.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from . import _fold as fold
from ._axes import Axes, cache_by_axes
from ._concat import cat, stack
from ._elementwise import elementwise
from ._errors import UnknownLabelError
from ._gather import Gather, index_of, lay_along
from ._index import get
from ._label_sequences import show_labels
from ._space import Space
from ._tensor import Tensor, as_tensor, finish


class GroupPlan(NamedTuple):
    """The entries of an axis in groups."""

    axis: int
    labels: Space
    """The groups."""
    members: Gather
    """The number of the group of each entry that has one."""
    sizes: tuple[int, ...]
    """The number of entries of each group."""
    positions: Gather | None
    """The entries that have a group, if not all have one."""
    entries: Axes
    """The axes of the entries that have a group."""
    axes: Axes
    """The axes of results: the groups in place of the entries."""


class _GroupFold(NamedTuple):
    """The fold whose sets are the groups of entries along an axis."""

    axis: int
    size: int
    members: Gather

    def add(self, data: torch.Tensor) -> torch.Tensor:
        """Return the sum of each group."""
        return data.new_zeros(self._shape(data)).index_add(self.axis, index_of(self.members, data), data)

    def extreme(self, data: torch.Tensor, how: str) -> torch.Tensor:
        """Return the smallest or largest of each group, NaN of floating data for one without entries."""
        index = lay_along(index_of(self.members, data), self.axis, data.ndim).expand(data.shape)
        start = data.new_full(self._shape(data), math.nan if data.is_floating_point() else 0)
        return start.scatter_reduce(self.axis, index, data, how, include_self=False)

    def spread(self, folded: torch.Tensor) -> torch.Tensor:
        """Return for each entry the number of its group."""
        return folded.index_select(self.axis, index_of(self.members, folded))

    def _shape(self, data: torch.Tensor) -> list[int]:
        return [self.size if at == self.axis else size for at, size in enumerate(data.shape)]


class Groups:
    """The entries of an axis of a tensor in groups; made by `groupby`.

    Reductions take ``skipna=True`` to leave out NaN. ``groups - groups.mean()`` and the other operators pair each entry with
    the number of its group. Iteration gives pairs of a group and the tensor of its entries.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, 3.0, 10.0], "t")
        >>> groups = t.groupby("t", lambda at: at // 2)
        >>> groups.sum(), groups.count(), groups - groups.mean()
        (Tensor(t: 0=4., 1=10.), Tensor(t: 0=2, 1=1), Tensor(t: [-1., 1., 0.]))
    """

    def __init__(self, t: Tensor, plan: GroupPlan) -> None:
        self._plan: Final = plan
        self.labels: Final = plan.labels
        data = t._data
        if plan.positions is not None:
            data = data.index_select(plan.axis, index_of(plan.positions, data))
        self._data: Final = data
        self._fold: Final = _GroupFold(plan.axis, len(plan.labels), plan.members)

    @property
    def sizes(self) -> dict[Hashable, int]:
        """The number of entries of each group, NaN included.

        Example:
            >>> import moduli as mo
            >>> mo.zeros(2, 3).groupby(1, ["a", "b", "a"]).sizes
            {'a': 2, 'b': 1}
        """
        return dict(zip(self.labels, self._plan.sizes, strict=True))

    def __len__(self) -> int:
        return len(self.labels)

    def __iter__(self) -> Iterator[tuple[Hashable, Tensor]]:
        parts = [self._pick(positions) for positions in _list_members(self._plan.axes, self._plan)]
        return iter(list(zip(self.labels, parts, strict=True)))

    def _pick(self, positions: Sequence[int]) -> Tensor:
        entries = finish(self._data, self._plan.entries)
        return get(entries, (*[slice(None)] * self._plan.axis, list(positions)))

    def __repr__(self) -> str:
        return f"Groups of {self._plan.entries.describe(self._plan.axis)}: {show_labels(self.labels.labels)}"

    def _finish(self, data: torch.Tensor) -> Tensor:
        return finish(data, self._plan.axes)

    def sum(self, *, skipna: bool = False) -> Tensor:
        """Return the sum of each group; 0 for one without entries.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1, 3, 10], "t").groupby("t", ["a", "b", "a"]).sum()
            Tensor(t: a=11, b=3)
        """
        return self._finish(fold.add(self._fold, self._data, skipna))

    def mean(self, *, skipna: bool = False) -> Tensor:
        """Return the mean of each group; NaN for one without entries.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 10.0], "t").groupby("t", ["a", "a", "b"]).mean()
            Tensor(t: a=2., b=10.)
            >>> mo.tensor([1.0, float("nan"), 10.0], "t").groupby("t", ["a", "a", "b"]).mean(skipna=True)
            Tensor(t: a=1., b=10.)
        """
        return self._finish(fold.mean(self._fold, self._data, skipna))

    def var(self, *, correction: float = 1, skipna: bool = False) -> Tensor:
        """Return the variance of each group; NaN for one with no more than ``correction`` entries.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 10.0], "t").groupby("t", ["a", "a", "b"]).var(correction=0)
            Tensor(t: a=1., b=0.)
        """
        return self._finish(fold.var(self._fold, self._data, skipna, correction))

    def std(self, *, correction: float = 1, skipna: bool = False) -> Tensor:
        """Return the standard deviation of each group; NaN for one with no more than ``correction`` entries.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 10.0], "t").groupby("t", ["a", "a", "b"]).std(correction=0)
            Tensor(t: a=1., b=0.)
        """
        return self._finish(fold.std(self._fold, self._data, skipna, correction))

    def max(self, *, skipna: bool = False) -> Tensor:
        """Return the largest entry of each group; NaN for one without entries.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 10.0], "t").groupby("t", ["a", "a", "b"]).max()
            Tensor(t: a=3., b=10.)
        """
        return self._extreme("amax", skipna)

    def min(self, *, skipna: bool = False) -> Tensor:
        """Return the smallest entry of each group; NaN for one without entries.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 10.0], "t").groupby("t", ["a", "a", "b"]).min()
            Tensor(t: a=1., b=10.)
        """
        return self._extreme("amin", skipna)

    amax, amin = max, min

    def count(self) -> Tensor:
        """Return the number of entries of each group that are not NaN.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, float("nan"), 10.0], "t").groupby("t", ["a", "a", "b"]).count()
            Tensor(t: a=1, b=1)
        """
        return self._finish(fold.count(self._fold, self._data, True))

    def _extreme(self, how: str, skipna: bool) -> Tensor:
        if 0 in self._plan.sizes and not fold.has_nan(self._data):
            self._refuse_empty(how[1:])
        return self._finish(fold.extreme(self._fold, self._data, how, skipna))

    def _refuse_empty(self, what: str) -> None:
        empty = [label for label, size in self.sizes.items() if not size]
        raise ValueError(f"the groups {show_labels(empty)} have no entries, and integers no NaN: they have no {what}")

    def quantile(self, q: float | Sequence[float], *, interpolation: str = "linear", skipna: bool = False) -> Tensor:
        """Return the quantiles of each group; NaN for one without entries.

        Args:
            q: A number between 0 and 1, or several, which become the labels of a new first axis, ``"quantile"``.
            interpolation: Between two entries: "linear", "lower", "higher", "midpoint" or "nearest".
            skipna: Leave out NaN.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 10.0], "t").groupby("t", ["a", "a", "b"]).quantile(0.5)
            Tensor(t: a=2., b=10.)
        """
        levels = [q] if isinstance(q, (int, float)) else list(q)
        fold.check_quantiles(levels, interpolation)
        axis, data = self._plan.axis, fold.widen_real(self._data).movedim(self._plan.axis, -1)
        members = index_of(self._plan.members, data)
        by_value = data.detach().argsort(dim=-1, stable=True)
        order = by_value.gather(-1, members[by_value].argsort(dim=-1, stable=True))
        folding = _GroupFold(data.ndim - 1, len(self.labels), self._plan.members)
        size = fold.count(folding, data, False)
        valid = fold.count(folding, data, True)
        number = valid if skipna else torch.where(valid == size, size, 0)
        result = fold.quantile(data.gather(-1, order), size.cumsum(-1) - size, number, levels, interpolation)
        result = fold.narrow(result.movedim(-1, axis + 1), self._data)
        if isinstance(q, (int, float)):
            return self._finish(result[0])
        return finish(result, add_quantiles(self._plan.axes, tuple(levels)))

    def first(self, *, skipna: bool = False) -> Tensor:
        """Return the first entry of each group; of those that are not NaN with ``skipna=True``.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 10.0], "t").groupby("t", ["a", "a", "b"]).first()
            Tensor(t: a=1., b=10.)
        """
        return self._edge("amin", skipna)

    def last(self, *, skipna: bool = False) -> Tensor:
        """Return the last entry of each group; of those that are not NaN with ``skipna=True``.

        Example:
            >>> import moduli as mo
            >>> mo.tensor([1.0, 3.0, 10.0], "t").groupby("t", ["a", "a", "b"]).last()
            Tensor(t: a=3., b=10.)
        """
        return self._edge("amax", skipna)

    def _edge(self, how: str, skipna: bool) -> Tensor:
        data, axis = self._data, self._plan.axis
        if 0 in self._plan.sizes and not fold.has_nan(data):
            self._refuse_empty("entry")
        places = lay_along(torch.arange(data.shape[axis], device=data.device), axis, data.ndim).expand(data.shape)
        valid = fold.find_valid(data, skipna)
        # Skipped entries get a position beyond the other end, which is only chosen if all are skipped.
        places = torch.where(valid, places, data.shape[axis] if how == "amin" else -1)
        at = self._fold.extreme(places, how)
        result = data.gather(axis, at.clamp(0, max(data.shape[axis] - 1, 0)))
        if fold.has_nan(data):
            result = torch.where(self._fold.add(valid.to(torch.int64)) > 0, result, math.nan)
        return self._finish(result)

    def map(self, function: Callable[..., Any], *args: Any, **options: Any) -> Tensor:
        """Call a function with the tensor of each group and put the results together.

        Results that have the axis of the entries are concatenated along it, in the order of the entries if they kept their
        number; results without it are stacked along an axis of the groups. Python calls the function once per group.

        Args:
            function: Called with a tensor of the entries of one group.
            args: Further arguments of the function.
            options: Its keyword arguments.

        Returns:
            The results as one tensor.

        Raises:
            ValueError: If there are no groups, or results do not fit together.

        Example:
            >>> import moduli as mo
            >>> groups = mo.tensor([1.0, 3.0, 10.0], t=["x", "y", "z"]).groupby(t=["a", "b", "a"])
            >>> groups.map(lambda part: part - part.mean())
            Tensor(t: x=-4.5000, y=0.0000, z=4.5000)
            >>> groups.map(lambda part: part.norm())
            Tensor(t: a=10.0499, b=3.0000)
        """
        plan = self._plan
        members = [positions for positions in _list_members(plan.axes, plan) if positions]
        results = [as_tensor(function(self._pick(positions), *args, **options)) for positions in members]
        if not results:
            raise ValueError(f"{plan.entries.describe(plan.axis)} has no groups with entries to map")
        name = plan.entries.names[plan.axis]
        keeps = name in results[0].names if name is not None else results[0].ndim == self._data.ndim
        if not keeps:
            axis = min(plan.axis, results[0].ndim)
            stacked = stack(results, dim=axis)
            return finish(stacked._data, _label_groups(stacked._axes, axis, plan))
        axis = plan.axis if name is None else results[0]._axes.axis(name)
        joined = cat(results, dim=axis)
        if [part._data.shape[axis] for part in results] != [len(positions) for positions in members]:
            return joined
        places = [at for positions in members for at in positions]
        order = [0] * len(places)
        for at, place in enumerate(places):
            order[place] = at
        return get(joined, (*[slice(None)] * axis, order))

    apply = map

    def spread(self, values: Tensor) -> Tensor:
        """Return for each entry the value of its group.

        Args:
            values: A tensor with an axis of the groups, as reductions give one; other axes stay.

        Raises:
            UnknownLabelError: If a group has no value.

        Example:
            >>> import moduli as mo
            >>> groups = mo.tensor([1.0, 3.0, 10.0], t=["x", "y", "z"]).groupby(t=["a", "b", "a"])
            >>> groups.spread(groups.sum())
            Tensor(t: x=11., y=3., z=11.)
        """
        axis, order, axes = _plan_spread(values._axes, self._plan)
        return finish(values._data.index_select(axis, index_of(order, values._data)), axes)

    def _combine(self, function: Callable[..., torch.Tensor], other: Any, reflected: bool = False) -> Tensor:
        entries = finish(self._data, self._plan.entries)
        operands = (entries, self.spread(other) if isinstance(other, Tensor) else other)
        return elementwise(function, *(reversed(operands) if reflected else operands))


def _operator(function: Callable[..., Any], reflected: bool) -> Callable[[Groups, Any], Tensor]:
    return lambda self, other: self._combine(function, other, reflected)


for _name in ("add", "sub", "mul", "truediv"):
    setattr(Groups, f"__{_name}__", _operator(getattr(operator, _name), False))
    setattr(Groups, f"__r{_name}__", _operator(getattr(operator, _name), True))


@cache_by_axes
def _list_members(axes: Axes, plan: GroupPlan) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the entries of each group."""
    members: list[list[int]] = [[] for _ in plan.labels]
    for at, member in enumerate(plan.members.positions):
        members[member].append(at)
    return tuple(map(tuple, members))


@cache_by_axes
def _label_groups(axes: Axes, at: int, plan: GroupPlan) -> Axes:
    """Return the axes with the groups that have entries in place of one of them."""
    labels = [label for label, size in zip(plan.labels, plan.sizes, strict=True) if size]
    return axes.put(at, (plan.axes.names[plan.axis], Space(labels)))


@cache_by_axes
def _plan_spread(axes: Axes, plan: GroupPlan) -> tuple[int, Gather, Axes]:
    """Return the axis of the groups, for each entry the position of its group there, and the axes of the entries."""
    name = plan.axes.names[plan.axis]
    at = axes.axis(name if name is not None else plan.axis)
    space = axes.spaces[at]
    if space is None or not space.labelled:
        raise UnknownLabelError(f"{axes.describe(at)} is positional, and groups are found by label: {plan.labels!r}")
    places = space.locate(plan.labels)[plan.members.positions]
    if places.min(initial=0) < 0:
        raise UnknownLabelError(f"{axes.describe(at)} has no value for the group {plan.labels[int(places.argmin())]!r}")
    return at, Gather(places), axes.put(at, plan.entries.pairs()[plan.axis])


@cache_by_axes
def add_quantiles(axes: Axes, levels: tuple[float, ...]) -> Axes:
    """Return the axes with a first one for quantiles."""
    return axes.insert(0, ("quantile", Space(levels)))[1]
