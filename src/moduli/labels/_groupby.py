"""Groups of the entries of an axis, and what is computed of each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

import torch

from ._axes import Axes, DimLike
from ._errors import UnknownLabelError
from ._gather import Gather, index_of, lay_along
from ._space import Space, show_labels
from ._tensor import Tensor, finish, method


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
