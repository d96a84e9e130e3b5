"""Making a plan: the form of each part of the lists, the places of results, and the layout that later calls are compared with."""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .._torch import is_fake
from . import _backend
from ._checks import check_access, check_lists, check_places, explain_opaque, find_end
from ._choice import choose_form
from ._cuts import preserve_strides
from ._forms import Form, Situation
from ._lists import ListLayout
from ._plain import PlainForm
from ._plan import CallPlan, Output, Piece
from ._runs import Runs, find_rows, join_rows, measure_extents
from ._runtime import Runtime

if TYPE_CHECKING:
    from ._call import Request
    from ._fuse import Trace

# For each combination of a device and dtypes the positions of its tensors.
Signatures = dict[tuple[Any, ...], list[int]]


def prepare(request: Request) -> CallPlan:
    """Check the lists and return a plan with the form of each part."""
    fused, roles = request.fused, request.roles
    check_lists(request)
    signatures = _group_tensors(request)
    traces = {kind: fused.trace(request.marks, kind[1 : len(roles) + 1]) for kind in signatures}
    graph = next(iter(traces.values())).graph
    check_places(request, graph)
    outputs = _place_outputs(request, traces, signatures)
    over = {output.role for output in outputs}
    written = [i for i in range(len(request.lists)) if i in over or i >= len(roles)]
    fake = any(is_fake(tensor) for tensors in request.lists for tensor in tensors)
    opaque = None if fake else explain_opaque(request.lists)
    device = roles[0][0].device if roles[0] else torch.device("cpu")
    memory = opaque is None and not fake and len(roles[0]) > 0 and device.type != "meta"
    check_access(request, written, memory)
    private = frozenset(role for role, name in enumerate(request.names) if name in fused.private)
    sizes = [tensor.numel() for tensor in roles[0]]
    plan = CallPlan(
        key=request.key,
        layout=_describe_lists(request, written, private, memory),
        reads=list({id(trace.reads): trace.reads for trace in traces.values()}.values()),
        graph=graph,
        outputs=outputs,
        private=private,
        written=written,
        sizes=sizes,
        end=find_end(fused, sizes, request.offsets, apart=request.flat),
        device=device,
        opaque=opaque,
        runs=Runs(slice(None), sizes, [0] * (len(request.lists) + len(outputs))),
    )
    _add_pieces(request, plan, _find_loose(request, plan, memory), signatures, traces)
    return plan


def _group_tensors(request: Request) -> Signatures:
    signatures: Signatures = {}
    for i, first in enumerate(request.roles[0]):
        signatures.setdefault((first.device, *(tensors[i].dtype for tensors in request.lists)), []).append(i)
    return signatures or {(torch.device("cpu"), *([torch.float32] * len(request.roles))): []}


def _describe_lists(request: Request, written: list[int], private: frozenset[int], memory: bool) -> ListLayout:
    """Return the layout that later lists are compared with; private lists are not checked for lazy views."""
    runtime = _backend.runtime() if memory and _backend.mode() in ("auto", "c") else None
    watched = [i for i in range(len(request.lists)) if i not in private]
    frozen = () if torch.is_inference_mode_enabled() else [i for i in written if i in watched]
    shared = runtime if isinstance(runtime, Runtime) else None
    return ListLayout(request.lists, shared, watched if memory else (), frozen, memory=memory)


def _find_loose(request: Request, plan: CallPlan, memory: bool) -> list[int]:
    """Store the runs of the tensors in the plan, and return the positions of tensors with too many runs."""
    if plan.opaque is not None:
        return []
    new = [output for output in plan.outputs if output.kind == "new"]
    plan.strides = [preserve_strides(tensor) for tensor in request.roles[0]]
    flat = any(output.vector is not None for output in new)
    rows, loose = find_rows(request.lists, plan.strides, len(new), flat)
    if plan.graph.reads_positions():
        loose += [i for i, each in enumerate(rows) if each.count != 1]
    itemsizes = [[tensor.element_size() for tensor in tensors] for tensors in request.lists]
    plan.runs = join_rows(rows, itemsizes + [[dtype.itemsize for dtype in output.dtypes] for output in new])
    if memory:
        plan.extents = [measure_extents(tensors, rows) for tensors in request.lists]
    return loose


