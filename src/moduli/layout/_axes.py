"""The gate for one pair of tensors: whether their axes are equal, which reordering makes them so, or why nothing does.

An axis is a name and labels; a tensor without labels has no axes here, and meets every other one by position. The rules are
those of labelled tensors: axes pair by name where every axis has one, otherwise by position; labels of a pair of axes are
equal, or the same in another order, or refused; an axis without labels takes any. Reorderings are worked out once (see
`align`) and then applied to whatever has the shape of the parameter: its values, its gradients, the state of an optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from .._torch import run_outside
from ._layout import Axes, Axis, LayoutError

_MOST_SHOWN: Final = 6
_MOST_LISTED: Final = 1 << 20
# Names under which torch registers the tensors that a pruned, normalised or parametrized one is computed from.
_SUFFIX: Final = re.compile(r"(.*)_(?:orig|mask|g|v|u)")
_ORIGINAL: Final = re.compile(r"(.*\.)?parametrizations\.([^.]+)\..+")


class AxesError(LayoutError):
    """Two stored tensors have axes or labels that cannot be brought together.

    Example:
        >>> from moduli.layout import Axis, align_axes
        >>> align_axes((Axis("c", ("r", "g")),), (Axis("c", ("r", "b")),))
        Traceback (most recent call last):
        ...
        moduli.layout._axes.AxesError: the labels of axis 'c' differ: only the left has ['g'], only the right has ['b']
    """


class Reorder:
    """A reordering that gives a tensor the axes and labels of another one: an axis order, and an index per axis.

    Calling it with a tensor returns the reordered one; gradients flow through.

    Attributes:
        order: For each axis of the result, which axis of the tensor it is; None if they are in order.
        index: For each axis of the result, the position in the tensor of each of its entries; None if they are in order.

    Example:
        >>> from moduli.layout import Axis, align_axes
        >>> reorder = align_axes((Axis("c", ("r", "g", "b")),), (Axis("c", ("b", "g", "r")),))
        >>> reorder.index, reorder(torch.tensor([1.0, 2.0, 3.0]))
        (((2, 1, 0),), tensor([3., 2., 1.]))
    """

    __slots__ = ("_tensors", "index", "order")

    def __init__(self, order: tuple[int, ...] | None, index: tuple[tuple[int, ...] | None, ...]) -> None:
        self.order, self.index = order, index
        self._tensors: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """Return a tensor in the new order.

        Args:
            tensor: The tensor.
            lead: The number of axes before those that are reordered, such as the members of a population.
        """
        if self.order is not None:
            tensor = tensor.permute(*range(lead), *(lead + axis for axis in self.order))
        for axis, positions in enumerate(self.index):
            # Statistics that were reduced along an axis have size 1 there.
            if positions is not None and tensor.shape[lead + axis] != 1:
                tensor = tensor.index_select(lead + axis, self._read_index(axis, positions, tensor.device))
        return tensor

    def permute_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return a shape with its axes in the new order.

        Example:
            >>> from moduli.layout import Reorder
            >>> Reorder((1, 0), (None, None)).permute_shape((2, 3))
            (3, 2)
        """
        return tuple(shape) if self.order is None else tuple(shape[axis] for axis in self.order)

    def _read_index(self, axis: int, positions: tuple[int, ...], device: torch.device) -> Tensor:
        index = self._tensors.get((axis, device))
        if index is None:
            # The cached index outlives the call, so it must not belong to an active function transform or inference mode.
            index = self._tensors[axis, device] = run_outside(torch.tensor, positions, device=device)
        return index

    def __repr__(self) -> str:
        return f"Reorder(order={self.order}, index={self.index})"


def align_axes(ours: Axes, theirs: Axes, names: tuple[str, str] = ("the left", "the right")) -> Reorder | None:
    """Return the reordering that gives a tensor with the right's axes the order of the left; None if it has that order.

    Args:
        ours: The axes of the left, which decide.
        theirs: The axes of the right.
        names: What errors call the left and the right.

    Returns:
        The reordering of the right.

    Raises:
        AxesError: If the axes or labels are not the same ones.

    Example:
        >>> from moduli.layout import Axis, align_axes
        >>> x, y = Axis("x", None), Axis("y", ("a", "b"))
        >>> print(align_axes((x, y), (x, y)), align_axes((x, y), (y, x)).order)
        None (1, 0)
    """
    if ours == theirs:
        return None
    left, right = names
    if len(ours) != len(theirs):
        raise AxesError(
            f"{left} has {len(ours)} axes and {right} has {len(theirs)}: {_list(ours)} against {_list(theirs)}"
        )
    wanted, present = [axis.name for axis in ours], [axis.name for axis in theirs]
    order: tuple[int, ...] | None = None
    if None not in wanted and None not in present and wanted != present:
        if set(wanted) != set(present):
            raise AxesError(f"the axes are {wanted} in {left} and {present} in {right}; rename one of them")
        order = tuple(map(present.index, wanted))
        theirs = tuple(theirs[axis] for axis in order)
    index = tuple(_align_axis(place, *pair, names) for place, pair in enumerate(zip(ours, theirs, strict=True)))
    return None if order is None and not any(each is not None for each in index) else Reorder(order, index)


