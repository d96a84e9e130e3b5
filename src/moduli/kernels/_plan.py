"""What to do with given lists: checked and decided once, then looked up.

A plan holds no tensor. It remembers what the lists looked like, the addresses of the last call, and for each part of the
lists the form that runs it. `Lists` says whether lists are what they were; `locate` looks for overlaps where they moved.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ._foreach import Cuts
from ._forms import Form
from ._purity import Purity
from ._runtime import Runtime
from ._triton import Table

Tensors = tuple[torch.Tensor, ...]
Addresses = np.ndarray[Any, np.dtype[np.uint64]]
# For each piece the addresses that a kernel reads, and the table of their tables.
Tables = list[tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Output:
    """Where one value of the function goes, and the dtype of each tensor there.

    `kind` is `role` (over role `role`), `given` (storage that was given) or `new`. `private` storage is the caller's own:
    autograd is not told.
    """

    kind: str
    dtypes: list[torch.dtype]
    role: int | None = None
    private: bool = False
    vector: torch.dtype | None = None  # of one new vector for all of them


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of the lists that runs in one form: the positions of its tensors, and of their runs."""

    form: Form
    indices: Sequence[int]
    runs: Any  # as NumPy takes them
    sizes: array[int]  # of the runs
    starts: array[int]  # of each run among all elements, and the end
    device: torch.device
    numbers: tuple[float, ...] = ()  # further scalars of its graph
    cuts: Cuts = field(default_factory=list)  # how foreach operations go through them, known after the first call


@dataclass(frozen=True, slots=True)
class Runs:
    """Tensors as runs of elements that lie side by side: a dense tensor is one, a block of a matrix one for each row.

    For each run its tensor, its elements, and for each list (roles, then outputs whose storage is given, then new ones) how
    many bytes after the address of this tensor it begins.
    """

    owner: Any
    sizes: list[int]
    shifts: Sequence[Any]

    def follow(self, columns: Sequence[Addresses], first: int = 0) -> list[Addresses]:
        """The address of each run of some lists, from one on."""
        return [column[self.owner] + shift for column, shift in zip(columns, self.shifts[first:], strict=False)]


@dataclass(frozen=True, slots=True)
class PlanState:
    """Where the lists were at the last call: replaced as a whole, never changed, so threads may share it."""

    addresses: array[int]
    columns: list[Addresses]  # of the runs
    written: Ranges | None
    overlap: bool  # something written overlaps something else
    exact: bool  # something read is exactly something written
    tables: Tables | None = None  # of each piece; None where an output is new at every call


@dataclass(slots=True, eq=False)
class CallPlan:
    """One decision. The lists it looks at are the roles, then the storage that was given, a vector as a list of one."""

    key: tuple[Any, ...]
    count: int
    roles: int
    lists: Lists
    reads: list[Purity]
    outputs: list[Output]
    pieces: list[Piece]
    strides: list[tuple[int, ...]]
    sizes: list[int]
    offsets: tuple[int, ...] | None  # of the tensors in a vector
    end: int  # of the last of them
    device: torch.device
    opaque: str | None  # why the tensors have no memory to look at
    single: bool
    results: Sequence[tuple[str, int]]
    allocates: bool  # whether some output is new at every call
    runs: Runs
    extents: list[Addresses] = field(default_factory=list)  # bytes from the first to the last element of each run
    state: PlanState | None = None
    devices: dict[int, Table] = field(default_factory=dict)  # the table on a device of each piece that has one


_LOOKS = operator.attrgetter("__class__", "layout", "dtype", "device", "shape")


class Lists:
    """What lists of tensors look like, to be compared with at the next call."""

    def __init__(
        self,
        lists: Sequence[Tensors],
        runtime: Runtime | None,
        lazy: Sequence[int],
        frozen: Sequence[int] = (),
        *,
        memory: bool = True,
    ) -> None:
        """Look at lists, as far as it takes to compare others with them.

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
        """(a bit for each list that moved, the addresses now), or None where a tensor is not what it was."""
        if list(map(len, lists)) != self._counts:
            return None
        before = self._blank if state is None else state.addresses
        if self._runtime is not None and self._facts is not None:
            moved, now = self._runtime.compare(lists, self._lengths, self._facts, before)
            if moved < 0:
                return None
        else:
            if self._looks is None or [_describe(tensors) for tensors in lists] != self._looks:
                return None
            if not self._memory:
                return 0, before
            now = array("Q", [tensor.data_ptr() for tensors in lists for tensor in tensors])
            # Which of them moved is not worth finding out here.
            moved = 0 if now == before else -1
            if moved and any(not tensor.data_ptr() and tensor.numel() for tensors in lists for tensor in tensors):
                return None  # a tensor of zeros that was never written, or freed storage
        if any(True in map(torch.Tensor.is_neg, lists[i]) for i in self._lazy):
            return None
        moved = -1 if state is None else moved
        for i in self._frozen if moved else ():
            if has_moved(moved, i) and (
                True in map(torch.Tensor.is_inference, lists[i]) or not all(map(has_memory, lists[i]))
            ):
                return None
        return moved, now


def count_reach(tensor: torch.Tensor) -> int:
    """How many elements there are in memory from the first to the last one of a tensor, with both."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether the storage of a tensor holds all of its elements; one that was resized may not, and torch reads on."""
    end = (tensor.storage_offset() + count_reach(tensor)) * tensor.element_size()
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() >= end


