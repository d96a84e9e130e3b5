"""Checks of the lists of a call, done before anything is written."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from ._graph import Graph
from ._lists import Tensors, has_memory

if TYPE_CHECKING:
    from ._call import Request
    from ._fuse import Fused
    from ._plan import CallPlan


LAZY = "lazily negated, conjugated or zero tensors run as torch runs them"
_TYPES = (torch.Tensor, torch.nn.Parameter)


def check_lists(request: Request) -> None:
    """Raise an error if lists differ in length, or element i of one can't belong to element i of another."""
    fused, first = request.fused, request.roles[0]
    for item in request.outs:
        if not isinstance(item, torch.Tensor | list | None):
            raise TypeError(f"{fused.where}: out= is a {type(item).__name__}; give a list of tensors or one vector")
    for name, tensors in request.name_lists():
        _check_list(fused, name, tensors, len(first), request.names[0], first)


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


def check_places(request: Request, graph: Graph) -> None:
    """Raise ValueError if `out`, `flat` and `offsets` do not fit the results."""
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
    """Return the end of the last tensor in a vector.

    Args:
        fused: The function, for errors.
        sizes: The number of elements of each tensor.
        offsets: Where each begins; None for one after the other.
        apart: Whether overlapping tensors raise ValueError.
    """
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


def check_access(request: Request, written: Collection[int], memory: bool) -> None:
    """Raise RuntimeError if written lists are read-only, or tensors have no memory.

    Args:
        request: The call.
        written: The positions of the lists that are written.
        memory: Whether the tensors should have memory.
    """
    for position, (name, tensors) in enumerate(request.name_lists()):
        for i, tensor in enumerate(tensors):
            if position in written:
                _check_written(f"{request.fused.where}: {name}[{i}]", tensor)
            if memory and not has_memory(tensor):
                raise RuntimeError(
                    f"{request.fused.where}: {name}[{i}] has no memory for its {tensor.numel()} elements: its storage was "
                    f"resized to {tensor.untyped_storage().nbytes()} bytes, and has to be resized back"
                )


def _check_written(where: str, tensor: torch.Tensor) -> None:
    strided = type(tensor) in _TYPES and tensor.layout is torch.strided and not tensor.is_contiguous()
    if strided and any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        raise RuntimeError(
            f"{where} is expanded: more than one element of the written-to tensor refers to a single memory location. "
            "Clone it first"
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{where} is an inference tensor: an in-place update of it outside InferenceMode is not allowed. Clone it "
            "first, or call inside torch.inference_mode()"
        )


def explain_opaque(lists: Sequence[Sequence[torch.Tensor]]) -> str | None:
    """Return why the memory of some tensor can't be read as plain numbers; None if all can."""
    for tensors in lists:
        for tensor in tensors:
            if type(tensor) not in _TYPES:
                return f"tensors of type {type(tensor).__name__} run as they define it"
            if tensor.layout is not torch.strided:
                return f"{str(tensor.layout).removeprefix('torch.')} tensors run as torch runs them"
            if tensor.is_neg() or tensor.is_conj() or (tensor.numel() and tensor._is_zerotensor()):
                return LAZY
    return None


def refuse_graphs(request: Request, plan: CallPlan) -> str | None:
    """Return why autograd would have to record this call; None if it need not. Called while grad mode is on."""
    fused = request.fused
    named: list[tuple[bool, str, Sequence[torch.Tensor]]] = [
        (role not in plan.written, name, request.roles[role]) for role, name in enumerate(request.names)
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