def _add_pieces(
    request: Request,
    plan: CallPlan,
    loose: list[int],
    signatures: Signatures,
    traces: dict[tuple[Any, ...], Trace],
) -> None:
    for kind, indices in signatures.items():
        tight = [i for i in indices if i not in loose] if loose else indices
        if tight:
            dtypes = [output.dtypes[tight[0]] for output in plan.outputs]
            form = _find_form(request, traces[kind], dtypes, kind[0], plan.opaque)
            plan.pieces.append(_make_piece(plan, form, tight, kind[0], traces[kind].numbers))
    if loose:
        form = PlainForm(plan.graph, (), f"{len(loose)} of {plan.count} tensors are not contiguous")
        plan.pieces.append(_make_piece(plan, form, loose, plan.device))


def _make_piece(
    plan: CallPlan, form: Form, indices: list[int], device: torch.device, numbers: tuple[float, ...] = ()
) -> Piece:
    runs: Any = slice(None)
    chosen = plan.runs.sizes
    if len(indices) != plan.count:
        owner = np.arange(plan.count)[plan.runs.owner]
        runs = np.flatnonzero(np.isin(owner, indices))
        chosen = [chosen[i] for i in runs]
    starts = array("q", itertools.accumulate(chosen, initial=0))
    return Piece(form, indices, runs, array("q", chosen), starts, device, numbers)


def _find_form(
    request: Request, trace: Trace, dtypes: Sequence[torch.dtype], device: torch.device, opaque: str | None
) -> Form:
    outputs = [(node, dtype, role) for (node, role), dtype in zip(trace.graph.outputs, dtypes, strict=True)]
    watched = "a dispatch mode sees its operations" if request.watched else None
    situation = Situation(device, _backend.mode(), opaque or trace.reads.problem, watched or trace.unstable)
    key = (tuple(outputs), device.type, situation.setting, watched, opaque)
    form = trace.forms.get(key)
    if form is None:
        form = trace.forms[key] = choose_form(trace.graph, outputs, situation)
    return form


def _place_outputs(request: Request, traces: dict[tuple[Any, ...], Trace], signatures: Signatures) -> list[Output]:
    """Return the place of each value, and the dtype of the storage of each tensor."""
    storage = iter(request.lists[len(request.roles) :])
    free = iter(request.outs)
    outputs: list[Output] = []
    for j, (_, role) in enumerate(next(iter(traces.values())).graph.outputs):
        natural = [torch.float32] * len(request.roles[0])
        every = []
        for signature, indices in signatures.items():
            graph = traces[signature].graph
            every.append(graph.nodes[graph.outputs[j][0]].dtype)
            for i in indices:
                natural[i] = every[-1]
        if role is None and next(free, None) is None:
            vector = functools.reduce(torch.promote_types, every) if request.flat else None
            outputs.append(Output("new", natural if vector is None else [vector] * len(natural), vector=vector))
            continue
        dtypes = [tensor.dtype for tensor in (next(storage) if role is None else request.roles[role])]
        _check_casts(request, natural, dtypes)
        outputs.append(Output("given" if role is None else "role", dtypes, role))
    return outputs


def _check_casts(request: Request, natural: Sequence[torch.dtype], dtypes: Sequence[torch.dtype]) -> None:
    for i, (source, target) in enumerate(zip(natural, dtypes, strict=True)):
        if source is not target and not torch.can_cast(source, target):
            raise RuntimeError(
                f"{request.fused.where}: result type {source} of tensor {i} can't be cast to the type {target} of its "
                "storage, as in torch's own in-place operations; convert in the function or give other storage"
            )
