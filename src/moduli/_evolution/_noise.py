"""Gaussian directions that are never stored: each is a function of (seed, counter), drawn again when needed.

Directions are drawn in blocks of at most `SEGMENT` numbers, each block from a generator seeded for it alone. Any block can
therefore be made anywhere (another process, another rank) and again later, and a sum over a whole population needs the
memory of one direction.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["SEGMENT", "Noise", "key", "member_signs"]

SEGMENT = 1 << 16
KEPT = 1 << 22  # directions of at most this many numbers together are drawn once and kept for one generation


def key(seed: int, counter: int) -> int:
    """The 32-bit seed of one block.

    torch's CPU generator looks at 32 bits of a seed only. Each step below is a bijection of 32-bit numbers, so the first
    2³² counters of a run get different streams, whatever the seed of the run.
    """
    x = (counter + _mixed(seed & 0xFFFFFFFF) + 0x9E3779B9 * (seed >> 32)) & 0xFFFFFFFF
    return _mixed(x)


def _mixed(x: int) -> int:
    """The 32-bit finaliser of MurmurHash3 (Appleby): xor-shifts and odd multipliers, hence a bijection."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & 0xFFFFFFFF
    x ^= x >> 13
    x = x * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


def member_signs(population: int, antithetic: bool) -> tuple[int, int]:
    """How many directions a population takes, and how many members share one.

    Mirrored members are neighbours: members 2d and 2d + 1 are the mean plus and minus direction d. When the number of
    members is odd, the last one has no mirror image.
    """
    return (-(-population // 2), 2) if antithetic else (population, 1)


class Noise:
    """A plan for `directions` Gaussian directions of `dim` numbers.

    Args:
        dim: Length of a direction.
        directions: How many there are.
        dtype: Their dtype.
        device: Their device.
        shapes: With `rank`: the shapes of the parameters that make up a direction, in order.
        rank: Draw the part of each matrix (m x n) as A Bᵀ / √rank with A (m x rank), B (n x rank): entries keep mean 0
            and variance 1, and rank (m + n) numbers are drawn instead of m n.
    """

    def __init__(
        self,
        dim: int,
        directions: int,
        dtype: torch.dtype,
        device: torch.device,
        shapes: Sequence[Sequence[int]] | None = None,
        rank: int | None = None,
    ) -> None:
        self.dim, self.directions, self.dtype, self.device, self.rank = dim, directions, dtype, device, rank
        self.parts: list[tuple[int, int]] = []  # (m, n) of what is drawn as a product, (length, 0) of the rest
        if rank is not None:
            self.parts = _parts(dim, shapes, rank)
        self.drawn = sum(rank * (m + n) if n else m for m, n in self.parts) if rank else dim
        self.block = max(1, SEGMENT // max(self.drawn, 1))
        self.blocks = -(-directions // self.block)
        self.kept = directions * dim <= KEPT
        self._generator = torch.Generator(device)
        self._whole: Tensor | None = None
        self._held: tuple[int, int] | None = None

    def rows(self, seed: int, counter: int, start: int, stop: int) -> Tensor:
        """Directions `start` to `stop`, one per row. Not to be written to."""
        if self.kept:
            if self._whole is None:
                self._whole = torch.empty(self.directions, self.dim, dtype=self.dtype, device=self.device)
            if self._held != (seed, counter):
                self._held = None
                self._fill(seed, counter, 0, self.directions, self._whole)
                self._held = (seed, counter)
            return self._whole if stop - start == self.directions else self._whole[start:stop]
        out = torch.empty(stop - start, self.dim, dtype=self.dtype, device=self.device)
        self._fill(seed, counter, start, stop, out)
        return out

    def weighted(self, seed: int, counter: int, first: Tensor, second: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Σ_i first_i ε_i, and Σ_i second_i ε_i² (empty without `second`), in the memory of one direction."""
        first = first.to(self.dtype)
        second = None if second is None else second.to(self.dtype)
        if self.kept:
            eps = self.rows(seed, counter, 0, self.directions)
            linear = first @ eps
            return linear, linear[:0] if second is None else second @ eps.square()
        linear = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
        square = torch.zeros_like(linear) if second is not None else linear[:0]
        for rows, columns, eps in self._pieces(seed, counter):
            linear[columns] += first[rows] @ eps
            if second is not None:
                square[columns] += second[rows] @ eps.square_()
        return linear, square

    def _fill(self, seed: int, counter: int, start: int, stop: int, out: Tensor) -> None:
        if self.blocks == 1 and stop - start == self.directions and self.rank is None:
            self._draw(seed, counter, out)
            return
        for block in range(start // self.block, -(-stop // self.block)):
            low, high = block * self.block, min((block + 1) * self.block, self.directions)
            inside = start <= low and high <= stop and self.rank is None
            target = out[low - start : high - start] if inside else out.new_empty(high - low, self.drawn)
            self._draw(seed, counter + block, target)
            if not inside:
                a, b = max(low, start), min(high, stop)
                out[a - start : b - start] = self._expanded(target[a - low : b - low])

    def _draw(self, seed: int, counter: int, out: Tensor) -> None:
        generator = self._generator.manual_seed(key(seed, counter))
        if out.numel() <= SEGMENT:
            out.normal_(generator=generator)
            return
        for part in torch.split(out.view(-1), SEGMENT):
            part.normal_(generator=generator)

    def _pieces(self, seed: int, counter: int) -> Iterator[tuple[slice, slice, Tensor]]:
        """Every number of every direction once, in pieces that stay in the cache of the processor."""
        for block in range(self.blocks):
            low, high = block * self.block, min((block + 1) * self.block, self.directions)
            if self.block == 1 and self.rank is None:
                self._generator.manual_seed(key(seed, counter + block))
                for left in range(0, self.dim, SEGMENT):
                    right = min(left + SEGMENT, self.dim)
                    piece = torch.empty(1, right - left, dtype=self.dtype, device=self.device)
                    yield slice(low, high), slice(left, right), piece.normal_(generator=self._generator)
            else:
                drawn = torch.empty(high - low, self.drawn, dtype=self.dtype, device=self.device)
                self._draw(seed, counter + block, drawn)
                yield slice(low, high), slice(0, self.dim), self._expanded(drawn)

    def _expanded(self, drawn: Tensor) -> Tensor:
        """What was drawn as directions: the products of low rank multiplied out."""
        if self.rank is None:
            return drawn
        rows, at, columns = len(drawn), 0, []
        for m, n in self.parts:
            if not n:
                columns.append(drawn[:, at : at + m])
                at += m
                continue
            left = drawn[:, at : at + m * self.rank].view(rows, m, self.rank)
            at += m * self.rank
            right = drawn[:, at : at + n * self.rank].view(rows, n, self.rank)
            at += n * self.rank
            columns.append((left @ right.mT).view(rows, m * n).div_(math.sqrt(self.rank)))
        return torch.cat(columns, 1)


def _parts(dim: int, shapes: Sequence[Sequence[int]] | None, rank: int) -> list[tuple[int, int]]:
    if shapes is None:
        raise ValueError(
            f"rank={rank} needs the shapes of the parameters that the vector holds: shapes=[(64, 32), (64,)]"
        )
    if rank < 1:
        raise ValueError(f"rank={rank}: low-rank noise has a rank of at least 1")
    held = sum(math.prod(shape) for shape in shapes)
    if held != dim:
        raise ValueError(f"the shapes hold {held} numbers together, but the vector has {dim}")
    parts = []
    for shape in shapes:
        whole = math.prod(shape)
        m, n = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (whole, 0)
        # A matrix that is no larger than its two factors is drawn as it is.
        parts.append((m, n) if rank * (m + n) < m * n else (whole, 0))
    return parts