def _describe(tensors: Tensors) -> list[Any]:
    try:
        return [list(map(_LOOKS, tensors)), list(map(torch.Tensor.stride, tensors))]
    except (AttributeError, TypeError, RuntimeError):
        return [object()]  # something here is not a tensor, or has no strides: never the same


@dataclass(frozen=True, slots=True)
class Ranges:
    """What is written, sorted and disjoint, with the position of each range in its list."""

    begin: Addresses
    end: Addresses
    index: Any


def locate(plan: CallPlan, before: PlanState | None, moved: int, now: array[int]) -> PlanState:
    """Return the state after lists have moved from `before`, and publish it: whether anything written overlaps anything else."""
    if before is not None and moved == 0:
        return before
    columns = plan.runs.follow(list(np.frombuffer(now, np.uint64).reshape(-1, plan.count)))
    over = [output.role for output in plan.outputs if output.role is not None]
    written = [*over, *range(plan.roles, len(columns))]
    reads = [role for role in range(plan.roles) if role not in over]
    ranges = None if before is None or before.exact or before.overlap else before.written
    if ranges is None or any(has_moved(moved, i) for i in written):
        ranges = _sort_written(plan, columns, written)
    else:
        reads = [role for role in reads if has_moved(moved, role)]
    found = {_clash(ranges, columns[role], plan.extents[role]) for role in reads} if ranges is not None else {"overlap"}
    overlap = "overlap" in found
    tables = None if overlap or plan.allocates else make_tables(plan, columns, [])
    state = plan.state = PlanState(now, columns, ranges, overlap, "exact" in found, tables)
    return state


def has_moved(moved: int, i: int) -> int:
    """Whether a list is not where it was; lists beyond the 62nd share a bit."""
    return moved >> min(i, 62) & 1


def make_tables(plan: CallPlan, columns: list[Addresses], fresh: Sequence[Sequence[torch.Tensor]]) -> Tables:
    """The tables of lists at these addresses, and of new outputs."""
    made = [np.array([tensor.data_ptr() for tensor in tensors], np.uint64) for tensors in fresh]
    given, new = iter(columns[plan.roles :]), iter(plan.runs.follow(made, len(columns)))
    every = columns[: plan.roles]
    for output in plan.outputs:
        every.append(
            columns[output.role] if output.role is not None else next(given if output.kind == "given" else new)
        )
    tables = []
    for piece in plan.pieces:
        keep = [column[piece.runs] for column in every]
        tables.append((keep, array("Q", [column.ctypes.data for column in keep])))
    return tables


def _sort_written(plan: CallPlan, columns: Sequence[Addresses], written: Sequence[int]) -> Ranges | None:
    """What is written, or None where it overlaps itself."""
    if not written:
        nothing = np.empty(0, np.uint64)
        return Ranges(nothing, nothing, np.empty(0, np.int64))
    begin = np.concatenate([columns[i] for i in written])
    reach = np.concatenate([plan.extents[i] for i in written])
    index = np.tile(np.arange(len(columns[0])), len(written))[reach > 0]
    begin, reach = begin[reach > 0], reach[reach > 0]
    order = np.argsort(begin, kind="stable")
    begin, end, index = begin[order], (begin + reach)[order], index[order]
    return None if np.any(begin[1:] < end[:-1]) else Ranges(begin, end, index)


def _clash(ranges: Ranges, start: Addresses, length: Addresses) -> str:
    """How a list that is read meets what is written: `apart`, `exact` (the same tensor i only), or `overlap`."""
    if ranges.begin.size == 0:
        return "apart"
    place = np.searchsorted(ranges.end, start, side="right")
    at = np.minimum(place, ranges.begin.size - 1)
    touching = (length > 0) & (place < ranges.begin.size) & (ranges.begin[at] < start + length)
    if not np.any(touching):
        return "apart"
    same = (ranges.begin[at] == start) & (ranges.end[at] == start + length)
    same &= ranges.index[at] == np.arange(len(start))
    return "overlap" if np.any(touching & ~same) else "exact"
