"""`diff`: the differences of two models, in names, in shapes, dtypes and labels, and in values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moduli.layout import Axes, Overlap, find_overlap, is_sharded, make_whole, public_name
from moduli.nn import decode_axes, find_saved_axes, read_saved_axes

from .._html import write_frame, write_html_table
from .._texts import cut, write_columns

_MOST_LABELS = 4
_HEADS = ["name", "change", "left", "right", "distance", "largest"]


class TensorChange(NamedTuple):
    """The difference of one tensor in two models.

    Attributes:
        name: Its name.
        change: "added", "removed", "shape", "dtype", "axes" (or several of these separated by commas), or "values".
        left: Its form in the left model: shape, dtype and labels; None if it is not there.
        right: The same in the right model.
        distance: The norm of the difference divided by that of the left values, over the entries that both have.
        largest: The largest absolute difference of an entry.
    """

    name: str
    change: str
    left: str | None
    right: str | None
    distance: float | None
    largest: float | None


@dataclass(frozen=True)
class ModelDiff:
    """The differences of two models: a sequence of `TensorChange` that prints as a table.

    Attributes:
        changes: The tensors that differ: those of the left model in its order, then those that only the right one has.
        same: How many tensors are equal.

    Example:
        >>> from moduli.particles import diff
        >>> a, b = nn.Linear(2, 1), nn.Linear(2, 1, bias=False)
        >>> b.weight = a.weight
        >>> found = diff(a, b)
        >>> found.removed, found.added, found.same, bool(found)
        (['bias'], [], 1, True)
    """

    changes: tuple[TensorChange, ...]
    same: int

    def __iter__(self) -> Any:
        return iter(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __getitem__(self, place: int) -> TensorChange:
        return self.changes[place]

    @property
    def added(self) -> list[str]:
        """The names that only the right model has."""
        return [each.name for each in self.changes if each.change == "added"]

    @property
    def removed(self) -> list[str]:
        """The names that only the left model has."""
        return [each.name for each in self.changes if each.change == "removed"]

    @property
    def changed(self) -> list[str]:
        """The names that both have, with other values or another form."""
        return [each.name for each in self.changes if each.change not in ("added", "removed")]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain dicts and lists, for JSON.

        Example:
            >>> from moduli.particles import diff
            >>> diff({"w": torch.zeros(2)}, {}).as_dict()["changes"][0]["change"]
            'removed'
        """
        return {"changes": [each._asdict() for each in self.changes], "same": self.same}

    def _list_rows(self) -> list[list[str]]:
        return [
            [cut(each.name, 200), each.change, each.left or "-", each.right or "-", *map(_show, each[4:])]
            for each in self.changes
        ]

    def __str__(self) -> str:
        equal = f"{self.same} tensor{'' if self.same == 1 else 's'} equal"
        if not self.changes:
            return f"no difference: {equal}"
        return write_columns([_HEADS, *self._list_rows()], {4, 5}) + f"\n{equal}"

    def _repr_html_(self) -> str:
        title = f"{len(self.changes)} tensors differ, {self.same} equal"
        return write_frame(title, write_html_table(_HEADS, self._list_rows(), labelled=True) if self.changes else "")


def diff(left: nn.Module | Mapping[str, Any], right: nn.Module | Mapping[str, Any]) -> ModelDiff:
    """Compare two models: names, shapes, dtypes, labels, and values.

    It works for any two modules or state dicts, related or not. Labelled tensors are compared by label. In tensors of
    different sizes, the entries that both have are compared: those of the same labels, or the first positions.

    Args:
        left: A module, or a state dict.
        right: The same.

    Returns:
        The differences, which print as a table.

    Raises:
        TypeError: If one of them is neither.

    Example:
        >>> from moduli.particles import diff
        >>> a = {"w": torch.tensor([3.0, 4.0]), "old": torch.zeros(1)}
        >>> b = {"w": torch.tensor([3.0, 4.5]), "new": torch.zeros(2, 2, dtype=torch.float64)}
        >>> print(diff(a, b))
        name  change   left         right           distance  largest
        w     values   (2) float32  (2) float32          0.1      0.5
        old   removed  (1) float32  -                      -        -
        new   added    -            (2, 2) float64         -        -
        0 tensors equal
        >>> print(diff(a, a))
        no difference: 2 tensors equal
    """
    sides = [_Side(each) for each in (left, right)]
    names = dict.fromkeys(name for side in sides for name in side.names)
    changes = [_compare(name, *sides) for name in names]
    different = tuple(each for each in changes if each is not None)
    return ModelDiff(different, len(changes) - len(different))


