"""What to do with given lists: checked and decided once, then looked up.

A plan holds no tensor. It remembers what the lists looked like, the pointers of the last call, and for each part of the
lists the form that runs it.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import _backend
from ._backend import Kernel, KernelError
from ._blocks import Program
from ._cut import Layout, Target
from ._emit import NoCFormError, emit
from ._graph import COMPUTE, Graph
from ._watch import Watch, watch

__all__ = ["Form", "Output", "Piece", "Plan", "State", "describe_dtypes", "form_of"]


@dataclass(frozen=True, slots=True)
class Output:
    """Where one value of the function goes.

    `kind` is `role` (over role `role`), `list` or `flat` (storage that was given), `new` or `newflat`.
    """

    kind: str
    role: int | None = None
    quiet: bool = False  # no one but the caller ever sees it, so autograd is not told


@dataclass(frozen=True, slots=True)
class Form:
    """How one dtype signature runs: a compiled kernel, blocks, torch.compile, or the function itself, and why."""

    name: str
    why: str
    graph: Graph
    kernel: Kernel | None = None
    program: Program | None = None


@dataclass(slots=True)
class Piece:
    """Part of the lists that runs in one form; `indices` is None for all of them."""

    form: Form
    indices: list[int] | None
    sizes: array[int]
    starts: array[int]
    layout: Layout | None = None  # how it is cut into blocks

    @property
    def elements(self) -> int:
        """How many elements it covers."""
        return self.starts[-1]


@dataclass(frozen=True, slots=True)
class State:
    """Where the lists were at the last call: replaced as a whole, never changed, so threads may share it."""

    pointers: array[int]
    bases: tuple[int, ...]
    flats: tuple[array[int], ...]
    tables: tuple[tuple[Any, array[int]], ...]  # for each C piece: what must stay alive, the table of tables
    ranges: array[int] | None  # what is written, sorted; None where it overlaps
    written: int
    overlap: bool
    exact: bool  # something read is exactly something written


@dataclass(slots=True, eq=False)
class Plan:
    """One decision. `lists` are the roles followed by the outputs that are lists."""

    key: tuple[Any, ...]
    count: int
    watches: list[Watch]
    outputs: list[Output]
    dtypes: list[list[torch.dtype] | torch.dtype]
    pieces: list[Piece]
    roles: int
    extents: list[array[int]]
    shapes: list[torch.Size]
    sizes: array[int]
    offsets: list[int]
    needs_graph: str | None
    opaque: str | None
    whole: tuple[bool, ...] | None  # which scalars were Python ints, where that matters
    single: bool
    results: list[tuple[str, int]]
    state: State | None = None
    hot: Any = None  # a `Hot`, where one kernel takes all lists


def describe_dtypes(dtypes: Sequence[torch.dtype]) -> str:
    """Dtypes as a reader expects them."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def form_of(
    graph: Graph,
    outputs: Sequence[tuple[int, torch.dtype, int | None]],
    device: torch.device,
) -> Form:
    """The best form for one signature of dtypes on one device."""
    setting = _backend.mode()
    if device.type not in ("cpu", "meta"):
        return Form("compile", f"the tensors are on {device.type}", graph)
    if device.type == "meta":
        return Form("plain", "tensors on the meta device hold no data", graph)
    live = [graph.nodes[index] for index in graph.live()]
    strange = {node.dtype for node in live} | {node.compute for node in live} | {dtype for _, dtype, _ in outputs}
    strange -= set(COMPUTE)
    if strange:
        names = describe_dtypes(sorted(strange, key=str))
        return Form("plain", f"values of dtype {names} run as torch runs them", graph)
    if setting == "eager":
        return Form("blocks", "MODULI_KERNELS=eager", graph, program=Program(graph, outputs))
    try:
        source = emit(graph, [(node, dtype) for node, dtype, _ in outputs])
    except NoCFormError as missing:
        reason = f"{missing} has no C form"
    else:
        found = _backend.kernel(source)
        if isinstance(found, Kernel):
            return Form("c", "compiled", graph, kernel=found)
        reason = found
        if setting == "c":
            raise KernelError(f"MODULI_KERNELS=c, but the kernel can't be compiled: {reason}")
    return Form("blocks", reason, graph, program=Program(graph, outputs))


def make_piece(form: Form, indices: list[int] | None, sizes: Sequence[int]) -> Piece:
    """A piece over these elements of the lists."""
    chosen = list(sizes) if indices is None else [sizes[i] for i in indices]
    starts = array("q", itertools.accumulate(chosen, initial=0))
    return Piece(form, indices, array("q", chosen), starts)


