"""Comparison of lists of tensors with those of an earlier call, and their current addresses."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from ._runtime import Runtime

if TYPE_CHECKING:
    from ._plan import PlanState

Tensors = tuple[torch.Tensor, ...]
_LOOKS = operator.attrgetter("__class__", "layout", "dtype", "device", "shape")


class ListLayout:
    """The types, dtypes, shapes and strides of lists of tensors, to be compared with those of the next call."""

    def __init__(
        self,
        lists: Sequence[Tensors],
        runtime: Runtime | None,
        lazy: Sequence[int],
        frozen: Sequence[int] = (),
        *,
        memory: bool = True,
    ) -> None:
        """Store the layouts of lists.

        Args:
            lists: The lists.
            runtime: The compiled reader, if there is one.
            lazy: The lists in which a tensor may be a view that torch negates lazily.
            frozen: The lists in which a tensor may be an inference tensor, which must not be written.
            memory: Whether the tensors have addresses.
        """
        self._counts = [len(tensors) for tensors in lists]
        self._lengths = array("q", self._counts)
        self._lazy, self._frozen = lazy, frozen
        self._runtime = runtime
        self._memory = memory
        self._facts = None if runtime is None or not memory else runtime.facts(lists)
        self._looks = None if self._facts is not None else [_describe(tensors) for tensors in lists]
        self._blank = array("Q", bytes(8 * sum(self._lengths)))

    def find(self, lists: Sequence[Tensors], state: PlanState | None) -> tuple[int, array[int]] | None:
        """Return a bit for each list that moved, and the current addresses; None if a tensor differs."""
        if list(map(len, lists)) != self._counts:
            return None
        before = self._blank if state is None else state.addresses
        match = self._compare(lists, before)
        if match is None or any(True in map(torch.Tensor.is_neg, lists[i]) for i in self._lazy):
            return None
        moved, now = match
        moved = -1 if state is None else moved
        if moved and any(has_moved(moved, i) and not _are_writable(lists[i]) for i in self._frozen):
            return None
        return moved, now

    def _compare(self, lists: Sequence[Tensors], before: array[int]) -> tuple[int, array[int]] | None:
        if self._runtime is not None and self._facts is not None:
            match = self._runtime.compare(lists, self._lengths, self._facts, before)
            return None if match[0] < 0 else match
        if self._looks is None or [_describe(tensors) for tensors in lists] != self._looks:
            return None
        if not self._memory:
            return 0, before
        now = array("Q", list(map(torch.Tensor.data_ptr, chain.from_iterable(lists))))
        if now == before:
            return 0, now
        if 0 in now and any(not tensor.data_ptr() and tensor.numel() for tensors in lists for tensor in tensors):
            return None  # a tensor of zeros that was never written, or freed storage
        moved = start = 0
        for i, count in enumerate(self._counts):
            end = start + count
            moved |= (now[start:end] != before[start:end]) << min(i, 62)
            start = end
        return moved, now


def _are_writable(tensors: Tensors) -> bool:
    """Return whether no tensor is an inference tensor, and all have memory."""
    return True not in map(torch.Tensor.is_inference, tensors) and all(map(has_memory, tensors))


def count_reach(tensor: torch.Tensor) -> int:
    """Return the number of elements in memory from the first to the last one of a tensor, both included."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the storage of a tensor has all of its elements; a resized one may not, and torch would read beyond it."""
    end = (tensor.storage_offset() + count_reach(tensor)) * tensor.element_size()
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() >= end


def _describe(tensors: Tensors) -> list[Any]:
    """Return the layouts of tensors, to be compared."""
    try:
        return [list(map(_LOOKS, tensors)), list(map(torch.Tensor.stride, tensors))]
    except (AttributeError, TypeError, RuntimeError):
        return [object()]  # something here is not a tensor, or has no strides: never the same


def has_moved(moved: int, i: int) -> int:
    """Return whether a list has moved; lists beyond the 62nd share a bit."""
    return moved >> min(i, 62) & 1
