"""The gate for models: one answer to "do these two belong together, and in which order?".

It is worked out once for each pair of layouts. Layouts without labels pass it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch  # noqa: F401 - for the examples
from torch import Tensor

from ._axes import AxesError, Reorder, align_tensor
from ._layout import BufferEntry, Entry, Layout
from ._scan import map_tensors

_SIDES = ("the left", "the right")


class Alignment(NamedTuple):
    """The reorderings that give the tensors of one model (the right) the label order of another model (the left).

    Attributes:
        parameters: One reordering per entry of the right's layout, None where nothing moves.
        buffers: The same for its buffers.
        layout: The layout of the right after reordering.

    Example:
        >>> import moduli as mo
        >>> from moduli.layout import align, layout_of
        >>> a, b = mo.Module(), mo.Module()
        >>> a.w, b.w = mo.tensor([1.0, 2.0], c=["r", "g"]), mo.tensor([3.0, 4.0], c=["g", "r"])
        >>> align(layout_of(a), layout_of(b)).reorder_parameters(list(b.parameters()))
        [tensor([4., 3.])]
    """

    parameters: tuple[Reorder | None, ...]
    buffers: tuple[Reorder | None, ...]
    layout: Layout

    def reorder_parameters(self, tensors: Sequence[Tensor], lead: int = 0) -> list[Tensor]:
        """Return parameters, one per entry of the right's layout, in the order of the left; `lead` as of `Reorder`."""
        return _apply(self.parameters, tensors, lead)

    def reorder_buffers(self, tensors: Sequence[Tensor], lead: int = 0) -> list[Tensor]:
        """Return buffers, one per buffer of the right's layout, in the order of the left."""
        return _apply(self.buffers, tensors, lead)


def _apply(reorders: Sequence[Reorder | None], tensors: Sequence[Tensor], lead: int) -> list[Tensor]:
    return [t if each is None else each(t, lead) for each, t in zip(reorders, tensors, strict=True)]


def align(left: Layout, right: Layout) -> Alignment | None:
    """Return the reorderings that give labelled tensors of the right the order of those of the same names on the left.

    Args:
        left: The layout that decides.
        right: The layout of the tensors that are reordered.

    Returns:
        The reorderings, or None if there is nothing to reorder. Structures are not compared otherwise; see `diff`.

    Raises:
        AxesError: If a tensor has other axes or labels on the left than on the right.

    Example:
        >>> from moduli.layout import align, layout_of
        >>> print(align(layout_of(torch.nn.Linear(2, 1)), layout_of(torch.nn.Linear(3, 1))))
        None
    """
    if left is right or not (left.labelled and right.labelled):
        return None
    answers = _ANSWERS.get(left)
    if answers is None:
        answers = _ANSWERS.setdefault(left, WeakKeyDictionary())
    try:
        answer = answers[right]
    except KeyError:
        try:
            answer = _compute(left, right)
        except AxesError as error:
            answer = str(error)
        answers[right] = answer
    if isinstance(answer, str):
        raise AxesError(answer)
    return answer


# Cached answers by the layouts of the left and the right: an alignment, or the text of the error to raise.
_ANSWERS: WeakKeyDictionary[Layout, WeakKeyDictionary[Layout, Alignment | str | None]] = WeakKeyDictionary()


def _compute(left: Layout, right: Layout) -> Alignment | None:
    axes = {name: entry.axes for entry in (*left, *left.buffers) for name in (entry.name, *entry.ties)}

    def compare(entries: Sequence[Entry | BufferEntry]) -> Iterator[Reorder | None]:
        for entry in entries:
            ours, theirs = axes.get(entry.name), entry.axes
            if ours is None or theirs is None:
                yield None
                continue
            try:
                yield align_tensor(entry.name, ours, theirs, entry.shape, _SIDES)
            except AxesError as error:
                raise AxesError(
                    f"{entry.name!r} is labelled differently on the left and on the right: {error}"
                ) from error

    parameters, buffers = tuple(compare(right.entries)), tuple(compare(right.buffers))
    if not any(each is not None for each in (*parameters, *buffers)):
        return None

    def permute(entries: Sequence[Any], reorders: Sequence[Reorder | None]) -> tuple[Any, ...]:
        return tuple(
            entry if each is None else entry._replace(shape=each.permute_shape(entry.shape), axes=axes[entry.name])
            for entry, each in zip(entries, reorders, strict=True)
        )

    return Alignment(parameters, buffers, Layout(permute(right.entries, parameters), permute(right.buffers, buffers)))


def reorder_state(value: Any, reorder: Reorder, shape: Sequence[int]) -> Any:
    """Return per-parameter state whose tensors follow their parameter.

    Tensors of the parameter's shape are reordered, and so are those that were reduced to size 1 along some of its axes, as
    the row and column statistics of Adafactor. Others, such as counters, are returned unchanged.

    Args:
        value: A tensor, or nested lists, tuples, deques and dictionaries of values; it is not changed.
        reorder: How the parameter was reordered.
        shape: The shape that the parameter had before.

    Example:
        >>> from moduli.layout import Reorder, reorder_state
        >>> state = {"step": torch.tensor(3.0), "exp_avg": torch.tensor([1.0, 2.0])}
        >>> reorder_state(state, Reorder(None, ((1, 0),)), (2,))
        {'step': tensor(3.), 'exp_avg': tensor([2., 1.])}
    """

    def follows(tensor: Tensor) -> bool:
        return tensor.dim() == len(shape) and all(a in (1, b) for a, b in zip(tensor.shape, shape, strict=True))

    return map_tensors(value, lambda tensor: reorder(tensor) if follows(tensor) else tensor)
