"""Tensors as runs of adjacent elements, so that one loop takes dense tensors and blocks of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ._lists import Tensors, count_reach

Addresses = np.ndarray[Any, np.dtype[np.uint64]]
# The largest number of runs of one tensor is the first number times the length of a run, which counts up to the second.
_MOST_ROWS, _WIDE = 1 << 12, 16
_START = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True)
class Runs:
    """Tensors as runs of adjacent elements: a dense tensor is one, a block of a matrix one for each row.

    Attributes:
        owner: For each run the position of its tensor, or a slice.
        sizes: For each run its number of elements.
        shifts: For each list (roles, then outputs with storage, then new ones) the offset of each run in bytes from the address
            of its tensor.
    """

    owner: Any
    sizes: list[int]
    shifts: Sequence[Any]

    def follow(self, columns: Sequence[Addresses], first: int = 0) -> list[Addresses]:
        """Return the address of each run of some lists, starting with list `first`."""
        return [column[self.owner] + shift for column, shift in zip(columns, self.shifts[first:], strict=False)]


@dataclass(frozen=True, slots=True)
class Rows:
    """One tensor as runs of `width` elements, with the starts of the runs in elements, for each list."""

    width: int
    starts: list[Any]

    @property
    def count(self) -> int:
        """The number of runs."""
        return len(self.starts[0])


def find_rows(
    lists: Sequence[Tensors], strides: Sequence[tuple[int, ...]], new: int, flat: bool
) -> tuple[list[Rows], list[int]]:
    """Split each tensor into runs.

    Args:
        lists: The lists.
        strides: The strides of each tensor of a new output.
        new: The number of new outputs.
        flat: Whether they are vectors, which are filled in the order of reading.

    Returns:
        The runs of each tensor, and the positions of the tensors for which a loop over runs is not worth it.
    """
    rows, loose = [], []
    for i, own in enumerate(strides):
        tensors = [each[i] for each in lists]
        cut = _cut_tensor(tensors, own, new, flat)
        if cut is None:
            loose.append(i)
        rows.append(cut or Rows(tensors[0].numel(), [_START] * (len(lists) + new)))
    return rows, loose


def _cut_tensor(tensors: Sequence[torch.Tensor], own: tuple[int, ...], new: int, flat: bool) -> Rows | None:
    """Return the runs of one tensor of each list; None if a loop over them is not worth it. See `find_rows`."""
    first = tensors[0]
    whole = Rows(first.numel(), [_START] * (len(tensors) + new))
    if all(tensor.is_contiguous() for tensor in tensors):
        return whole
    if flat or any(tensor.shape != first.shape for tensor in tensors):
        return None
    strides = [*(tensor.stride() for tensor in tensors), *[own] * new]
    if own == first.stride() and len(set(strides)) == 1:
        return whole
    return _split_rows(first.shape, strides)


def _split_rows(shape: torch.Size, strides: Sequence[tuple[int, ...]]) -> Rows | None:
    """Return the runs of elements that are adjacent in all of these layouts; None if there are too many."""
    width, axes = 1, len(shape)
    while axes and all(shape[axes - 1] == 1 or own[axes - 1] == width for own in strides):
        axes -= 1
        width *= shape[axes]
    rows = shape[:axes].numel()
    if rows > _MOST_ROWS * min(width, _WIDE):
        return None
    places = np.indices(tuple(shape[:axes])).reshape(axes, -1)
    return Rows(width, [np.array(own[:axes], np.int64) @ places for own in strides])


def join_rows(rows: Sequence[Rows], itemsizes: Sequence[Sequence[int]]) -> Runs:
    """Return the runs of all tensors. `itemsizes`: for each list the bytes of an element of each tensor."""
    counts = [each.count for each in rows]
    if all(count == 1 for count in counts):
        return Runs(slice(None), [each.width for each in rows], [0] * len(itemsizes))
    shifts = [
        np.concatenate([each.starts[k] * item for item, each in zip(items, rows, strict=True)]).astype(np.uint64)
        for k, items in enumerate(itemsizes)
    ]
    sizes = [each.width for each in rows for _ in range(each.count)]
    return Runs(np.repeat(np.arange(len(rows)), counts), sizes, shifts)


def measure_extents(tensors: Tensors, rows: Sequence[Rows]) -> Addresses:
    """Return for each run of a list the bytes from its first to its last element."""
    reach = [
        _reach(tensor) if each.count == 1 else each.width * tensor.element_size()
        for tensor, each in zip(tensors, rows, strict=True)
    ]
    return np.repeat(np.array(reach, np.uint64), [each.count for each in rows])


def _reach(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first to the last element.

    A tensor that is not contiguous gets one byte more: its range must never equal that of "exactly the same elements".
    """
    return count_reach(tensor) * tensor.element_size() + (not tensor.is_contiguous() and tensor.numel() > 0)
