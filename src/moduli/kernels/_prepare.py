"""Making a plan: everything that can be wrong with the lists is found here, before anything is written."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from . import _backend
from ._graph import Graph
from ._plan import Form, Output, Plan, extents_of, form_of, make_piece, watches_of

if TYPE_CHECKING:
    from ._fuse import Fused

__all__ = ["prepare", "slots_of", "values_of"]

_TYPES = (torch.Tensor, torch.nn.Parameter)


def slots_of(fused: Fused, marks: Sequence[Any], graph: Graph) -> list[tuple[str, int, int | None]]:
    """What a call writes: (`"mutated"`, role, role) or (`"returned"`, position, role that it overwrites or None)."""
    slots: list[tuple[str, int, int | None]] = [("mutated", role, role) for role, _ in graph.mutated]
    for position, same in enumerate(graph.same):
        if same is None:
            name = fused.inplace[position] if fused.inplace else None
            slots.append(("returned", position, None if name is None else fused.role_of(name, marks)))
    return slots


def values_of(
    fused: Fused,
    marks: Sequence[Any],
    graph: Graph,
    returned: Sequence[torch.Tensor],
    changed: dict[int, torch.Tensor],
) -> list[torch.Tensor]:
    """The values that go to the slots, in the dtypes the graph gives them."""
    values = []
    for kind, position, _ in slots_of(fused, marks, graph):
        if kind == "mutated":
            values.append(changed[position])
        else:
            values.append(returned[position].to(graph.nodes[graph.returned[position]].dtype))
    return values


def _nodes(fused: Fused, marks: Sequence[Any], graph: Graph) -> list[int]:
    mutated = dict(graph.mutated)
    return [
        mutated[position] if kind == "mutated" else graph.returned[position]
        for kind, position, _ in slots_of(fused, marks, graph)
    ]


def prepare(
    fused: Fused,
    marks: tuple[Any, ...],
    roles: list[list[torch.Tensor]],
    whole: tuple[bool, ...],
    outs: Sequence[Any],
    flat: bool,
    offsets: Sequence[int] | None,
    key: tuple[Any, ...],
) -> Plan:
    """Check the lists and decide how each part of them runs."""
    count = len(roles[0])
    names = [fused.role_name(role, marks) for role in range(len(roles))]
    for name, tensors in zip(names, roles, strict=True):
        _check_list(fused, name, tensors, count, names[0], roles[0])
    given = [item for item in outs if isinstance(item, list)]
    for tensors in given:
        _check_list(fused, "out", tensors, count, names[0], roles[0])
    signatures: dict[tuple[Any, ...], list[int]] = {}
    for i in range(count):
        signature = (roles[0][i].device, *(tensors[i].dtype for tensors in itertools.chain(roles, given)))
        signatures.setdefault(signature, []).append(i)
    if not signatures:
        signatures[(torch.device("cpu"), *([torch.float32] * len(roles)))] = []
    graphs = {signature: fused._graph(marks, signature[1 : len(roles) + 1], whole) for signature in signatures}
    first = next(iter(graphs.values()))
    slots = slots_of(fused, marks, first)
    outputs = [
        replace(output, quiet=output.role is not None and names[output.role] in fused.private)
        for output in _outputs(fused, slots, outs, flat, offsets)
    ]
    sizes = [tensor.numel() for tensor in roles[0]]
    places = _offsets(fused, sizes, offsets, outputs, outs)
    dtypes = _storage(fused, marks, outputs, outs, roles, graphs, signatures)
    opaque = _opaque([*roles, *given, [item for item in outs if isinstance(item, torch.Tensor)]])
    written = [(names[o.role], roles[o.role]) for o in outputs if o.role is not None]
    written += [("out", [item] if isinstance(item, torch.Tensor) else item) for item in outs if item is not None]
    for name, tensors in written:
        _check_writable(fused, name, tensors)
    listed = [tensors for _, tensors in written]
    needs = _needs_graph(fused, [(n, t) for n, t in zip(names, roles, strict=True)], written)
    plan = Plan(
        key=key,
        count=count,
        watches=watches_of([*roles, *given]),
        outputs=outputs,
        dtypes=dtypes,
        pieces=[],
        roles=len(roles),
        extents=[] if opaque else _extents(roles, outputs, outs, count),
        shapes=[tensor.shape for tensor in roles[0]],
        sizes=array("q", sizes),
        offsets=places,
        needs_graph=needs,
        opaque=opaque,
        whole=whole if any(_integral(signature[1 : len(roles) + 1]) for signature in signatures) else None,
        single=first.single,
        results=_results(fused, marks, first),
    )
    loose = set() if opaque else _not_contiguous([*roles, *listed], count)
    strided: list[int] = []
    for signature, indices in signatures.items():
        tight = [i for i in indices if i not in loose]
        strided += [i for i in indices if i in loose]
        if indices and not tight:
            continue
        form = _form(fused, marks, graphs[signature], outputs, dtypes, tight, signature)
        plan.pieces.append(make_piece(form, None if len(tight) == count else tight, sizes))
    if strided:
        reason = Form("plain", f"{len(strided)} of {count} tensors are not contiguous", first)
        plan.pieces.append(make_piece(reason, None if len(strided) == count else sorted(strided), sizes))
    return plan


def _integral(dtypes: Sequence[torch.dtype]) -> bool:
    return not any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)


def _results(fused: Fused, marks: Sequence[Any], graph: Graph) -> list[tuple[str, int]]:
    """For each returned value: the role it is, or the output that holds it."""
    slots = slots_of(fused, marks, graph)
    found: list[tuple[str, int]] = []
    for position, same in enumerate(graph.same):
        if same is not None:
            found.append(("role", same))
        else:
            slot = next(k for k, (kind, at, _) in enumerate(slots) if kind == "returned" and at == position)
            found.append(("output", slot))
    return found


def _check_list(
    fused: Fused, name: str, tensors: Sequence[Any], count: int, first: str, reference: Sequence[torch.Tensor]
) -> None:
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


def _outputs(
    fused: Fused, slots: Sequence[tuple[str, int, int | None]], outs: Sequence[Any], flat: bool, offsets: Any
) -> list[Output]:
    free = [slot for slot in slots if slot[2] is None]
    if outs and len(outs) != len(free):
        raise ValueError(
            f"{fused.where} has {len(free)} results that are not in place and out= gives {len(outs)} places; give a "
            "list of tensors or a vector, or a tuple with one of those (or None) for each result"
        )
    remaining = iter(outs)
    outputs = []
    for _, _, role in slots:
        item = next(remaining, None) if role is None else None
        if role is not None:
            outputs.append(Output("role", role))
        elif item is None:
            outputs.append(Output("newflat" if flat else "new"))
        elif isinstance(item, torch.Tensor):
            outputs.append(Output("flat"))
        elif isinstance(item, list):
            outputs.append(Output("list"))
        else:
            raise TypeError(f"{fused.where}: out= is a {type(item).__name__}; give a list of tensors or one vector")
    if offsets is not None and not any(output.kind in ("flat", "newflat") for output in outputs):
        raise ValueError(f"{fused.where}: offsets= places tensors in a vector; give out=vector or flat=True with it")
    return outputs


def _offsets(
    fused: Fused, sizes: Sequence[int], offsets: Sequence[int] | None, outputs: Sequence[Output], outs: Sequence[Any]
) -> list[int]:
    total = sum(sizes)
    places = list(itertools.accumulate(sizes, initial=0))[:-1] if offsets is None else [int(o) for o in offsets]
    if len(places) != len(sizes):
        raise ValueError(f"{fused.where}: {len(places)} offsets for {len(sizes)} tensors; give one for each")
    end = max((place + size for place, size in zip(places, sizes, strict=True)), default=0)
    if min(places, default=0) < 0:
        raise ValueError(f"{fused.where}: offsets can't be negative, got {min(places)}")
    if offsets is not None and any(output.kind == "newflat" for output in outputs):
        ordered = sorted((place, size) for place, size in zip(places, sizes, strict=True) if size)
        if any(a + n > b for (a, n), (b, _) in itertools.pairwise(ordered)):
            raise ValueError(f"{fused.where}: offsets make tensors overlap in the vector")
    for item in outs:
        if not isinstance(item, torch.Tensor):
            continue
        if item.dim() != 1 or not item.is_contiguous():
            raise ValueError(
                f"{fused.where}: out= is a tensor of shape {tuple(item.shape)} and strides {item.stride()}; a vector "
                "must be one-dimensional and contiguous"
            )
        if item.numel() < end or (offsets is None and item.numel() != total):
            raise ValueError(f"{fused.where}: the vector out= has {item.numel()} elements, but the result needs {end}")
    return places


def _storage(
    fused: Fused,
    marks: Sequence[Any],
    outputs: Sequence[Output],
    outs: Sequence[Any],
    roles: Sequence[Sequence[torch.Tensor]],
    graphs: dict[tuple[Any, ...], Graph],
    signatures: dict[tuple[Any, ...], list[int]],
) -> list[list[torch.dtype] | torch.dtype]:
    """The dtype of the storage of each output: per tensor, or of the vector."""
    given = iter([item for item in outs if item is not None])
    found: list[list[torch.dtype] | torch.dtype] = []
    for j, output in enumerate(outputs):
        natural: list[torch.dtype] = [torch.float32] * len(roles[0])
        for signature, indices in signatures.items():
            graph = graphs[signature]
            kind = graph.nodes[_nodes(fused, marks, graph)[j]].dtype
            for i in indices:
                natural[i] = kind
        if output.kind == "new":
            found.append(natural)
            continue
        if output.kind == "newflat":
            kinds = list(dict.fromkeys(natural))
            kinds = kinds or [graph.nodes[_nodes(fused, marks, graph)[j]].dtype for graph in graphs.values()]
            dtype = kinds[0]
            for kind in kinds[1:]:
                dtype = torch.promote_types(dtype, kind)
            found.append(dtype)
            continue
        if output.role is not None:
            place: Any = roles[output.role]
        else:
            place = next(given)
        dtypes = [place.dtype] * len(natural) if isinstance(place, torch.Tensor) else [t.dtype for t in place]
        for source, target in dict.fromkeys(zip(natural, dtypes, strict=True)):
            if not torch.can_cast(source, target):
                i = list(zip(natural, dtypes, strict=True)).index((source, target))
                raise RuntimeError(
                    f"{fused.where}: result type {source} of tensor {i} can't be cast to the type {target} of its "
                    "storage, as in torch's own in-place operations; convert in the function or give other storage"
                )
        found.append(place.dtype if isinstance(place, torch.Tensor) else dtypes)
    return found


def _opaque(lists: Sequence[Sequence[torch.Tensor]]) -> str | None:
    """Why the memory of some tensor can't be read as plain numbers, if so."""
    for tensors in lists:
        for tensor in tensors:
            if type(tensor) not in _TYPES:
                return f"tensors of type {type(tensor).__name__} run as they define it"
            if tensor.layout is not torch.strided:
                return f"{str(tensor.layout).removeprefix('torch.')} tensors run as torch runs them"
            if not tensor.is_cpu:
                return f"the tensors are on {tensor.device.type}"
            if tensor.is_neg() or tensor.is_conj() or (tensor.numel() and tensor._is_zerotensor()):
                return "lazily negated, conjugated or zero tensors run as torch runs them"
    return None


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