def _align_axis(place: int, ours: Axis, theirs: Axis, names: tuple[str, str]) -> tuple[int, ...] | None:
    """Return, for each label of our axis, its position among theirs; None if nothing moves. `place` is for errors."""
    left, right = names
    if ours.name is not None and theirs.name is not None and ours.name != theirs.name:
        raise AxesError(f"axis {ours.name!r} of {left} is axis {theirs.name!r} of {right}; rename one of them")
    if ours.labels is None or theirs.labels is None or ours.labels == theirs.labels:
        return None
    name = ours.name if ours.name is not None else theirs.name
    called = f"axis {place}" if name is None else f"axis {name!r}"
    return _match_labels(called, ours.labels, theirs.labels, names)


def _match_labels(
    called: str, ours: Sequence[Hashable], theirs: Sequence[Hashable], names: tuple[str, str]
) -> tuple[int, ...] | None:
    left, right = names
    counts = len(ours), len(theirs)
    if max(counts) > _MOST_LISTED and counts[0] != counts[1]:
        # A range in a file may claim any number of labels without writing them.
        raise AxesError(f"{called} has {counts[0]} labels in {left} and {counts[1]} in {right}")
    places = {label: at for at, label in enumerate(theirs)}
    positions = tuple(places.get(label, -1) for label in ours)
    if counts[0] != counts[1] or -1 in positions:
        only = [_show(*pair) for pair in ((ours, theirs), (theirs, ours))]
        raise AxesError(f"the labels of {called} differ: only {left} has {only[0]}, only {right} has {only[1]}")
    # A range and a tuple of the same labels compare unequal although nothing moves.
    return None if positions == tuple(range(len(positions))) else positions


def _show(labels: Sequence[Hashable], others: Iterable[Hashable]) -> str:
    """Return the labels that only one side has, for an error."""
    common = set(others)
    extra = [label for label in labels if label not in common]
    return f"{extra}" if len(extra) <= _MOST_SHOWN else f"{extra[:_MOST_SHOWN]} and {len(extra) - _MOST_SHOWN} more"


def _list(axes: Axes) -> str:
    return str([axis.name for axis in axes])


def align_tensor(name: str, ours: Axes, theirs: Axes, shape: Sequence[int], names: tuple[str, str]) -> Reorder | None:
    """Return the reordering of a named tensor, as `align_axes`; the axes may be those of a tensor computed from it.

    Args:
        name: The tensor, for errors.
        ours: The axes of the left.
        theirs: The axes of the right.
        shape: The shape of the right.
        names: What errors call the left and the right.

    Raises:
        AxesError: If the axes or labels are not the same ones, or the tensor does not have the axes that differ.

    Example:
        >>> from moduli.layout import Axis, align_tensor
        >>> labels = [(Axis(None, ("a", "b")),), (Axis(None, ("b", "a")),)]
        >>> align_tensor("w", *labels, (2,), ("a", "b")).index
        ((1, 0),)
    """
    reorder = align_axes(ours, theirs, names)
    if reorder is None or all(size == 1 for size in shape):
        return None
    sizes = [None if axis.labels is None else len(axis.labels) for axis in theirs]
    if len(sizes) == len(shape) and all(a in (None, b) or b == 1 for a, b in zip(sizes, shape, strict=True)):
        return reorder
    raise AxesError(
        f"{name!r} of shape {tuple(shape)} is computed from a tensor whose labels have another order in {names[0]} than in "
        f"{names[1]}, and has none of its own to be reordered by; put the labels in one order before they are parametrized"
    )


def find_labelled_name(name: str, labelled: Mapping[str, Any]) -> str | None:
    """Return the name of the labelled tensor that a stored tensor is, or that is computed from it; None if there is none.

    Pruning, weight and spectral normalisation and parametrizations replace a tensor by others, from which it is computed.

    Args:
        name: The dotted name of the stored tensor.
        labelled: The labelled tensors (or their axes), by dotted name.

    Example:
        >>> from moduli.layout import find_labelled_name
        >>> [find_labelled_name(n, {"a.w": None}) for n in ("a.w", "a.w_orig", "a.parametrizations.w.original", "b")]
        ['a.w', 'a.w', 'a.w', None]
    """
    return next((base for base in list_bases(name) if base in labelled), None)


def list_bases(name: str) -> list[str]:
    """Return a stored tensor's own name, then the names of the tensors that torch may compute from it.

    Example:
        >>> from moduli.layout import list_bases
        >>> list_bases("a.w_orig")
        ['a.w_orig', 'a.w']
    """
    matches = (pattern.fullmatch(name) for pattern in (_SUFFIX, _ORIGINAL))
    return [name, *("".join(part or "" for part in match.groups()) for match in matches if match is not None)]