class _Side:
    """The tensors of one model by public name, each read when it is compared."""

    def __init__(self, model: Any) -> None:
        state = model.state_dict() if isinstance(model, nn.Module) else model
        if not isinstance(state, Mapping):
            raise TypeError(f"diff compares modules and state dicts, not a {type(model).__name__}")
        self._state = state
        self._axes = read_saved_axes(state)
        # Extra state is no tensor.
        self.names = {
            public_name(name): name for name in state if isinstance(name, str) and not name.endswith("_extra_state")
        }

    def read(self, name: str) -> tuple[Tensor | None, Axes | None]:
        """Return a tensor and its axes; None where there is none."""
        value = self._state[self.names[name]] if name in self.names else None
        if not isinstance(value, Tensor):
            return None, None
        encoded = find_saved_axes(self.names[name], self._axes)
        return make_whole(value) if is_sharded(value) else value, None if encoded is None else decode_axes(encoded)


def _compare(name: str, left: _Side, right: _Side) -> TensorChange | None:
    """Return how a tensor differs; None if it does not."""
    (a, ours), (b, theirs) = left.read(name), right.read(name)
    forms = _describe(a, ours), _describe(b, theirs)
    if a is None or b is None:
        if a is b:
            return None
        return TensorChange(name, "added" if a is None else "removed", *forms, None, None)
    overlap = find_overlap(b.shape, a.shape, theirs, ours)
    whole = overlap is not None and overlap.covers(b.shape, a.shape)
    if ours is not None and theirs is not None and len(ours) == len(theirs) == a.dim():
        # Axes with the same names and labels in another order are the same.
        same_shape, same_axes = whole, whole
    else:
        same_shape, same_axes = a.shape == b.shape, (ours is None) == (theirs is None)
    changes = _list_changes(a, b, same_shape, same_axes)
    distance, largest = _measure(a, b, overlap)
    if not changes and largest == 0.0:
        return None
    return TensorChange(name, ", ".join(changes) or "values", *forms, distance, largest)


def _list_changes(a: Tensor, b: Tensor, same_shape: bool, same_axes: bool) -> list[str]:
    """Return the words for the changes of a tensor's form; a shape whose sizes were only permuted counts as changed axes."""
    forms = (("shape", same_shape), ("dtype", a.dtype == b.dtype), ("axes", same_axes or a.shape != b.shape))
    changes = [word for word, same in forms if not same]
    if "axes" in changes and "shape" in changes and sorted(a.shape) == sorted(b.shape):
        changes.remove("shape")
    return changes


def _measure(a: Tensor, b: Tensor, overlap: Overlap | None) -> tuple[float | None, float | None]:
    """Return the relative norm and the largest entry of a difference, over the entries that both tensors have."""
    if overlap is None or a.is_meta or b.is_meta:
        return (0.0, 0.0) if a.numel() == b.numel() == 0 else (None, None)
    ours, theirs = overlap.take(a, there=True), overlap.take(b, there=False)
    if ours.dtype == theirs.dtype and torch.equal(ours, theirs.to(ours.device)):
        return 0.0, 0.0
    kind = torch.complex128 if ours.is_complex() or theirs.is_complex() else torch.float64
    ours, theirs = ours.detach().to("cpu", kind), theirs.detach().to("cpu", kind)
    gap = theirs - ours
    if not gap.numel():
        return 0.0, 0.0
    norm, size = torch.linalg.vector_norm(gap).item(), torch.linalg.vector_norm(ours).item()
    return (norm / size if size else math.inf if norm else 0.0), gap.abs().max().item()


def _describe(tensor: Tensor | None, axes: Axes | None) -> str | None:
    """Return the shape, the dtype and the labels of a tensor."""
    if tensor is None:
        return None
    shape = ", ".join(map(str, tensor.shape))
    if axes is not None and len(axes) == tensor.dim():
        shape = ", ".join(
            f"{size if axis.name is None else f'{axis.name}={size}'}{_list_labels(axis.labels)}"
            for size, axis in zip(tensor.shape, axes, strict=True)
        )
    return f"({shape}) {str(tensor.dtype).removeprefix('torch.')}"


def _list_labels(labels: Sequence[Any] | None) -> str:
    if labels is None or isinstance(labels, range):
        return ""
    rest = len(labels) - _MOST_LABELS
    return f" [{' '.join(cut(str(each), 20) for each in labels[:_MOST_LABELS])}{f' +{rest}' if rest > 0 else ''}]"


def _show(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}"
