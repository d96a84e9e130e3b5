"""Reductions without a compiled kernel, by torch operations.

On the host they are error-free transformations on blocks; on a device the lists are copied to one vector, a reused buffer, for
torch's own reduction of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ._memory import KeptMemory, Memory, put_bounded, take_result

_BLOCK = 32768
_SPLIT = 134217729.0  # 2**27 + 1 halves the digits of a double (Veltkamp)
_DTYPE, _LAYOUT = operator.attrgetter("dtype"), operator.attrgetter("layout")
_NARROW = (torch.float16, torch.bfloat16)
_PEAKS = ("amax", "largest")
_ORDERS = {"squares": 2.0, "norm": 2.0, "absolutes": 1.0, "largest": math.inf}
# Buffers by the layout of lists: lists of gradients, of parameters and of updates share one vector.
_kept: dict[tuple[Any, ...], KeptMemory] = {}


def _blocks(lists: Sequence[Sequence[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """Yield the elements in vectors of double precision, small tensors together, since an operation has a fixed cost."""
    rows = [_flatten(tensors) for tensors in lists]
    double = torch.float32 if rows[0] and rows[0][0].device.type == "mps" else torch.float64
    if any(len(set(map(_DTYPE, row))) > 1 for row in rows):
        rows = [[flat.to(double) for flat in row] for row in rows]
    # Buffers for all blocks: new memory costs more than the sum.
    into = [row[0].new_empty(_BLOCK, dtype=double) for row in rows if row]
    for start, end in _group(list(map(torch.numel, rows[0]))):
        vectors = [row[start] if end == start + 1 else torch.cat(row[start:end]) for row in rows]
        for parts in zip(*(torch.split(vector, _BLOCK) for vector in vectors), strict=True):
            yield [memory[: part.numel()].copy_(part) for memory, part in zip(into, parts, strict=True)]


def _group(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of groups of tensors: at most a block of elements, or one tensor."""
    start = total = 0
    for i, size in enumerate([*sizes, _BLOCK]):
        if i > start and total + size > _BLOCK:
            yield start, i
            start, total = i, 0
        total += size


