"""The eager form of the reductions: error-free transformations written with torch operations on blocks."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch

_BLOCK = 32768
_SPLIT = 134217729.0  # 2**27 + 1 halves the digits of a double (Veltkamp)


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


_KIND, _DTYPE = operator.attrgetter("device", "dtype"), operator.attrgetter("dtype")


_LAYOUT = operator.attrgetter("layout")


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
