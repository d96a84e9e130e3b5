"""Making a plan: everything that can be wrong with the lists is found here, before anything is written."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .._torch import is_fake
from . import _backend
from ._plan import CallPlan, Form, Lists, Output, Piece, form_of
from ._runtime import Runtime

if TYPE_CHECKING:
    from ._call import Request
    from ._fuse import Fused, Slot, Trace

__all__ = ["prepare", "refuse_graphs"]

_TYPES = (torch.Tensor, torch.nn.Parameter)
Tensors = tuple[torch.Tensor, ...]


def prepare(request: Request) -> CallPlan:
    """Check the lists and decide how each part of them runs."""
    fused, marks, roles = request.fused, request.marks, request.roles
    count = len(roles[0])
    names = [fused.role_name(role, marks) for role in range(len(roles))]
    for name, tensors in zip(names, roles, strict=True):
        _check_list(fused, name, tensors, count, names[0], roles[0])
    places = _places(request, count, names[0])
    signatures: dict[tuple[Any, ...], list[int]] = {}
    listed = [place for place in places if isinstance(place, tuple)]
    for i in range(count):
        signature = (roles[0][i].device, *(tensors[i].dtype for tensors in itertools.chain(roles, listed)))
        signatures.setdefault(signature, []).append(i)
    if not signatures:
        signatures[(torch.device("cpu"), *([torch.float32] * len(roles)))] = []
    traces = {s: fused.trace(marks, s[1 : len(roles) + 1], request.whole) for s in signatures}
    first = next(iter(traces.values()))
    slots = fused.slots(marks, first.graph)
    kinds = _kinds(request, slots, places)
    sizes = [tensor.numel() for tensor in roles[0]]
    offsets, end = _offsets(request, sizes, kinds, places)
    outputs = _outputs(request, slots, kinds, places, traces, signatures)
    written = [(names[o.role], roles[o.role]) for o in outputs if o.role is not None]
    written += [("out", (p,) if isinstance(p, torch.Tensor) else p) for p in places if p is not None]
    for name, tensors in written:
        _check_writable(fused, name, tensors)
    fake = any(is_fake(tensor) for tensors in request.lists for tensor in tensors)
    opaque = None if fake else _opaque(request.lists)
    memory = opaque is None and not fake and roles[0][:1] != () and roles[0][0].device.type != "meta"
    runtime = _backend.runtime() if memory and _backend.mode() in ("auto", "c") else None
    integral = any(not any(d.is_floating_point or d.is_complex for d in s[1 : len(roles) + 1]) for s in signatures)
    private = {names.index(name) for name in fused.private if name in names}
    watched = [r for r in range(len(request.lists)) if r not in private]
    over = {output.role for output in outputs if output.role is not None}
    frozen = [r for r in watched if r in over or r >= len(roles)]
    plan = CallPlan(
        key=request.key,
        count=count,
        roles=len(roles),
        lists=Lists(
            request.lists,
            runtime if isinstance(runtime, Runtime) else None,
            watched if memory else (),
            () if torch.is_inference_mode_enabled() else frozen,
            owned=[r for r, name in enumerate(names) if name in request.owned],
            memory=memory,
        ),
        reads=list({id(trace.reads): trace.reads for trace in traces.values()}.values()),
        outputs=outputs,
        pieces=[],
        shapes=[tensor.shape for tensor in roles[0]],
        strides=[],
        sizes=array("q", sizes),
        offsets=offsets,
        end=end,
        device=roles[0][0].device if count else torch.device("cpu"),
        opaque=opaque,
        whole=request.whole if integral else None,
        single=first.graph.single,
        results=_results(slots, first.graph.same),
    )
    loose: set[int] = set()
    if opaque is None:
        vectors = any(kind in ("flat", "newflat") for kind in kinds)
        loose = {i for i in range(count) if not _is_dense([t[i] for t in (*roles, *listed)], vectors)}
        plan.strides = [_preserved(tensor) for tensor in roles[0]]
        plan.extents = _extents(request, outputs, sizes) if memory else []
    strided = sorted(loose)
    for signature, indices in signatures.items():
        tight = [i for i in indices if i not in loose]
        if tight:
            form = _form(request, traces[signature], slots, outputs, tight, signature[0], opaque)
            plan.pieces.append(_piece(form, None if len(tight) == count else tight, sizes, signature[0]))
    if strided:
        reason = f"{len(strided)} of {count} tensors are not contiguous"
        form = Form("plain", reason, first.graph)
        plan.pieces.append(_piece(form, None if len(strided) == count else strided, sizes, plan.device))
    return plan


def _piece(form: Form, indices: list[int] | None, sizes: Sequence[int], device: torch.device) -> Piece:
    chosen = list(sizes) if indices is None else [sizes[i] for i in indices]
    return Piece(form, indices, array("q", chosen), array("q", itertools.accumulate(chosen, initial=0)), device)


def _form(
    request: Request,
    trace: Trace,
    slots: Sequence[Slot],
    outputs: Sequence[Output],
    indices: Sequence[int],
    device: torch.device,
    opaque: str | None,
) -> Form:
    described = []
    for slot, output in zip(request.fused.slots(request.marks, trace.graph), outputs, strict=True):
        dtype = output.dtypes
        if isinstance(dtype, list):
            dtype = dtype[indices[0]] if indices else trace.graph.nodes[slot.node].dtype
        described.append((slot.node, dtype, output.role))
    watched = "a dispatch mode sees its operations" if request.key[-2] else None
    key = (tuple(described), device.type, _backend.mode(), watched, opaque)
    form = trace.forms.get(key)
    if form is None:
        plain = opaque or trace.reads.problem
        form = trace.forms[key] = form_of(trace.graph, described, device, plain, watched or trace.restless)
    return form


def _results(slots: Sequence[Slot], same: Sequence[int | None]) -> list[tuple[str, int]]:
    """For each returned value: the role it is, or the output that holds it."""
    at = {slot.position: k for k, slot in enumerate(slots) if not slot.mutated}
    return [("output", at[position]) if role is None else ("role", role) for position, role in enumerate(same)]


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


def _places(request: Request, count: int, first: str) -> list[Any]:
    """Storage that was given: a vector, a tuple of tensors, or None for new storage."""
    remaining = iter(request.lists[len(request.roles) :])
    places: list[Any] = []
    for item in request.outs:
        if isinstance(item, torch.Tensor):
            places.append(next(remaining)[0])
            device = request.roles[0][0].device if count else item.device
            if item.device != device:
                raise ValueError(
                    f"{request.fused.where}: the vector out= is on {item.device} and {first}[0] on {device}; move one"
                )
        elif isinstance(item, list):
            places.append(next(remaining))
            _check_list(request.fused, "out", places[-1], count, first, request.roles[0])
        elif item is None:
            places.append(None)
        else:
            raise TypeError(
                f"{request.fused.where}: out= is a {type(item).__name__}; give a list of tensors or one vector"
            )
    return places


def _kinds(request: Request, slots: Sequence[Slot], places: Sequence[Any]) -> list[str]:
    """The kind of storage of each output."""
    fused = request.fused
    free = sum(slot.role is None for slot in slots)
    if places and len(places) != free:
        raise ValueError(
            f"{fused.where} has {free} results that are not in place and out= gives {len(places)} places; give a "
            "list of tensors or a vector, or a tuple with one of those (or None) for each result"
        )
    remaining = iter(places)
    kinds = []
    for slot in slots:
        place = next(remaining, None) if slot.role is None else None
        if slot.role is not None:
            kinds.append("role")
        elif place is None:
            kinds.append("newflat" if request.flat else "new")
        else:
            kinds.append("flat" if isinstance(place, torch.Tensor) else "list")
    if request.offsets is not None and not any(kind in ("flat", "newflat") for kind in kinds):
        raise ValueError(f"{fused.where}: offsets= places tensors in a vector; give out=vector or flat=True with it")
    return kinds


def _offsets(
    request: Request, sizes: Sequence[int], kinds: Sequence[str], places: Sequence[Any]
) -> tuple[list[int], int]:
    """Where each tensor begins in a vector, and where the last ends."""
    where, given = request.fused.where, request.offsets
    starts = list(itertools.accumulate(sizes, initial=0))[:-1] if given is None else [int(start) for start in given]
    if len(starts) != len(sizes):
        raise ValueError(f"{where}: {len(starts)} offsets for {len(sizes)} tensors; give one for each")
    end = max((start + size for start, size in zip(starts, sizes, strict=True)), default=0)
    if min(starts, default=0) < 0:
        raise ValueError(f"{where}: offsets can't be negative, got {min(starts)}")
    if given is not None and "newflat" in kinds:
        ordered = sorted((start, size) for start, size in zip(starts, sizes, strict=True) if size)
        if any(a + n > b for (a, n), (b, _) in itertools.pairwise(ordered)):
            raise ValueError(f"{where}: offsets make tensors overlap in the vector")
    for item in places:
        if not isinstance(item, torch.Tensor):
            continue
        if item.dim() != 1 or not item.is_contiguous():
            raise ValueError(
                f"{where}: out= is a tensor of shape {tuple(item.shape)} and strides {item.stride()}; a vector must be "
                "one-dimensional and contiguous"
            )
        if item.numel() < end or (given is None and item.numel() != sum(sizes)):
            raise ValueError(f"{where}: the vector out= has {item.numel()} elements, but the result needs {end}")
    return starts, end


def _outputs(
    request: Request,
    slots: Sequence[Slot],
    kinds: Sequence[str],
    places: Sequence[Any],
    traces: dict[tuple[Any, ...], Trace],
    signatures: dict[tuple[Any, ...], list[int]],
) -> list[Output]:
    """Where each value goes, and the dtype of the storage: one for each tensor, or that of the vector."""
    fused, marks = request.fused, request.marks
    given = iter([place for place in places if place is not None])
    found: list[Output] = []
    for j, (slot, kind) in enumerate(zip(slots, kinds, strict=True)):
        natural: list[torch.dtype] = [torch.float32] * len(request.roles[0])
        every = []
        for signature, indices in signatures.items():
            graph = traces[signature].graph
            every.append(graph.nodes[fused.slots(marks, graph)[j].node].dtype)
            for i in indices:
                natural[i] = every[-1]
        if kind == "new":
            found.append(Output(kind, natural))
            continue
        if kind == "newflat":
            dtype = every[0]
            for other in every[1:]:
                dtype = torch.promote_types(dtype, other)
            found.append(Output(kind, dtype))
            continue
        place: Any = next(given) if slot.role is None else request.roles[slot.role]
        vector = isinstance(place, torch.Tensor)
        dtypes = [place.dtype] * len(natural) if vector else [tensor.dtype for tensor in place]
        for i, (source, target) in enumerate(zip(natural, dtypes, strict=True)):
            if source is not target and not torch.can_cast(source, target):
                raise RuntimeError(
                    f"{fused.where}: result type {source} of tensor {i} can't be cast to the type {target} of its "
                    "storage, as in torch's own in-place operations; convert in the function or give other storage"
                )
        private = slot.role is not None and fused.role_name(slot.role, marks) in fused.private
        found.append(Output(kind, place.dtype if vector else dtypes, slot.role, private))
    return found


def _opaque(lists: Sequence[Tensors]) -> str | None:
    """Why the memory of some tensor can't be read as plain numbers, if so."""
    for tensors in lists:
        for tensor in tensors:
            if type(tensor) not in _TYPES:
                return f"tensors of type {type(tensor).__name__} run as they define it"
            if tensor.layout is not torch.strided:
                return f"{str(tensor.layout).removeprefix('torch.')} tensors run as torch runs them"
            if tensor.is_neg() or tensor.is_conj() or (tensor.numel() and tensor._is_zerotensor()):
                return "lazily negated, conjugated or zero tensors run as torch runs them"
    return None


