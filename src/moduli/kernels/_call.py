"""One fused call: find or make the plan, see where the tensors are, run each piece, tell autograd what was written.

What has no other form runs plain: the function itself, tensor by tensor, which is the meaning of all others.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from .._torch import has_dispatch_mode, in_forward_ad, in_transform
from . import _backend
from ._backend import Runtime
from ._graph import Graph
from ._memory import pause_collection
from ._plan import CallPlan, Output, Piece, PlanState, locate, make_tables
from ._prepare import LAZY, find_end, prepare, refuse_graphs
from ._reads import Reads

if TYPE_CHECKING:
    from ._fuse import Fused, Plans


Tensors = tuple[torch.Tensor, ...]

_HALF = (torch.float16, torch.bfloat16)
# From this size on fresh memory is asked for in huge pages.
_LARGE = 4 << 20


def is_transformed() -> bool:
    """Whether torch is doing something with operations other than running them."""
    return torch.compiler.is_compiling() or in_transform() or in_forward_ad()


def call(fused: Fused, args: Sequence[Any], out: Any, flat: bool, offsets: Sequence[int] | None, plans: Plans) -> Any:
    """Run a fused function; the meaning of the arguments is told in `Fused.__call__`."""
    if is_transformed():
        return _run_directly(fused, args, out, flat, offsets)
    request = Request(fused, args, out, flat, offsets, plans.owned)
    plan, state = find_plan(request, plans)
    if torch.is_grad_enabled():
        needs = refuse_graphs(request, plan)
        if needs is not None:
            raise RuntimeError(needs)
        with torch.no_grad():
            return _execute(request, plan, state)
    return _execute(request, plan, state)


class Request:
    """One call: the lists in tuples of its own, so that no one else can change them while it runs."""

    def __init__(
        self,
        fused: Fused,
        args: Sequence[Any],
        out: Any,
        flat: bool,
        offsets: Sequence[int] | None,
        owned: frozenset[str] = frozenset(),
    ) -> None:
        self.fused = fused
        self.owned = owned
        self.marks, self.given, self.scalars = fused.classify(args)
        if not self.given:
            raise TypeError(f"{fused.where} was given no list of tensors; give a list for each role")
        self.outs: tuple[Any, ...] = () if out is None else out if isinstance(out, tuple) else (out,)
        self.roles: list[Tensors] = [tuple(tensors) for tensors in self.given]
        self.flat = flat
        self.offsets = None if offsets is None else tuple(offsets)
        self.lists: list[Tensors] = self.roles + [
            self._part(item) if isinstance(item, torch.Tensor) else tuple(item)
            for item in self.outs
            if isinstance(item, torch.Tensor | list)
        ]
        self.watched = has_dispatch_mode()
        self.key = (
            self.marks,
            len(self.roles[0]),
            tuple(map(type, self.outs)),
            flat,
            self.offsets,
            _backend.mode(),
            torch.is_inference_mode_enabled(),
            self.watched,
            tuple(map(type, self.scalars)),
        )

    def _part(self, vector: torch.Tensor) -> Tensors:
        """A vector that was given, as a piece for each tensor."""
        sizes = [tensor.numel() if isinstance(tensor, torch.Tensor) else 0 for tensor in self.roles[0]]
        end = find_end(self.fused, sizes, self.offsets, apart=False)
        if vector.dim() != 1 or not vector.is_contiguous():
            raise ValueError(
                f"{self.fused.where}: out= is a tensor of shape {tuple(vector.shape)} and strides {vector.stride()}; a vector "
                "must be one-dimensional and contiguous"
            )
        if vector.numel() < end or (self.offsets is None and vector.numel() != end):
            raise ValueError(
                f"{self.fused.where}: the vector out= has {vector.numel()} elements, but the result needs {end}"
            )
        return part_vector(vector.detach(), sizes, self.offsets)


def find_plan(request: Request, plans: Plans) -> tuple[CallPlan, PlanState | None]:
    """The plan of a call, one that fits or a new one, and where its lists are."""
    for plan in plans.kept:
        if plan.key != request.key or any(map(Reads.is_stale, plan.reads)):
            continue
        found = plan.lists.find(request.lists, plan.state, trust=plans.trust)
        if found is not None:
            plans.put(plan)
            return plan, locate(plan, *found) if plan.extents else None
    with pause_collection():  # a plan is kept, with thousands of objects
        plan = prepare(request)
    state = None
    if plan.extents:
        found = plan.lists.find(request.lists, None)
        if found is None:
            raise RuntimeError(f"{request.fused.where}: the tensors were changed by another thread during the call")
        state = locate(plan, *found)
    if plan.opaque != LAZY:  # which is not seen by looking at other lists
        plans.put(plan)
    return plan, state


def part_vector(vector: torch.Tensor, sizes: Sequence[int], offsets: Sequence[int] | None) -> Tensors:
    """A piece of a vector for each tensor, one after the other or where the offsets say."""
    if offsets is None:
        return tuple(torch.split(vector, list(sizes))) if sizes else ()
    return tuple([vector.narrow(0, start, size) for start, size in zip(offsets, sizes, strict=True)])


def _allocate(request: Request, plan: CallPlan, output: Output) -> tuple[Any, list[Any]]:
    """New storage of an output: what the caller gets, and the tensors."""
    if output.vector is not None:
        vector = torch.empty(plan.end, dtype=output.vector, device=plan.device)
        _ask_for_pages([vector])
        if plan.end != sum(plan.sizes):
            vector.zero_()  # between the tensors
        return vector, list(part_vector(vector, plan.sizes, plan.offsets))
    if plan.opaque is not None:
        made: list[Any] = [None] * plan.count
    else:
        layout = zip(request.roles[0], plan.strides, output.dtypes, strict=True)
        made = [like.new_empty_strided(like.shape, strides, dtype=d) for like, strides, d in layout]
        _ask_for_pages(made)
    return made, made


def _ask_for_pages(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size >= _LARGE and tensor.device.type == "cpu" and _backend.mode() in ("auto", "c"):
            shared = _backend.runtime()
            if isinstance(shared, Runtime):
                shared.huge(tensor.data_ptr(), size)


def _execute(request: Request, plan: CallPlan, state: PlanState | None) -> Any:
    given, lists = iter([item for item in request.outs if item is not None]), iter(request.lists[plan.roles :])
    results: list[Any] = []  # what the caller gets for each output
    targets: list[Any] = []  # where it is written
    fresh: list[Any] = []
    result: Any
    target: Any
    for output in plan.outputs:
        if output.role is not None:
            result, target = request.given[output.role], request.roles[output.role]
        elif output.kind == "given":
            result, target = next(given), next(lists)
        else:
            result, target = _allocate(request, plan, output)
            fresh.append(target)
        results.append(result)
        targets.append(target)
    if state is not None and state.overlap:
        _run_plain(request, plan, targets, range(plan.count))
    else:
        tables: Any = [(None, None)] * len(plan.pieces)  # without memory to look at the tensors are fake
        if state is not None:
            tables = state.tables or make_tables(plan, state.columns, fresh)
        for k, (piece, (columns, table)) in enumerate(zip(plan.pieces, tables, strict=True)):
            form, indices = piece.form, piece.indices
            scalars = [*_bring(request.scalars, piece.device), *piece.numbers]
            if form.kernel is not None:
                _count_versions(plan, targets, indices)
                _run_kernel(piece, table, scalars)
                continue
            if form.triton is not None and form.triton.problem is None:
                _count_versions(plan, targets, indices)
                if k not in plan.devices:
                    plan.devices[k] = form.triton.make_table(piece.device, piece.sizes)
                if form.triton.run(plan.devices[k], columns, scalars):
                    continue
            if form.program is not None and not (state is not None and state.exact):
                roles, places = ([_choose(each, indices, plan) for each in lists] for lists in (request.roles, targets))
                form.program.run(roles, places, scalars, piece.cuts)
            else:
                _run_plain(request, plan, targets, indices)
    returned = [request.given[at] if kind == "role" else results[at] for kind, at in plan.results]
    if plan.single:
        return returned[0]
    return tuple(returned) if returned else None


def _bring(scalars: Sequence[Any], device: torch.device) -> Sequence[Any]:
    """Scalars where a piece of the lists is: to bring a number of a device to the host waits for it."""
    if all(not isinstance(value, torch.Tensor) or value.device == device for value in scalars):
        return scalars
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in scalars]


def _run_kernel(piece: Piece, table: array[int], scalars: Sequence[Any]) -> None:
    numbers = array("d", scalars or (0.0,))
    piece.form.kernel.run(  # type: ignore[union-attr]
        len(piece.sizes),
        table.buffer_info()[0],
        piece.sizes.buffer_info()[0],
        piece.starts.buffer_info()[0],
        numbers.buffer_info()[0],
        _backend.threads(piece.starts[-1]),
    )


def _run_plain(request: Request, plan: CallPlan, targets: Sequence[Any], indices: Sequence[int]) -> None:
    """Run the function over these elements of the lists, in order. A target without a tensor is given the value itself.

    Of tensors whose operations may fail everything is computed before anything is written.
    """
    fused, marks = request.fused, request.marks
    for group in [[i] for i in indices] if plan.opaque is None else [indices]:
        computed = []
        for i in group:
            tensors = [role[i] for role in request.roles]
            graph = fused.trace(marks, tuple(tensor.dtype for tensor in tensors)).graph
            values = _apply(request, graph, tensors)
            computed.append([v.to(graph.nodes[node].dtype) for v, (node, _) in zip(values, graph.outputs, strict=True)])
        # All values exist before the first is written, so results that overwrite arguments can't disturb each other.
        for i, values in zip(group, computed, strict=True):
            for target, value in zip(targets, values, strict=True):
                if target[i] is None:
                    target[i] = value
                else:
                    target[i].copy_(value if value.shape == target[i].shape else value.reshape(target[i].shape))


def _apply(request: Request, graph: Graph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Call the function on one tensor per role: the outputs of its graph.

    Roles that the function changes are given as clones, so that nothing is changed before everything was computed.
    """
    shape = tensors[0].shape
    # A tensor without axes would promote with numbers as no other does.
    alike = all(tensor.shape == shape for tensor in tensors) and shape != ()
    changed = [role for _, role in graph.outputs[: graph.mutated] if role is not None]
    roles = []
    for position, tensor in enumerate(tensors):
        value = tensor if alike else tensor.reshape(-1)
        if value.dtype in _HALF:
            value = value.float()
        if position in changed and value.dtype is tensor.dtype:
            value = value.clone()
        roles.append(value)
    # Numbers wrapped as torch wraps them in a trace; integer tensors promote by the kind of Python number instead.
    floating = any(tensor.dtype.is_floating_point or tensor.dtype.is_complex for tensor in tensors)
    values: list[Any] = []
    remaining, numbers = iter(roles), iter(request.scalars)
    for mark in request.marks:
        if mark == "role":
            values.append(next(remaining))
        elif isinstance(mark, str):
            number = next(numbers)
            if floating and not isinstance(number, torch.Tensor):
                number = torch.tensor(float(number), dtype=torch.float64, device="cpu")
            values.append(number)
        else:
            values.append(mark[1])
    result = request.fused.fn(*values)
    results = [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)
    if not alike:
        results = [value.reshape(shape) for value in results]
    kinds = zip(results, graph.results, strict=True)
    return [roles[role] for role in changed] + [value for value, (kind, _) in kinds if kind == "output"]


