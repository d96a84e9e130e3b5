"""The entries that two tensors of different sizes have in common: by label where an axis has labels, otherwise by position."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._layout import Axes, Axis


class Overlap(NamedTuple):
    """The entries that a tensor has in common with a source of other sizes, as positions along every axis.

    Attributes:
        order: For each axis of the tensor, which axis of the source it is; None if they are in order.
        here: The positions in the tensor, for each axis.
        there: The positions of the same entries in the source, for each axis of the tensor.

    Example:
        >>> from moduli.layout import find_overlap
        >>> wide = torch.zeros(3)
        >>> find_overlap((3,), (2,)).copy(wide, torch.ones(2))
        >>> wide
        tensor([1., 1., 0.])
    """

    order: tuple[int, ...] | None
    here: tuple[Sequence[int], ...]
    there: tuple[Sequence[int], ...]

    def covers(self, shape: Sequence[int], other: Sequence[int]) -> bool:
        """Whether the tensors of these shapes have all entries in common.

        Example:
            >>> from moduli.layout import find_overlap
            >>> find_overlap((2,), (2,)).covers((2,), (2,)), find_overlap((2,), (3,)).covers((2,), (3,))
            (True, False)
        """
        sizes = other if self.order is None else [other[axis] for axis in self.order]
        return all(len(here) == a == b for here, a, b in zip(self.here, shape, sizes, strict=True))

    def take(self, tensor: Tensor, there: bool) -> Tensor:
        """Return the common entries, with axes and entries in the order of the tensor.

        Args:
            tensor: The tensor, or the source.
            there: Whether it is the source.

        Example:
            >>> from moduli.layout import find_overlap
            >>> find_overlap((2,), (3,)).take(torch.tensor([1.0, 2.0, 3.0]), there=True)
            tensor([1., 2.])
        """
        tensor = tensor.detach()
        if there and self.order is not None:
            tensor = tensor.permute(self.order)
        for axis, positions in enumerate(self.there if there else self.here):
            tensor = _take(tensor, axis, positions)
        return tensor

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Write the entries of a source into a tensor, without recording gradients."""
        with torch.no_grad():
            values = self.take(source, there=True)
            if all(_is_prefix(positions) for positions in self.here):
                target.detach()[tuple(slice(len(positions)) for positions in self.here)].copy_(values)
                return
            lead = len(self.here) - 1
            index = [
                torch.tensor(list(positions), dtype=torch.long, device=target.device).view(-1, *[1] * (lead - axis))
                for axis, positions in enumerate(self.here)
            ]
            target.detach()[tuple(index)] = values.to(target)

    def after(self, earlier: Overlap) -> Overlap:
        """Return the overlap with the source of an earlier one, whose tensor is the source of this one.

        Example:
            >>> from moduli.layout import find_overlap
            >>> find_overlap((4,), (2,)).after(find_overlap((2,), (3,))).here
            (range(0, 2),)
        """
        axes = range(len(self.here)) if self.order is None else self.order
        pairs = [
            _compose(self.here[place], self.there[place], earlier.here[axis], earlier.there[axis])
            for place, axis in enumerate(axes)
        ]
        order = self.order
        if earlier.order is not None:
            order = tuple(earlier.order[axis] for axis in axes)
        return Overlap(order, tuple(here for here, _ in pairs), tuple(there for _, there in pairs))


def find_overlap(
    shape: Sequence[int], other: Sequence[int], ours: Axes | None = None, theirs: Axes | None = None
) -> Overlap | None:
    """Return the entries that a tensor has in common with a source of other sizes.

    Axes pair by name where every axis has one, otherwise by position. Along an axis with labels on both sides, the entries in
    common are those of the labels that both have; along other axes, the first positions.

    Args:
        shape: The sizes of the tensor.
        other: The sizes of the source.
        ours: The axes of the tensor, where it has any.
        theirs: The axes of the source.

    Returns:
        The overlap; None if the axes differ, or no entry is common.

    Example:
        >>> from moduli.layout import Axis, find_overlap
        >>> overlap = find_overlap((2,), (3,), (Axis("c", ("b", "x")),), (Axis("c", ("a", "b", "c")),))
        >>> overlap.here, overlap.there
        (((0,),), ((1,),))
    """
    if len(shape) != len(other):
        return None
    left, right = _complete(ours, shape), _complete(theirs, other)
    order = _pair_axes([axis.name for axis in left], [axis.name for axis in right])
    if order is None:
        return None
    pairs = [_match(left[at], right[axis], shape[at], other[axis]) for at, axis in enumerate(order)]
    if not all(here for here, _ in pairs):
        return None
    moved = None if order == tuple(range(len(order))) else order
    return Overlap(moved, tuple(here for here, _ in pairs), tuple(there for _, there in pairs))


def _pair_axes(wanted: Sequence[str | None], present: Sequence[str | None]) -> tuple[int, ...] | None:
    """Return, for each axis of the tensor, the axis of the source that it pairs with; None if their names differ."""
    if None not in wanted and None not in present:
        return tuple(map(present.index, wanted)) if set(wanted) == set(present) else None
    differ = any(a is not None and b is not None and a != b for a, b in zip(wanted, present, strict=True))
    return None if differ else tuple(range(len(wanted)))


def _complete(axes: Axes | None, shape: Sequence[int]) -> list[Axis]:
    """Return one axis per size, without labels where their number is not the size (axes of a tensor computed from this one)."""
    if axes is None or len(axes) != len(shape):
        return [Axis(None, None)] * len(shape)
    return [
        axis if axis.labels is None or len(axis.labels) == size else Axis(axis.name, None)
        for axis, size in zip(axes, shape, strict=True)
    ]


def _match(ours: Axis, theirs: Axis, size: int, other: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the positions of common entries along one axis, here and there."""
    if ours.labels is None or theirs.labels is None or ours.labels == theirs.labels:
        return range(min(size, other)), range(min(size, other))
    places: dict[Hashable, int] = {label: at for at, label in enumerate(theirs.labels)}
    common = [(at, places[label]) for at, label in enumerate(ours.labels) if label in places]
    return tuple(at for at, _ in common), tuple(at for _, at in common)


def _compose(
    here: Sequence[int], there: Sequence[int], middle: Sequence[int], source: Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    if all(map(_is_prefix, (here, there, middle, source))):
        count = min(len(here), len(middle))
        return range(count), range(count)
    places = dict(zip(middle, source, strict=True))
    common = [(at, places[between]) for at, between in zip(here, there, strict=True) if between in places]
    return tuple(at for at, _ in common), tuple(at for _, at in common)


def _is_prefix(positions: Any) -> bool:
    return isinstance(positions, range) and positions.start == 0 and positions.step == 1


def _take(values: Tensor, axis: int, positions: Sequence[int]) -> Tensor:
    if _is_prefix(positions):
        return values.narrow(axis, 0, len(positions))
    return values.index_select(axis, torch.tensor(list(positions), dtype=torch.long, device=values.device))
