"""Sums of squares inside a pass: norms of values in a fused function, without a separate pass.

`record_square(x, slot)` in a fused function adds the squares of a value to a sum of each tensor, in double precision. A bound call
has the sums of its last call as `Bound.squares`, a tensor with a row for each tensor and a column for each slot.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._library import register_pointwise

_collecting = threading.local()


def record_square(x: Tensor, slot: int) -> None:
    """In a fused function, add the squares of a value to the sums of a call.

    Args:
        x: The value, one number per element.
        slot: The column of the sums, from 0.

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> def descend(p, g, lr):
        ...     kernels.record_square(g, 0)
        ...     return p - lr * g
        >>> step = kernels.fuse(descend, inplace="p").bind()
        >>> _ = step([torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)], 0.1)
        >>> step.squares
        tensor([[2.],
                [3.]], dtype=torch.float64)
    """
    torch.ops.moduli.sum_square(x, slot)


@contextmanager
def collect_squares(row: Tensor | None) -> Iterator[None]:
    """Have torch's version of `record_square` add to a row of sums in a block; None for no sums."""
    before = getattr(_collecting, "row", None)
    _collecting.row = row
    try:
        yield
    finally:
        _collecting.row = before


def _compute(x: Tensor, slot: int) -> Tensor:
    row = getattr(_collecting, "row", None)
    if row is not None:
        row[slot] += x.detach().double().square().sum()
    return x.clone()


class PartialSquares:
    """The sums that the threads of a kernel stored behind its scalars; they are added when they are read.

    Args:
        numbers: The scalars, then the sums by thread, run and slot.
        start: Where the sums begin.
        shape: The numbers of threads, runs and slots.

    Example:
        >>> from array import array
        >>> from moduli import kernels
        >>> kernels.PartialSquares(array("d", [0.1, 1.0, 2.0, 3.0, 4.0]), 1, (2, 1, 2)).read()
        tensor([[4., 6.]], dtype=torch.float64)
    """

    __slots__ = ("_numbers", "_shape", "_start")

    def __init__(self, numbers: Any, start: int, shape: tuple[int, int, int]) -> None:
        self._numbers, self._start, self._shape = numbers, start, shape

    def read(self) -> Tensor:
        """Return the sums by run and slot; for whole tensors, which are one run each."""
        return torch.from_numpy(np.frombuffer(self._numbers)[self._start :].reshape(self._shape).sum(0))


def add_runs(squares: Tensor | None, partial: Any, indices: Any, owner: Any) -> None:
    """Add the sums of each run, by thread, to those of the tensors.

    Args:
        squares: The sums by tensor and slot, of the call.
        partial: The sums by thread, run and slot.
        indices: The positions of the tensors of the piece.
        owner: For each run of the piece the position of its tensor; None if each tensor is one run.
    """
    if squares is None:
        raise RuntimeError("a kernel found sums of squares for a call that has no place for them")
    sums = partial.sum(0)
    table = squares.numpy()
    if owner is None:
        table[list(indices)] += sums
    else:
        np.add.at(table, owner, sums)


register_pointwise("sum_square(Tensor self, int slot) -> Tensor", _compute)
