"""One fused call: find or make the plan, locate the tensors, run each piece, count versions for autograd.

Lists without another form run plain: the function itself, tensor by tensor, which defines the result of all forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._torch import has_dispatch_mode, is_transformed
from . import _backend
from ._checks import LAZY, find_end, refuse_graphs
from ._forms import Form, Work
from ._lists import Tensors
from ._memory import ask_for_pages, pause_collection
from ._plain import arrange_results, run_directly, run_plain
from ._plan import CallPlan, Output, Plans, PlanState, locate, make_tables
from ._prepare import prepare
from ._purity import Purity

if TYPE_CHECKING:
    from ._fuse import Fused


def call(fused: Fused, args: Sequence[Any], out: Any, flat: bool, offsets: Sequence[int] | None, plans: Plans) -> Any:
    """Run a fused function and return its results.

    Args:
        fused: The function.
        args: Its arguments.
        out: As in `Fused.__call__`.
        flat: As in `Fused.__call__`.
        offsets: As in `Fused.__call__`.
        plans: The plans of earlier calls.
    """
    if is_transformed():
        return run_directly(fused, args, out, flat, offsets)
    request = Request(fused, args, out, flat, offsets)
    plan, state = find_plan(request, plans)
    return run_plan(request, plan, state)


def run_plan(request: Request, plan: CallPlan, state: PlanState | None) -> Any:
    """Run a call by its plan and return its results; raise RuntimeError if autograd would have to record it.

    Args:
        request: The call.
        plan: Its plan.
        state: The addresses of its lists.
    """
    if torch.is_grad_enabled():
        needs = refuse_graphs(request, plan)
        if needs is not None:
            raise RuntimeError(needs)
        with torch.no_grad():
            return _execute(request, plan, state)
    return _execute(request, plan, state)


class Request:
    """One call, with the lists copied to tuples, so that they can't be changed while it runs."""

    def __init__(
        self,
        fused: Fused,
        args: Sequence[Any],
        out: Any,
        flat: bool,
        offsets: Sequence[int] | None,
    ) -> None:
        self.fused = fused
        self.marks, self.given, self.scalars = fused.classify(args)
        if not self.given:
            raise TypeError(f"{fused.where} was given no list of tensors; give a list for each role")
        self.outs: tuple[Any, ...] = () if out is None else out if isinstance(out, tuple) else (out,)
        self.roles: list[Tensors] = [tuple(tensors) for tensors in self.given]
        self.flat = flat
        self.offsets = None if offsets is None else tuple(offsets)
        self.lists: list[Tensors] = self.roles + [
            self._split_out(item) if isinstance(item, torch.Tensor) else tuple(item)
            for item in self.outs
            if isinstance(item, torch.Tensor | list)
        ]
        self.watched = has_dispatch_mode()
        #: Sums of squares by tensor and slot, if the function records some.
        self.squares: torch.Tensor | None = None
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

    @property
    def names(self) -> list[str]:
        """The names of the roles."""
        return self.fused.name_roles(self.marks)

    def name_lists(self) -> Iterator[tuple[str, Tensors]]:
        """Return each list with its name: that of its role, or `out`."""
        names = [*self.names, *["out"] * (len(self.lists) - len(self.roles))]
        return zip(names, self.lists, strict=True)

    def _split_out(self, vector: torch.Tensor) -> Tensors:
        """Return the vector passed as `out`, split into a part for each tensor."""
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
        return split_vector(vector.detach(), sizes, self.offsets)


def find_plan(request: Request, plans: Plans) -> tuple[CallPlan, PlanState | None]:
    """Return a plan for a call, a stored or a new one, and the addresses of its lists."""
    for plan in plans.kept:
        if plan.key != request.key or any(map(Purity.is_stale, plan.reads)):
            continue
        # Read once: another thread may replace it between the comparison and its use.
        before = plan.state
        match = plan.layout.find(request.lists, before)
        if match is not None:
            plans.put(plan)
            return plan, locate(plan, before, *match) if plan.extents else None
    with pause_collection():  # a plan is stored, with thousands of objects
        plan = prepare(request)
    state = None
    if plan.extents:
        match = plan.layout.find(request.lists, None)
        if match is None:
            raise RuntimeError(f"{request.fused.where}: the tensors were changed by another thread during the call")
        state = locate(plan, None, *match)
    if plan.opaque != LAZY:  # not detected when lists are compared with a plan
        plans.put(plan)
    return plan, state