def _flatten(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if set(map(_LAYOUT, tensors)) != {torch.strided}:
        tensors = [tensor if tensor.layout is torch.strided else tensor.to_dense() for tensor in tensors]
    return [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]


def _two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def _two_product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    product = a * b
    high_a = _SPLIT * a
    high_a = high_a - (high_a - a)
    high_b = _SPLIT * b
    high_b = high_b - (high_b - b)
    low_a, low_b = a - high_a, b - high_b
    return product, low_a * low_b - (((product - high_a * high_b) - low_a * high_b) - high_a * low_b)


def _fold(x: torch.Tensor, lost: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of a vector as a 0-d total and a 0-d error, by repeated halving; `lost` are earlier errors."""
    error = x.new_zeros(()) if lost is None else lost.sum()
    while x.numel() > 1:
        half = x.numel() // 2
        total, missed = _two_sum(x[:half], x[half : 2 * half])
        error = error + missed.sum()
        x = torch.cat([total, x[2 * half :]]) if x.numel() % 2 else total
    # Beside an infinity the error terms are NaN; the plain total is then already right.
    return x.reshape(()), torch.where(error.isfinite(), error, 0.0)


def reduce_without_compiler(kind: str, lists: Sequence[Sequence[torch.Tensor]], scale: float) -> torch.Tensor:
    """Return a reduction by torch operations; the kinds are those of the compiled reductions.

    Args:
        kind: The reduction.
        lists: The lists.
        scale: A factor of the elements.
    """
    # Products of single precision are exact in double, and sums of a block of them nearly so: the error is far below
    # the precision of the result.
    single = {dtype for tensors in lists for dtype in map(_DTYPE, tensors)} <= {*_NARROW, torch.float32}
    parts = [part for block in _blocks(lists) for part in _reduce_block(kind, block, scale, single)]
    if not parts:
        device = lists[0][0].device if lists[0] else torch.device("cpu")
        return torch.tensor(-math.inf if kind == "amax" else 0.0, dtype=torch.float64, device=device)
    numbers = torch.stack(parts)
    if kind in _PEAKS:
        return numbers.amax()
    total, error = _fold(numbers)
    return total + error


def _reduce_block(kind: str, block: Sequence[torch.Tensor], scale: float, single: bool) -> Sequence[torch.Tensor]:
    """Return the result for one block, or its sum and the error of that. `single`: the elements were of single precision."""
    x = block[0]
    if kind in _PEAKS:
        return [(x if kind == "amax" else x.abs()).amax()]
    if kind == "dot":
        return [torch.dot(*block)] if single else _fold(*_two_product(*block))
    if kind == "squares":
        scaled = x if scale == 1.0 else x * scale
        return [torch.dot(scaled, scaled)] if single else _fold(scaled * scaled)
    return _fold(x if kind == "sum" else x.abs())


# -- on a device --------------------------------------------------------------------------------------------------------------


def reduce_on_device(kind: str, lists: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Return a reduction by two launches, three for a dot product or squares; nothing is read back or allocated."""
    first = lists[0][0]
    shapes = tuple([tensor.shape for tensor in lists[0]])
    dtype = _choose_dtype(kind, lists[0])
    key = (first.device, dtype, len(lists), shapes)
    buffers = _kept.get(key) or put_bounded(_kept, key, KeptMemory())
    with torch.no_grad(), buffers.open(first) as memory:
        vectors = [_fill(memory, place, tensors, shapes, dtype) for place, tensors in enumerate(lists)]
        result = take_result(memory, first.device)
        if kind in _ORDERS:
            torch.linalg.vector_norm(vectors[0], _ORDERS[kind], dtype=result.dtype, out=result)
            return torch.mul(result, result, out=result) if kind == "squares" else result
        if kind == "amax":
            return torch.amax(vectors[0], 0, out=result)
        return torch.dot(*vectors, out=result) if len(vectors) > 1 else torch.sum(vectors[0], 0, out=result)


def _choose_dtype(kind: str, tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the dtype of the vector: that of the tensors where torch's norm accumulates in double, else the widest."""
    first = tensors[0]
    if kind in _ORDERS and len(set(map(_DTYPE, tensors))) == 1:
        return first.dtype
    return torch.float32 if first.device.type == "mps" else torch.float64


def _fill(
    memory: Memory, place: int, tensors: Sequence[torch.Tensor], shapes: Sequence[torch.Size], dtype: torch.dtype
) -> torch.Tensor:
    """Return a list copied to one vector."""
    if place not in memory:
        sizes = [shape.numel() for shape in shapes]
        vector = torch.empty(sum(sizes), dtype=dtype, device=tensors[0].device)
        parts = torch.split(vector, sizes)
        memory[place] = vector, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    vector, parts = memory[place]
    torch._foreach_copy_(parts, [tensor.detach() for tensor in tensors])
    return vector  # type: ignore[no-any-return]


def join_numbers(kind: str, results: Sequence[torch.Tensor], home: torch.device) -> torch.Tensor:
    """Return the results of several devices combined to one number on one of them, without waiting for it.

    Args:
        kind: The reduction.
        results: The results; those of the host are passed as arguments of a launch.
        home: The device.
    """
    every = torch.stack([number if number.device == home else _copy_to(number, home) for number in results])
    if kind == "norm":
        joined: torch.Tensor = torch.linalg.vector_norm(every)
        return joined
    return every.amax() if kind in ("largest", "amax") else every.sum()


def _copy_to(number: torch.Tensor, home: torch.device) -> torch.Tensor:
    """Return a number on a device; one of the host as an argument of a launch, which does not wait."""
    if number.device.type == "cpu":
        return torch.empty((), dtype=number.dtype, device=home).fill_(number)
    return number.to(home)
