"""Plans of calls: lists are checked and decisions made once, then looked up.

A plan references no tensor. It stores the layouts of the lists, the addresses of the last call, and for each part of the
lists the form that runs it. `locate` checks for overlaps if lists moved.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ._forms import Form
from ._graph import Graph
from ._lists import ListLayout, has_moved
from ._purity import Purity
from ._runs import Addresses, Runs

# For each piece the addresses that a kernel reads, and the table of their tables.
Tables = list[tuple[Any, Any]]
_MOST_PLANS = 8


@dataclass(frozen=True, slots=True)
class Output:
    """The place of one value of the function, and the dtype of each tensor there.

    `kind` is `role` (over role `role`), `given` (storage that was given) or `new`.
    """

    kind: str
    dtypes: list[torch.dtype]
    role: int | None = None
    vector: torch.dtype | None = None  # the dtype of one new vector for all of them


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
    cache: dict[str, Any] = field(default_factory=dict)  # data of the form for lists of these shapes


@dataclass(frozen=True, slots=True)
class PlanState:
    """The addresses of the lists at the last call: replaced as a whole, never changed, so threads may share it."""

    addresses: array[int]
    columns: list[Addresses]  # of the runs
    written: Ranges | None
    overlap: bool  # something written overlaps something else
    exact: bool  # something read is exactly something written
    tables: Tables | None = None  # of each piece; None where an output is new at every call


@dataclass(slots=True, eq=False)
class CallPlan:
    """A plan. Its lists are the roles, then the storage passed as `out`, a vector split into a list."""

    key: tuple[Any, ...]
    layout: ListLayout
    reads: list[Purity]
    graph: Graph  # for the dtypes of the first tensor
    outputs: list[Output]
    private: frozenset[int]  # the roles whose versions are not incremented when they are written
    written: list[int]  # the lists that are written
    sizes: list[int]
    end: int  # of the last tensor in a vector
    device: torch.device
    opaque: str | None  # why the tensors have no readable memory, or None
    runs: Runs
    pieces: list[Piece] = field(default_factory=list)
    strides: list[tuple[int, ...]] = field(default_factory=list)
    extents: list[Addresses] = field(default_factory=list)  # bytes from the first to the last element of each run
    state: PlanState | None = None
    allocates: bool = field(init=False)  # whether some output is new at every call
    only_read: list[int] = field(init=False)  # the roles that are not written
    count: int = field(init=False)  # the number of tensors in each list
    roles: int = field(init=False)  # the number of lists that are roles
    squares: int = field(init=False)  # the number of sums of squares for each tensor

    def __post_init__(self) -> None:
        self.count, self.roles = len(self.sizes), self.graph.roles
        self.squares = self.graph.count_squares()
        self.allocates = any(output.kind == "new" for output in self.outputs)
        self.only_read = [role for role in range(self.roles) if role not in self.written]


class Plans:
    """The last plans of a function or a bound call, the latest first."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: tuple[CallPlan, ...] = ()

    def put(self, plan: CallPlan) -> None:
        """Put a plan first. Threads may share it, so the tuple is replaced and never changed."""
        if not self.kept or self.kept[0] is not plan:
            self.kept = (plan, *(other for other in self.kept if other is not plan))[:_MOST_PLANS]


@dataclass(frozen=True, slots=True)
class Ranges:
    """The written address ranges, sorted and disjoint, with the position of each in its list."""

    begin: Addresses
    end: Addresses
    index: Any


def locate(plan: CallPlan, before: PlanState | None, moved: int, now: array[int]) -> PlanState:
    """Return the state after lists have moved from `before`, with a check for overlaps, and store it in the plan.

    Args:
        plan: The plan.
        before: The state before; None for a new plan.
        moved: A bit for each list that moved.
        now: The current addresses.
    """
    if before is not None and moved == 0:
        return before
    columns = plan.runs.follow(list(np.frombuffer(now, np.uint64).reshape(-1, plan.count)))
    reads = plan.only_read
    ranges = None if before is None or before.exact or before.overlap else before.written
    if ranges is None or any(has_moved(moved, i) for i in plan.written):
        ranges = _sort_written(plan, columns)
    else:
        reads = [role for role in reads if has_moved(moved, role)]
    meetings = {"overlap"} if ranges is None else {_clash(ranges, columns[r], plan.extents[r]) for r in reads}
    tables = None if "overlap" in meetings or plan.allocates else make_tables(plan, columns, [])
    state = plan.state = PlanState(now, columns, ranges, "overlap" in meetings, "exact" in meetings, tables)
    return state


def make_tables(plan: CallPlan, columns: list[Addresses], targets: Sequence[Sequence[torch.Tensor]]) -> Tables:
    """Return the address tables of each piece, for lists at these addresses and new outputs.

    Args:
        plan: The plan.
        columns: The addresses of each list.
        targets: The tensors of each output, of which those of new outputs are used.
    """
    new = [
        np.array([tensor.data_ptr() for tensor in target], np.uint64)
        for output, target in zip(plan.outputs, targets, strict=False)
        if output.kind == "new"
    ]
    storage, fresh = iter(columns[plan.roles :]), iter(plan.runs.follow(new, len(columns)))
    every = columns[: plan.roles]
    for output in plan.outputs:
        every.append(
            columns[output.role] if output.role is not None else next(storage if output.kind == "given" else fresh)
        )
    tables = []
    for piece in plan.pieces:
        keep = [column[piece.runs] for column in every]
        tables.append((keep, array("Q", [column.ctypes.data for column in keep])))
    return tables


def _sort_written(plan: CallPlan, columns: Sequence[Addresses]) -> Ranges | None:
    """Return the written ranges, or None if they overlap each other."""
    written = plan.written
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
    """Return how a list that is read overlaps the written ranges: `apart`, `exact` (the same tensor i only), or `overlap`."""
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