def extents_of(tensors: Sequence[torch.Tensor]) -> array[int]:
    """Bytes from the first to the last element of each tensor.

    A tensor that is not contiguous gets one byte more: its range must never pass for "exactly the same elements".
    """
    found = array("q")
    for tensor in tensors:
        size = tensor.element_size()
        if tensor.numel() == 0:
            found.append(0)
        elif tensor.is_contiguous():
            found.append(tensor.numel() * size)
        else:
            reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            found.append((reach + 1) * size + 1)
    return found


#: What the compiled check found: the state it compared with, a bit for each list that moved, the pointers.
Located = tuple[State, int, "array[int]"]


def locate(
    plan: Plan,
    lists: Sequence[list[torch.Tensor]],
    flats: Sequence[torch.Tensor],
    located: Located | None = None,
) -> State:
    """The pointers of this call; where they moved, whether anything written overlaps anything else."""
    n, count = plan.count, len(lists)
    before = plan.state
    shared = _backend.native() if any(piece.form.kernel for piece in plan.pieces) else ""
    old = before.pointers if before is not None else array("Q", bytes(8 * n * count))
    if located is not None:
        before, moved, now = located
    elif isinstance(shared, str):
        now = array("Q", itertools.chain.from_iterable(map(torch.Tensor.data_ptr, tensors) for tensors in lists))
        new_bytes, old_bytes = now.tobytes(), old.tobytes()  # comparing arrays would make an int of each element
        same = new_bytes == old_bytes
        step = 8 * n
        moved = (
            0
            if same
            else sum(
                (new_bytes[r * step : (r + 1) * step] != old_bytes[r * step : (r + 1) * step]) << r
                for r in range(count)
            )
        )
    else:
        moved, now = shared.pointers(lists, n, old)
    bases = tuple(flat.data_ptr() for flat in flats)
    if before is not None and not moved and bases == before.bases:
        return before
    same_flats = before is not None and bases == before.bases
    if same_flats and before is not None:
        tables = before.flats
    else:
        tables = tuple(
            array("Q", (np.asarray(plan.offsets, np.int64) * flat.element_size() + base).astype(np.uint64).tobytes())
            for flat, base in zip(flats, bases, strict=True)
        )
    overlap, exact, ranges, written = _overlaps(plan, now, tables, before, moved, same_flats, shared)
    state = State(now, bases, tables, (), ranges, written, overlap, exact)
    if not overlap:
        keep = tuple(_tables(plan, piece, state) for piece in plan.pieces)
        state = State(now, bases, tables, keep, ranges, written, overlap, exact)
    plan.state = state
    return state


def _columns(plan: Plan, state_pointers: array[int], flats: Sequence[array[int]]) -> list[tuple[int, Any]]:
    """(address, keeper) of the table of each role and each output."""
    base, n = state_pointers.buffer_info()[0], plan.count
    columns: list[tuple[int, Any]] = [(base + 8 * n * r, state_pointers) for r in range(plan.roles)]
    position, flat = plan.roles, 0
    for output in plan.outputs:
        if output.kind == "role" and output.role is not None:
            columns.append(columns[output.role])
        elif output.kind in ("list", "new"):
            columns.append((base + 8 * n * position, state_pointers))
            position += 1
        else:
            columns.append((flats[flat].buffer_info()[0], flats[flat]))
            flat += 1
    return columns


def _tables(plan: Plan, piece: Piece, state: State) -> tuple[Any, array[int]]:
    columns = _columns(plan, state.pointers, state.flats)
    if piece.indices is None:
        return None, array("Q", [address for address, _ in columns])
    keep = []
    for address, keeper in columns:
        whole = np.frombuffer(keeper, dtype=np.uint64)
        offset = (address - keeper.buffer_info()[0]) // 8
        keep.append(array("Q", whole[offset : offset + plan.count][piece.indices].tobytes()))
    return keep, array("Q", [column.buffer_info()[0] for column in keep])


