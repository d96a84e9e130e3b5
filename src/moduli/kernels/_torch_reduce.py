"""Reductions without a kernel of one's own, by torch operations.

On the host they are error-free transformations on blocks; on a device the lists are copied to one vector, whose memory is kept, for
torch's own reduction of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ._memory import KeptMemory, Memory, take_result

_BLOCK = 32768
_SPLIT = 134217729.0  # 2**27 + 1 halves the digits of a double (Veltkamp)
_KIND, _DTYPE = operator.attrgetter("device", "dtype"), operator.attrgetter("dtype")
_LAYOUT = operator.attrgetter("layout")
_ORDERS = {"squares": 2.0, "norm": 2.0, "absolutes": 1.0, "largest": math.inf}
_KEPT = 8

# By what the lists look like: lists of gradients, of parameters and of updates share one vector.
_known: dict[tuple[Any, ...], KeptMemory] = {}


def _blocks(lists: Sequence[Sequence[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """The elements in vectors of double precision, small tensors together: each operation costs the same for few numbers."""
    rows = [_flatten(tensors) for tensors in lists]
    kinds = [list(map(_KIND, row)) for row in rows]
    uniform = all(len(set(kind)) == 1 for kind in kinds)
    sizes = [flat.numel() for flat in rows[0]]
    into: list[torch.Tensor] = []
    start = held = 0
    for i, size in enumerate(sizes):
        if i > start and (held + size > _BLOCK or not (uniform or all(kind[i] == kind[start] for kind in kinds))):
            yield _join_columns([row[start:i] for row in rows], into)
            start, held = i, 0
        held += size
        if size > _BLOCK:  # alone, since what was held went before it
            for at in range(0, size, _BLOCK):
                yield _join_columns([[row[i][at : at + _BLOCK]] for row in rows], into)
            start, held = i + 1, 0
    if held:
        yield _join_columns([row[start:] for row in rows], into)


def _flatten(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if set(map(_LAYOUT, tensors)) != {torch.strided}:
        tensors = [tensor if tensor.layout is torch.strided else tensor.to_dense() for tensor in tensors]
    return [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]


def _join_columns(columns: Sequence[Sequence[torch.Tensor]], into: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each column as one vector, in memory that the next block uses again: fresh memory costs more than the sum."""
    found = []
    for j, column in enumerate(columns):
        whole = column[0] if len(column) == 1 else torch.cat(list(column))
        if j == len(into) or into[j].device != whole.device:
            double = torch.float32 if whole.device.type == "mps" else torch.float64
            into[j:] = [torch.empty(_BLOCK, dtype=double, device=whole.device)]
        found.append(into[j][: whole.numel()].copy_(whole))
    return found


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


def _fold(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of a vector as a 0-d total and a 0-d error, halving it again and again."""
    error = x.new_zeros(())
    while x.numel() > 1:
        half = x.numel() // 2
        total, lost = _two_sum(x[:half], x[half : 2 * half])
        error = error + lost.sum()
        x = torch.cat([total, x[2 * half :]]) if x.numel() % 2 else total
    return x.reshape(()), error


def reduce_without_compiler(
    kind: str, lists: Sequence[Sequence[torch.Tensor]], scale: float | torch.Tensor
) -> torch.Tensor:
    """Reduce without a compiler; the kinds are those of the compiled reductions."""
    with torch.no_grad():
        device = lists[0][0].device if lists[0] else torch.device("cpu")
        dtype = torch.float32 if device.type == "mps" else torch.float64
        total = torch.full((), float("-inf") if kind == "amax" else 0.0, dtype=dtype, device=device)
        error = torch.zeros_like(total)
        kinds = {kind for tensors in lists for kind in map(_DTYPE, tensors)}
        single = dtype is torch.float64 and kinds <= {torch.float32, torch.float16, torch.bfloat16}
        parts: list[torch.Tensor] = []
        for block in _blocks(lists):
            x = block[0]
            if kind in ("amax", "largest"):
                total = torch.maximum(total, (x if kind == "amax" else x.abs()).amax().to(device))
                continue
            if single and kind != "sum":
                # Products of single precision are exact in double, and so nearly are sums of a block of them: what is
                # lost is far below what the result is rounded to.
                scaled = x * scale if kind == "squares" and scale != 1.0 else x
                parts.append(
                    x.abs().sum() if kind == "absolutes" else torch.dot(scaled, block[-1] if kind == "dot" else scaled)
                )
                continue
            lost = torch.zeros_like(x)
            if kind == "dot":
                x, lost = _two_product(x, block[1])
            elif kind == "squares":
                x = (x * scale) ** 2
            elif kind == "absolutes":
                x = x.abs()
            part, rest = _fold(x)
            total, missed = _two_sum(total, part.to(device))
            error = error + (missed + (rest + lost.sum()).to(device))
        if parts:
            total, error = _fold(torch.stack(parts))
        # Beside an infinity the error terms are NaN; the plain total is then already right.
        return torch.where(total.isfinite() & error.isfinite(), total + error, total)


# -- on a device --------------------------------------------------------------------------------------------------------------


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