def split_vector(vector: torch.Tensor, sizes: Sequence[int], offsets: Sequence[int] | None) -> Tensors:
    """Return a part of a vector for each tensor, one after the other or at the offsets.

    Args:
        vector: The vector.
        sizes: The number of elements of each tensor.
        offsets: Where each begins; None for one after the other.
    """
    if offsets is None:
        return tuple(torch.split(vector, list(sizes))) if sizes else ()
    return tuple([vector.narrow(0, start, size) for start, size in zip(offsets, sizes, strict=True)])


def _allocate(request: Request, plan: CallPlan, output: Output) -> tuple[Any, list[Any]]:
    """Return new storage of an output: the value for the caller, and the tensors."""
    if output.vector is not None:
        vector = torch.empty(plan.end, dtype=output.vector, device=plan.device)
        ask_for_pages([vector])
        if plan.end != sum(plan.sizes):
            vector.zero_()  # between the tensors
        return vector, list(split_vector(vector, plan.sizes, request.offsets))
    if plan.opaque is not None:
        blank: list[Any] = [None] * plan.count
        return blank, blank
    layout = zip(request.roles[0], plan.strides, output.dtypes, strict=True)
    tensors = [like.new_empty_strided(like.shape, strides, dtype=dtype) for like, strides, dtype in layout]
    ask_for_pages(tensors)
    return tensors, tensors


def _place_outputs(request: Request, plan: CallPlan) -> tuple[list[Any], list[Any]]:
    """Return for each output the value for the caller, and the tensors that are written."""
    results: list[Any] = []
    targets: list[Any] = []
    storage = zip([item for item in request.outs if item is not None], request.lists[plan.roles :], strict=True)
    for output in plan.outputs:
        if output.role is not None:
            place: tuple[Any, Any] = request.given[output.role], request.roles[output.role]
        else:
            place = next(storage) if output.kind == "given" else _allocate(request, plan, output)
        results.append(place[0])
        targets.append(place[1])
    return results, targets


def _execute(request: Request, plan: CallPlan, state: PlanState | None) -> Any:
    """Run a call by its plan, and return its results."""
    if plan.squares:
        device = "cpu" if plan.device.type == "meta" else plan.device
        request.squares = torch.zeros(plan.count, plan.squares, dtype=torch.float64, device=device)
    results, targets = _place_outputs(request, plan)
    if state is not None and state.overlap:
        run_plain(request, plan, targets, range(plan.count))
    else:
        _run_pieces(request, plan, state, targets)
    returned = [request.given[at] if kind == "role" else results[at] for kind, at in plan.graph.results]
    return arrange_results(returned, plan.graph.single)


def _run_pieces(request: Request, plan: CallPlan, state: PlanState | None, targets: Sequence[Any]) -> None:
    tables: Any = [(None, None)] * len(plan.pieces)  # for tensors without memory, such as fake ones
    if state is not None:
        tables = state.tables or make_tables(plan, state.columns, targets)
    for piece, (columns, table) in zip(plan.pieces, tables, strict=True):
        scalars = [*_copy_to_device(request.scalars, piece.device), *piece.numbers]
        work = Work(request, plan, state, piece, targets, scalars, columns, table)
        form: Form | None = piece.form
        while form is not None and not form.run(work):
            form = form.fallback


def _copy_to_device(scalars: Sequence[Any], device: torch.device) -> Sequence[Any]:
    """Return scalars on the device of a piece; copying them to the host instead would wait for the device."""
    if all(not isinstance(value, torch.Tensor) or value.device == device for value in scalars):
        return scalars
    return [value.to(device) if isinstance(value, torch.Tensor) else value for value in scalars]