def _overlaps(
    plan: Plan,
    now: array[int],
    flats: Sequence[array[int]],
    before: State | None,
    moved: int,
    same_flats: bool,
    shared: Any,
) -> tuple[bool, bool, array[int] | None, int]:
    """(whether it overlaps, whether something is read that is exactly written, sorted ranges, how many)."""
    n = plan.count
    columns = _columns(plan, now, flats)
    over = [output.role for output in plan.outputs if output.kind == "role" and output.role is not None]
    written = [(columns[role][0], plan.extents[role], role) for role in dict.fromkeys(over)]
    if len(set(over)) != len(over):
        return True, False, None, 0
    position = plan.roles
    for j, output in enumerate(plan.outputs):
        if output.kind == "list":
            written.append((columns[plan.roles + j][0], plan.extents[position], position))
        elif output.kind == "flat":
            size = plan.dtypes[j].itemsize  # type: ignore[union-attr]
            written.append((columns[plan.roles + j][0], array("q", [s * size for s in plan.sizes]), -1))
        if output.kind in ("list", "new"):
            position += 1
    reads = [role for role in range(plan.roles) if role not in over]
    if not written:
        return False, False, array("Q"), 0
    if isinstance(shared, str):
        bad, exact = _overlaps_slowly(n, written, [(columns[r][0], plan.extents[r]) for r in reads])
        return bad, exact, None, 0
    stable = same_flats and not any(moved >> position & 1 for _, _, position in written if position >= 0)
    if before is not None and stable and before.ranges is not None and not before.overlap:
        ranges, m = before.ranges, before.written
        reads = [role for role in reads if moved >> role & 1]
    else:
        ranges = array("Q", bytes(24 * n * len(written)))
        tables = array("Q", [address for address, _, _ in written])
        extents = array("Q", [extent.buffer_info()[0] for _, extent, _ in written])
        m = shared.written(len(written), n, tables.buffer_info()[0], extents.buffer_info()[0], ranges.buffer_info()[0])
        if m < 0:
            return True, False, None, 0
    exact = before is not None and before.exact
    for role in reads:
        extent = plan.extents[role].buffer_info()[0]
        found = shared.clash(m, ranges.buffer_info()[0], n, columns[role][0], extent)
        if found & 1:
            return True, False, ranges, m
        exact = exact or bool(found)
    return False, exact, ranges, m


def _overlaps_slowly(n: int, written: Sequence[Any], reads: Sequence[tuple[int, array[int]]]) -> tuple[bool, bool]:
    """The same without a compiler: sort everything, and look at neighbours."""

    def column(address: int) -> Any:
        return np.ctypeslib.as_array((ctypes.c_int64 * n).from_address(address))

    begin = np.concatenate([column(address) for address, _, _ in written])
    reach = np.concatenate([np.frombuffer(extent, dtype=np.int64) for _, extent, _ in written])
    index = np.tile(np.arange(n), len(written))[reach > 0]
    begin, reach = begin[reach > 0], reach[reach > 0]
    order = np.argsort(begin, kind="stable")
    begin, end, index = begin[order], (begin + reach)[order], index[order]
    if begin.size == 0:
        return False, False
    if np.any(begin[1:] < end[:-1]):
        return True, False
    exact = False
    for address, extent in reads:
        length = np.frombuffer(extent, dtype=np.int64)
        start = column(address)
        place = np.searchsorted(end, start, side="right")
        at = np.minimum(place, begin.size - 1)
        touching = (length > 0) & (place < begin.size) & (begin[at] < start + length)
        same = (begin[at] == start) & (end[at] == start + length) & (index[at] == np.arange(n))
        if np.any(touching & ~same):
            return True, False
        exact = exact or bool(np.any(touching))
    return False, exact


def watches_of(lists: Sequence[Sequence[torch.Tensor]]) -> list[Watch]:
    """A watch for each list."""
    return [watch(tensors) for tensors in lists]


def run_piece(
    plan: Plan,
    piece: Piece,
    keep: tuple[Any, array[int]],
    lists: Sequence[list[torch.Tensor]],
    targets: Sequence[Target],
    scalars: Sequence[float],
    plain: Callable[[Sequence[int]], None],
) -> None:
    """Run one piece in its form."""
    form = piece.form
    if form.kernel is not None:
        numbers = array("d", scalars) if scalars else array("d", [0.0])
        form.kernel.run(
            len(piece.sizes),
            keep[1].buffer_info()[0],
            piece.sizes.buffer_info()[0],
            piece.starts.buffer_info()[0],
            numbers.buffer_info()[0],
            _backend.threads(piece.elements),
        )
    elif form.program is not None:
        if piece.indices is not None:
            lists = [[tensors[i] for i in piece.indices] for tensors in lists]
            targets = [_choose(target, piece.indices) for target in targets]
        if piece.layout is None:
            piece.layout = form.program.layout(lists[: plan.roles], targets)
        form.program.run(lists[: plan.roles], targets, scalars, piece.layout)
    else:
        plain(range(plan.count) if piece.indices is None else piece.indices)


def _choose(target: Target, indices: Sequence[int]) -> Target:
    if isinstance(target, tuple):
        return target[0], [target[1][i] for i in indices]
    return [target[i] for i in indices]
