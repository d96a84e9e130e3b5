"""Reductions on a device without Triton: the lists as one vector, whose memory is kept, and torch's own reduction of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ._memory import KeptMemory, Memory, take_result

_ORDERS = {"squares": 2.0, "norm": 2.0, "absolutes": 1.0, "largest": math.inf}
_KEPT = 8

# By what the lists look like: lists of gradients, of parameters and of updates share one vector.
_known: dict[tuple[Any, ...], KeptMemory] = {}


def reduce_on_device(kind: str, lists: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Two launches, three for a dot product or squares, however many tensors there are; nothing is read back or allocated."""
    first = lists[0][0]
    shapes = tuple([tensor.shape for tensor in lists[0]])
    dtype = None if kind in _ORDERS and len({tensor.dtype for tensor in lists[0]}) == 1 else torch.float64
    if dtype is not None and first.device.type == "mps":
        dtype = torch.float32  # the widest that it has
    key = (first.device, dtype or first.dtype, len(lists), shapes)
    kept = _known.get(key)
    if kept is None:
        if len(_known) >= _KEPT:
            _known.clear()
        kept = _known[key] = KeptMemory()
    with torch.no_grad(), kept.open(first) as memory:
        vectors = [_fill(memory, place, tensors, shapes, dtype or first.dtype) for place, tensors in enumerate(lists)]
        result = take_result(memory, first.device)
        if kind in _ORDERS:
            torch.linalg.vector_norm(vectors[0], _ORDERS[kind], dtype=result.dtype, out=result)
            return torch.mul(result, result, out=result) if kind == "squares" else result
        if kind == "amax":
            return torch.amax(vectors[0], 0, out=result)
        return torch.dot(*vectors, out=result) if len(vectors) > 1 else torch.sum(vectors[0], 0, out=result)


def _fill(
    memory: Memory, place: int, tensors: Sequence[torch.Tensor], shapes: Sequence[torch.Size], dtype: torch.dtype
) -> torch.Tensor:
    """A list as one vector."""
    if place not in memory:
        sizes = [shape.numel() for shape in shapes]
        vector = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
        parts = torch.split(vector, sizes)
        memory[place] = vector, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    vector, parts = memory[place]
    torch._foreach_copy_(parts, [tensor.detach() for tensor in tensors])
    return vector  # type: ignore[no-any-return]


def join_numbers(kind: str, found: Sequence[torch.Tensor], home: torch.device) -> torch.Tensor:
    """What devices found, as one number on one of them. Numbers of the host go there as arguments of a launch."""
    every = torch.stack([number if number.device == home else _bring(number, home) for number in found])
    if kind == "norm":
        joined: torch.Tensor = torch.linalg.vector_norm(every)
        return joined
    return every.amax() if kind in ("largest", "amax") else every.sum()


def _bring(number: torch.Tensor, home: torch.device) -> torch.Tensor:
    if number.device.type == "cpu":
        return torch.empty((), dtype=number.dtype, device=home).fill_(number)
    return number.to(home)
