"""Making a plan: everything that can be wrong with the lists is found here, before anything is written."""

from __future__ import annotations

import functools
import itertools
import operator
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .._torch import is_fake
from . import _backend
from ._choice import choose_form
from ._foreach import preserve_strides
from ._forms import Form, Situation
from ._graph import Graph
from ._plain import PlainForm
from ._plan import CallPlan, Lists, Output, Piece, Runs, count_reach, has_memory
from ._runtime import Runtime

if TYPE_CHECKING:
    from ._call import Request
    from ._fuse import Fused, Trace


LAZY = "lazily negated, conjugated or zero tensors run as torch runs them"
_TYPES = (torch.Tensor, torch.nn.Parameter)
# More rows are not worth a loop each: so many of one element, and as many times more of rows up to so wide.
_MOST_ROWS, _WIDE = 1 << 12, 16
Tensors = tuple[torch.Tensor, ...]


def prepare(request: Request) -> CallPlan:
    """Check the lists and decide how each part of them runs."""
    fused, marks, roles = request.fused, request.marks, request.roles
    count = len(roles[0])
    names = [fused.role_name(role, marks) for role in range(len(roles))]
    for name, tensors in zip(names, roles, strict=True):
        _check_list(fused, name, tensors, count, names[0], roles[0])
    for item in request.outs:
        if not isinstance(item, torch.Tensor | list | None):
            raise TypeError(f"{fused.where}: out= is a {type(item).__name__}; give a list of tensors or one vector")
    listed = request.lists[len(roles) :]
    for place in listed:
        _check_list(fused, "out", place, count, names[0], roles[0])
    signatures: dict[tuple[Any, ...], list[int]] = {}
    for i in range(count):
        signature = (roles[0][i].device, *(tensors[i].dtype for tensors in request.lists))
        signatures.setdefault(signature, []).append(i)
    if not signatures:
        signatures[(torch.device("cpu"), *([torch.float32] * len(roles)))] = []
    traces = {s: fused.trace(marks, s[1 : len(roles) + 1]) for s in signatures}
    first = next(iter(traces.values()))
    _check_places(request, first.graph)
    sizes = [tensor.numel() for tensor in roles[0]]
    outputs = _outputs(request, traces, signatures)
    over = {output.role for output in outputs if output.role is not None}
    frozen = [r for r in range(len(request.lists)) if r in over or r >= len(roles)]
    fake = any(is_fake(tensor) for tensors in request.lists for tensor in tensors)
    opaque = None if fake else explain_opaque(request.lists)
    memory = opaque is None and not fake and roles[0][:1] != () and roles[0][0].device.type != "meta"
    for r, (name, tensors) in enumerate(zip([*names, *["out"] * len(listed)], request.lists, strict=True)):
        _check_access(fused, name, tensors, written=r in frozen, memory=memory)
    runtime = _backend.runtime() if memory and _backend.mode() in ("auto", "c") else None
    watched = [r for r in range(len(request.lists)) if r >= len(roles) or names[r] not in fused.private]
    plan = CallPlan(
        key=request.key,
        count=count,
        roles=len(roles),
        lists=Lists(
            request.lists,
            runtime if isinstance(runtime, Runtime) else None,
            watched if memory else (),
            () if torch.is_inference_mode_enabled() else [r for r in frozen if r in watched],
            memory=memory,
        ),
        reads=list({id(trace.reads): trace.reads for trace in traces.values()}.values()),
        outputs=outputs,
        pieces=[],
        strides=[],
        sizes=sizes,
        offsets=request.offsets,
        end=find_end(fused, sizes, request.offsets, apart=request.flat),
        device=roles[0][0].device if count else torch.device("cpu"),
        opaque=opaque,
        single=first.graph.single,
        results=first.graph.results,
        allocates=any(output.kind == "new" for output in outputs),
        runs=Runs(slice(None), sizes, [0] * (len(request.lists) + len(outputs))),
    )
    loose: list[int] = []
    if opaque is None:
        plan.strides = [preserve_strides(tensor) for tensor in roles[0]]
        loose = _find_runs(plan, request.lists, memory)
    for kind, indices in signatures.items():
        tight = [i for i in indices if i not in loose]
        if tight:
            form = _form(request, traces[kind], [output.dtypes[tight[0]] for output in outputs], kind[0], opaque)
            plan.pieces.append(_piece(plan, form, tight, kind[0], traces[kind].numbers))
    if loose:
        form = PlainForm(first.graph, (), f"{len(loose)} of {count} tensors are not contiguous")
        plan.pieces.append(_piece(plan, form, loose, plan.device))
    return plan