def _is_dense(tensors: Sequence[torch.Tensor], vectors: bool) -> bool:
    """Whether the elements of these tensors lie side by side, in one order for all of them."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    first = tensors[0]
    if vectors or any(t.shape != first.shape or t.stride() != first.stride() for t in tensors[1:]):
        return False
    return _preserved(first) == first.stride()


def _preserved(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that torch gives to the result of a pointwise operation: those of a dense tensor."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def _check_writable(fused: Fused, name: str, tensors: Sequence[torch.Tensor]) -> None:
    for i, tensor in enumerate(tensors):
        strided = tensor.layout is torch.strided and type(tensor) in _TYPES and not tensor.is_contiguous()
        if strided and any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
            raise RuntimeError(
                f"{fused.where}: {name}[{i}] is expanded: more than one element of the written-to tensor refers to a "
                "single memory location. Clone it first"
            )
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{fused.where}: {name}[{i}] is an inference tensor: an in-place update of it outside InferenceMode is "
                "not allowed. Clone it first, or call inside torch.inference_mode()"
            )


def refuse_graphs(request: Request, plan: CallPlan) -> str | None:
    """Why autograd would have to record this call, if so; asked while grad mode is on."""
    fused, marks, roles = request.fused, request.marks, request.roles
    over = {output.role for output in plan.outputs if output.role is not None}
    named = [(fused.role_name(role, marks), tensors) for role, tensors in enumerate(roles)]
    written = [entry for role, entry in enumerate(named) if role in over]
    for name, tensors in [*written, *(("out", tensors) for tensors in request.lists[len(roles) :])]:
        for i, tensor in enumerate(tensors):
            if tensor.requires_grad:
                what = (
                    "a leaf Variable that requires grad is being used in an in-place operation"
                    if tensor.is_leaf
                    else "a tensor that requires grad is being written without recording a graph"
                )
                return f"{what}: {name}[{i}] of {fused.where}. Call it under torch.no_grad()"
    for name, tensors in named:
        for i, tensor in enumerate(tensors):
            if tensor.requires_grad:
                return (
                    f"{name}[{i}] of {fused.where} requires grad and grad mode is on, but a fused pass records no "
                    "graph. Call it under torch.no_grad(), or call the function itself"
                )
    return None


def _extents(request: Request, outputs: Sequence[Output], sizes: Sequence[int]) -> list[Any]:
    """Bytes from the first to the last element of each tensor: of the roles, then of the storage that was given.

    A tensor that is not contiguous gets one byte more: its range must never pass for "exactly the same elements".
    """
    found = [_reach(tensors) for tensors in request.roles]
    given = iter(request.lists[len(request.roles) :])
    for output in outputs:
        if output.kind == "list":
            found.append(_reach(next(given)))
        elif output.kind == "flat":
            next(given)
            found.append(np.array([size * output.dtypes.itemsize for size in sizes], np.uint64))  # type: ignore[union-attr]
    return found


def _reach(tensors: Tensors) -> Any:
    found = []
    for tensor in tensors:
        size = tensor.element_size()
        if tensor.numel() == 0:
            found.append(0)
        elif tensor.is_contiguous():
            found.append(tensor.numel() * size)
        else:
            reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            found.append((reach + 1) * size + 1)
    return np.array(found, np.uint64)
