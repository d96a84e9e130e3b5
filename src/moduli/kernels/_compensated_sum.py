"""The eager form of the reductions: error-free transformations written with torch operations on blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

__all__ = ["reduce_without_compiler"]

_BLOCK = 65536
_SPLIT = 134217729.0  # 2**27 + 1 halves the digits of a double (Veltkamp)


def _blocks(lists: Sequence[Sequence[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """The elements in vectors of double precision, small tensors together: each operation costs the same for few numbers."""
    waiting: list[list[torch.Tensor]] = []
    held = 0
    for parts in zip(*lists, strict=True):
        flats = [part.detach().to_dense() if part.layout is not torch.strided else part.detach() for part in parts]
        flats = [flat.reshape(-1) for flat in flats]
        size = flats[0].numel()
        if waiting and (held + size > _BLOCK or _kinds(waiting[0]) != _kinds(flats)):
            yield _joined(waiting)
            waiting, held = [], 0
        if size <= _BLOCK:
            waiting.append(flats)
            held += size
            continue
        for start in range(0, size, _BLOCK):
            yield _joined([[flat[start : start + _BLOCK] for flat in flats]])
    if held:
        yield _joined(waiting)


def _kinds(flats: Sequence[torch.Tensor]) -> list[tuple[torch.device, torch.dtype]]:
    return [(flat.device, flat.dtype) for flat in flats]


def _joined(parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    double = torch.float32 if parts[0][0].device.type == "mps" else torch.float64
    return [
        column[0].to(double) if len(column) == 1 else torch.cat(column).to(double)
        for column in zip(*parts, strict=True)
    ]


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
        single = dtype is torch.float64 and all(
            tensor.dtype in (torch.float32, torch.float16, torch.bfloat16) for tensors in lists for tensor in tensors
        )
        for block in _blocks(lists):
            x = block[0]
            if kind in ("amax", "largest"):
                total = torch.maximum(total, (x if kind == "amax" else x.abs()).amax().to(device))
                continue
            if single and kind != "sum":
                # Products of single precision are exact in double, and so nearly are sums of a block of them: what is
                # lost is far below what the result is rounded to.
                if kind == "absolutes":
                    part = x.abs().sum()
                else:
                    x = x * scale if kind == "squares" else x
                    part = torch.dot(x, block[1] if kind == "dot" else x)
                total, missed = _two_sum(total, part.to(device))
                error = error + missed
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
        # Beside an infinity the error terms are NaN; the plain total is then already right.
        return torch.where(total.isfinite() & error.isfinite(), total + error, total)