def _piece(
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


def _find_runs(plan: CallPlan, lists: Sequence[Tensors], memory: bool) -> list[int]:
    """Describe the tensors as runs, in the plan; the positions of those that are not worth it."""
    fresh = [output for output in plan.outputs if output.kind == "new"]
    flat = any(output.vector is not None for output in fresh)
    start = np.zeros(1, np.int64)
    loose: list[int] = []
    found: list[tuple[int, list[Any]]] = []
    for i in range(plan.count):
        strided = [(tensors[i].shape, tensors[i].stride()) for tensors in lists]
        strided += [(strided[0][0], plan.strides[i])] * len(fresh)
        dense = all(tensors[i].is_contiguous() for tensors in lists)
        runs = None
        if dense or (not flat and plan.strides[i] == strided[0][1] and len(set(strided)) == 1):
            runs = (plan.sizes[i], [start] * len(strided))
        elif not flat and len({shape for shape, _ in strided}) == 1:  # a vector is filled in the order of reading
            runs = _part_rows(strided[0][0], [own for _, own in strided])
        if runs is None:
            loose.append(i)
            runs = (plan.sizes[i], [start] * len(strided))
        found.append(runs)
    counts = [len(shifts[0]) for _, shifts in found]
    for tensors in lists if memory else ():
        reach = [
            _reach(tensor) if rows == 1 else width * tensor.element_size()
            for tensor, rows, (width, _) in zip(tensors, counts, found, strict=True)
        ]
        plan.extents.append(np.repeat(np.array(reach, np.uint64), counts))
    if any(rows > 1 for rows in counts):
        items = [[tensor.element_size() for tensor in tensors] for tensors in lists]
        items += [[dtype.itemsize for dtype in output.dtypes] for output in fresh]
        shifts = [
            np.concatenate([own[k] * item for item, (_, own) in zip(each, found, strict=True)]).astype(np.uint64)
            for k, each in enumerate(items)
        ]
        sizes = [width for rows, (width, _) in zip(counts, found, strict=True) for _ in range(rows)]
        plan.runs = Runs(np.repeat(np.arange(plan.count), counts), sizes, shifts)
    return loose


def _part_rows(shape: torch.Size, strides: Sequence[tuple[int, ...]]) -> tuple[int, list[Any]] | None:
    """(elements side by side in all of these layouts, for each where they begin); None where that is not worth a loop."""
    width, axes = 1, len(shape)
    while axes and all(shape[axes - 1] == 1 or own[axes - 1] == width for own in strides):
        axes -= 1
        width *= shape[axes]
    rows = shape[:axes].numel()
    if rows > _MOST_ROWS * min(width, _WIDE):
        return None
    places = np.indices(tuple(shape[:axes])).reshape(axes, -1)
    return width, [np.array(own[:axes], np.int64) @ places for own in strides]


def _form(
    request: Request, trace: Trace, dtypes: Sequence[torch.dtype], device: torch.device, opaque: str | None
) -> Form:
    outputs = [(node, dtype, role) for (node, role), dtype in zip(trace.graph.outputs, dtypes, strict=True)]
    watched = "a dispatch mode sees its operations" if request.watched else None
    situation = Situation(device, _backend.mode(), opaque or trace.reads.problem, watched or trace.restless)
    key = (tuple(outputs), device.type, situation.setting, watched, opaque)
    form = trace.forms.get(key)
    if form is None:
        form = trace.forms[key] = choose_form(trace.graph, outputs, situation)
    return form


def _check_list(fused: Fused, name: str, tensors: Tensors, count: int, first: str, reference: Tensors) -> None:
    if len(tensors) != count:
        raise ValueError(
            f"{fused.where}: {first!r} has {count} tensors and {name!r} has {len(tensors)}; element i of each list "
            "belongs together, so lists must be of one length"
        )
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{fused.where}: {name}[{i}] is a {type(tensor).__name__}, not a tensor")
        if tensor.numel() != reference[i].numel():
            raise ValueError(
                f"{fused.where}: {name}[{i}] has the shape {tuple(tensor.shape)} and {first}[{i}] the shape "
                f"{tuple(reference[i].shape)}; they must have the same number of elements"
            )
        if tensor.device != reference[i].device:
            raise ValueError(
                f"{fused.where}: {name}[{i}] is on {tensor.device} and {first}[{i}] on {reference[i].device}; "
                "move one of them"
            )


def _check_places(request: Request, graph: Graph) -> None:
    fused, outs = request.fused, request.outs
    free = sum(role is None for _, role in graph.outputs)
    if outs and len(outs) != free:
        raise ValueError(
            f"{fused.where} has {free} results that are not in place and out= gives {len(outs)} places; give a "
            "list of tensors or a vector, or a tuple with one of those (or None) for each result"
        )
    fresh = free if not outs else outs.count(None)
    if request.offsets is not None and not (request.flat and fresh) and not any(map(torch.is_tensor, outs)):
        raise ValueError(f"{fused.where}: offsets= places tensors in a vector; give out=vector or flat=True with it")
    if request.flat and fresh and len({tensor.device for tensor in request.roles[0]}) > 1:
        raise ValueError(f"{fused.where}: flat=True puts all tensors into one vector, but they are on several devices")


def find_end(fused: Fused, sizes: Sequence[int], offsets: Sequence[int] | None, *, apart: bool) -> int:
    """Where the last tensor ends in a vector. `apart`: whether they must not overlap."""
    if offsets is None:
        return sum(sizes)
    if len(offsets) != len(sizes):
        raise ValueError(f"{fused.where}: {len(offsets)} offsets for {len(sizes)} tensors; give one for each")
    if min(offsets, default=0) < 0:
        raise ValueError(f"{fused.where}: offsets can't be negative, got {min(offsets)}")
    places = sorted((start, start + size) for start, size in zip(offsets, sizes, strict=True) if size)
    if apart and any(end > start for (_, end), (start, _) in itertools.pairwise(places)):
        raise ValueError(f"{fused.where}: offsets make tensors overlap in the vector")
    return max((end for _, end in places), default=0)


def _outputs(
    request: Request, traces: dict[tuple[Any, ...], Trace], signatures: dict[tuple[Any, ...], list[int]]
) -> list[Output]:
    """Where each value goes, and the dtype of the storage of each tensor."""
    fused, marks = request.fused, request.marks
    given = iter(request.lists[len(request.roles) :])
    free = iter(request.outs)
    found: list[Output] = []
    for j, (_, role) in enumerate(next(iter(traces.values())).graph.outputs):
        natural: list[torch.dtype] = [torch.float32] * len(request.roles[0])
        every = []
        for signature, indices in signatures.items():
            graph = traces[signature].graph
            every.append(graph.nodes[graph.outputs[j][0]].dtype)
            for i in indices:
                natural[i] = every[-1]
        if role is None and next(free, None) is None:
            vector = functools.reduce(torch.promote_types, every) if request.flat else None
            found.append(Output("new", natural if vector is None else [vector] * len(natural), vector=vector))
            continue
        dtypes = [tensor.dtype for tensor in (next(given) if role is None else request.roles[role])]
        for i, (source, target) in enumerate(zip(natural, dtypes, strict=True)):
            if source is not target and not torch.can_cast(source, target):
                raise RuntimeError(
                    f"{fused.where}: result type {source} of tensor {i} can't be cast to the type {target} of its "
                    "storage, as in torch's own in-place operations; convert in the function or give other storage"
                )
        private = role is not None and fused.role_name(role, marks) in fused.private
        found.append(Output("given" if role is None else "role", dtypes, role, private))
    return found


def explain_opaque(lists: Sequence[Sequence[torch.Tensor]]) -> str | None:
    """Why the memory of some tensor can't be read as plain numbers, if so."""
    for tensors in lists:
        for tensor in tensors:
            if type(tensor) not in _TYPES:
                return f"tensors of type {type(tensor).__name__} run as they define it"
            if tensor.layout is not torch.strided:
                return f"{str(tensor.layout).removeprefix('torch.')} tensors run as torch runs them"
            if tensor.is_neg() or tensor.is_conj() or (tensor.numel() and tensor._is_zerotensor()):
                return LAZY
    return None


def _check_access(fused: Fused, name: str, tensors: Tensors, *, written: bool, memory: bool) -> None:
    """Refuse what must not be written, and what has no memory where there should be some."""
    for i, tensor in enumerate(tensors):
        strided = written and type(tensor) in _TYPES and tensor.layout is torch.strided and not tensor.is_contiguous()
        if strided and any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
            raise RuntimeError(
                f"{fused.where}: {name}[{i}] is expanded: more than one element of the written-to tensor refers to a "
                "single memory location. Clone it first"
            )
        if written and tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{fused.where}: {name}[{i}] is an inference tensor: an in-place update of it outside InferenceMode is "
                "not allowed. Clone it first, or call inside torch.inference_mode()"
            )
        if memory and not has_memory(tensor):
            raise RuntimeError(
                f"{fused.where}: {name}[{i}] has no memory for its {tensor.numel()} elements: its storage was resized to "
                f"{tensor.untyped_storage().nbytes()} bytes, and has to be resized back"
            )