def _run_directly(fused: Fused, args: Sequence[Any], out: Any, flat: bool, offsets: Sequence[int] | None) -> Any:
    """The function itself, for torch.compile, torch.func and forward mode, which see its operations."""
    if out is not None or offsets is not None:
        raise ValueError(
            f"{fused.where} was called with out= or offsets= inside torch.compile or a torch.func transform; call it "
            "without, the transform decides where results live"
        )
    lists = [position for position, value in enumerate(args) if isinstance(value, list | tuple)]
    if not lists:
        raise TypeError(f"{fused.where} was given no list of tensors; give a list for each role")
    columns: list[list[Any]] = []
    single = False
    for i in range(len(args[lists[0]])):
        values = [value[i] if position in lists else value for position, value in enumerate(args)]
        result = fused.fn(*values)
        single = isinstance(result, torch.Tensor)
        results = [] if result is None else [result] if single else list(result)
        for position, name in enumerate(fused.inplace):
            if name is not None:
                place = args[fused.names.index(name)][i]
                place.copy_(results[position])
                results[position] = place
        columns.append(results)
    gathered: list[Any] = [list(column) for column in zip(*columns, strict=True)]
    if flat:
        gathered = [torch.cat([value.reshape(-1) for value in column]) for column in gathered]
    return gathered[0] if single else tuple(gathered) if gathered else None


def _choose(target: Any, indices: Sequence[int], plan: CallPlan) -> Sequence[torch.Tensor]:
    """The tensors of a list at these positions."""
    return target if len(indices) == plan.count else [target[i] for i in indices]


def _count_versions(plan: CallPlan, targets: Sequence[Any], indices: Sequence[int]) -> None:
    """Count up the versions of what a kernel writes, as an in-place operation of torch does."""
    for output, target in zip(plan.outputs, targets, strict=True):
        if output.kind == "new" or output.private:
            continue
        written = _choose(target, indices, plan)
        if torch.is_inference_mode_enabled():
            written = [tensor for tensor in written if not tensor.is_inference()]
        increment_version(written)
