"""Random numbers that depend only on a member's seed and the position of a parameter.

The number at position j of member i is a hash of j and of the member's seed. So the same seeds give the same numbers in any
chunking, for any choice of members and in any order, and all of them are drawn by a fixed number of operations on whole
matrices. The hash is a 32-bit mixer of two multiplications between xor-shifts, with constants that Wellons found by search;
one half of the seed enters before it, the other in the middle.

References:
    C. Wellons, *Prospecting for hash functions*, 2018.
    J. K. Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, SC 2011 (numbers addressed by counters).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from moduli.layout import Layout

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)
_LIMIT = 1 << 62


def seeds(count: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw one seed per member: `count` integers of 62 bits.

    Args:
        count: The number of members.
        generator: Where they come from; torch's own by default.
    """
    device = "cpu" if generator is None else generator.device
    return torch.randint(_LIMIT, (count,), generator=generator, dtype=torch.int64, device=device)


def _bits(keys: Tensor, places: Tensor) -> Tensor:
    """Return 32 random bits for each seed and position, as an int32 matrix."""
    low = (keys & 0xFFFFFFFF).to(torch.int64)
    high = (keys >> 32) & 0xFFFFFFFF
    first = torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)
    second = torch.where(high >= 1 << 31, high - (1 << 32), high).to(torch.int32)
    x = places ^ first[:, None]
    other = torch.empty_like(x)

    def shift_bits(by: int) -> None:
        # The arithmetic shift fills with the sign bit, which is masked off.
        torch.bitwise_right_shift(x, by, out=other)
        other.bitwise_and_((1 << (32 - by)) - 1)
        x.bitwise_xor_(other)

    shift_bits(16)
    x.mul_(_FIRST)
    x.bitwise_xor_(second[:, None])
    shift_bits(15)
    x.mul_(_SECOND)
    shift_bits(16)
    return x


def _unit(keys: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in [0, 1): multiples of 2^-24, or of 2^-53 in double precision."""
    bits = _bits(keys, places)
    if dtype is not torch.float64:
        bits.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)
        return bits.to(torch.float32).mul_(2.0**-24).to(dtype)
    high = bits.bitwise_right_shift_(5).bitwise_and_(0x7FFFFFF).to(torch.float64).mul_(2.0**26)
    more = _bits(keys ^ 0x5851F42D4C957F2D, places).bitwise_right_shift_(6).bitwise_and_(0x3FFFFFF)
    return high.add_(more).mul_(2.0**-53)


def draw_fractions(keys: Tensor, size: int) -> Tensor:
    """Return `size` uniform numbers in [0, 1) for each seed, in double precision."""
    return _unit(keys, torch.arange(size, dtype=torch.int32, device=keys.device), torch.float64)


def uniform(layout: Layout, keys: Tensor, scale: float | Tensor = 1.0, stream: int = 0) -> list[Tensor]:
    """Return uniform numbers in [0, scale) for every parameter: one (N, P) matrix per group.

    Args:
        layout: The layout of a member.
        keys: The seeds of the members.
        scale: One number, or a column.
        stream: Another stream gives other numbers for the same seeds.
    """
    return _draw(layout, keys, scale, stream, _unit)


def normal(layout: Layout, keys: Tensor, scale: float | Tensor = 1.0, stream: int = 0) -> list[Tensor]:
    """Return normal numbers of mean 0 and standard deviation `scale` for every parameter: one (N, P) matrix per group.

    Two uniform numbers make two normal ones (Box and Muller, 1958), in the two halves of a row.

    Args:
        layout: The layout of a member.
        keys: The seeds of the members.
        scale: The standard deviation; one number, or a column.
        stream: Another stream gives other numbers for the same seeds.
    """

    def pair(key: Tensor, places: Tensor, dtype: torch.dtype) -> Tensor:
        half = (len(places) + 1) // 2
        radius = _unit(key, places[:half], dtype).mul_(-1.0).add_(1.0).log_().mul_(-2.0).sqrt_()
        angle = _unit(key ^ 0x1234567887654321, places[:half], dtype).mul_(2.0 * math.pi)
        values = torch.empty((len(key), 2 * half), dtype=dtype, device=key.device)
        torch.mul(radius, angle.cos(), out=values[:, :half])
        torch.mul(radius, angle.sin_(), out=values[:, half:])
        return values[:, : len(places)]

    return _draw(layout, keys, scale, stream, pair)


def _draw(
    layout: Layout,
    keys: Tensor,
    scale: float | Tensor,
    stream: int,
    draw: Callable[[Tensor, Tensor, torch.dtype], Tensor],
) -> list[Tensor]:
    matrices = []
    for group in layout.groups:
        dtype = torch.float64 if group.dtype in (torch.float64, torch.complex128) else torch.float32
        key = keys ^ (stream * 0x2545F4914F6CDD1D & (_LIMIT - 1))
        values = draw(key.to(group.device), find_places(layout, group.indices, group.device), dtype)
        if isinstance(scale, Tensor):
            values.mul_(scale.to(values.device, values.dtype).reshape(-1, 1))
        elif scale != 1.0:
            values.mul_(scale)
        matrices.append(values.to(group.dtype) if group.dtype.is_floating_point or group.dtype.is_complex else values)
    return matrices


def find_places(layout: Layout, indices: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the position of each column of a group among all parameters.

    Args:
        layout: The layout of a member.
        indices: The positions of the group's parameters in the layout.
        device: The device of the result.
    """
    parts = [
        torch.arange(layout.entries[i].start, layout.entries[i].start + layout.entries[i].numel, dtype=torch.int32)
        for i in indices
    ]
    return torch.cat(parts).to(device)