def refuse_graphs(request: Request, plan: CallPlan) -> str | None:
    """Why autograd would have to record this call, if so; asked while grad mode is on."""
    fused = request.fused
    over = {output.role for output in plan.outputs}
    named: list[tuple[bool, str, Sequence[torch.Tensor]]] = [
        (role not in over, fused.role_name(role, request.marks), tensors) for role, tensors in enumerate(request.roles)
    ]
    named += [(False, "out", [x] if isinstance(x, torch.Tensor) else x) for x in request.outs if x is not None]
    for only_read, name, tensors in sorted(named, key=operator.itemgetter(0)):
        for i, tensor in enumerate(tensors):
            if not tensor.requires_grad:
                continue
            if only_read:
                return (
                    f"{name}[{i}] of {fused.where} requires grad and grad mode is on, but a fused pass records no "
                    "graph. Call it under torch.no_grad(), or call the function itself"
                )
            what = (
                "a leaf Variable that requires grad is being used in an in-place operation"
                if tensor.is_leaf
                else "a tensor that requires grad is being written without recording a graph"
            )
            return f"{what}: {name}[{i}] of {fused.where}. Call it under torch.no_grad()"
    return None


def _reach(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element.

    A tensor that is not contiguous gets one byte more: its range must never pass for "exactly the same elements".
    """
    return count_reach(tensor) * tensor.element_size() + (not tensor.is_contiguous() and tensor.numel() > 0)