def _needs_graph(fused: Fused, roles: Sequence[tuple[str, Any]], written: Sequence[tuple[str, Any]]) -> str | None:
    for name, tensors in written:
        for i, tensor in enumerate(tensors):
            if tensor.requires_grad:
                what = (
                    "a leaf Variable that requires grad is being used in an in-place operation"
                    if tensor.is_leaf
                    else "a tensor that requires grad is being written without recording a graph"
                )
                return f"{what}: {name}[{i}] of {fused.where}. Call it under torch.no_grad()"
    for name, tensors in roles:
        for i, tensor in enumerate(tensors):
            if tensor.requires_grad:
                return (
                    f"{name}[{i}] of {fused.where} requires grad and grad mode is on, but a fused pass records no "
                    "graph. Call it under torch.no_grad(), or call the function itself"
                )
    return None


def _extents(
    roles: Sequence[Sequence[torch.Tensor]], outputs: Sequence[Output], outs: Sequence[Any], count: int
) -> list[Any]:
    """Of the roles and then of the outputs that are lists, in the order of the lists."""
    given = iter([item for item in outs if isinstance(item, list)])
    found = [extents_of(tensors) for tensors in roles]
    for output in outputs:
        if output.kind == "list":
            found.append(extents_of(next(given)))
        elif output.kind == "new":
            found.append(extents_of([]))
    return found


def _not_contiguous(lists: Sequence[Sequence[torch.Tensor]], count: int) -> set[int]:
    found: set[int] = set()
    for tensors in lists:
        if len(tensors) == count:
            found.update(i for i, tensor in enumerate(tensors) if not tensor.is_contiguous())
    return found


def _form(
    fused: Fused,
    marks: Sequence[Any],
    graph: Graph,
    outputs: Sequence[Output],
    dtypes: Sequence[list[torch.dtype] | torch.dtype],
    indices: Sequence[int],
    signature: tuple[Any, ...],
) -> Form:
    nodes = _nodes(fused, marks, graph)
    described = []
    for node, output, dtype in zip(nodes, outputs, dtypes, strict=True):
        storage = dtype if isinstance(dtype, torch.dtype) else dtype[indices[0]] if indices else graph.nodes[node].dtype
        described.append((node, storage, output.role))
    # The graph is kept by the function for as long as its forms, so its id names it.
    key = (id(graph), tuple(described), signature[0].type, _backend.mode())
    form = fused._forms.get(key)
    if form is None:
        form = fused._forms[key] = form_of(graph, described, signature[0])
    return form
