"""Gaussian directions that are never stored: each is a function of (seed, counter), drawn again when needed.

Directions are drawn in blocks of at most `SEGMENT` numbers (a longer direction in several), each from a generator seeded for it
alone. Any block can therefore be made anywhere (another process, another rank) and again later, and a sum over a whole
population needs the memory of one direction, or of one block where its parts are used one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["SEGMENT", "Noise", "key", "member_signs"]

SEGMENT = 1 << 17
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
        self.segments = max(1, -(-self.drawn // SEGMENT))
        # How many generators there are, and so how many counters a generation uses up.
        self.blocks = -(-directions // self.block) * self.segments
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
        first, second = first.to(self.dtype), None if second is None else second.to(self.dtype)
        if not self._long():
            return self._sums_of_blocks(seed, counter, first, second)
        linear = torch.empty(self.dim, dtype=self.dtype, device=self.device)
        square = torch.empty_like(linear) if second is not None else linear[:0]
        for columns, one, two in self.sums(seed, counter, first, second):
            linear[columns] = one
            if second is not None:
                square[columns] = two
        return linear, square

    def _long(self) -> bool:
        """Whether a direction is several blocks, and each of these some of its coordinates."""
        return self.segments > 1 and self.rank is None and not self.kept

    def sums(
        self, seed: int, counter: int, first: Tensor, second: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """`weighted` in parts that are memory of their own until the next one is asked for: (coordinates, sum, sum)."""
        if not self._long():
            yield slice(0, self.dim), *self._sums_of_blocks(seed, counter, first, second)
            return
        weights = first.tolist(), [] if second is None else second.tolist()
        piece = torch.empty(min(SEGMENT, self.dim), dtype=self.dtype, device=self.device)
        one, two = torch.empty_like(piece), torch.empty_like(piece if second is not None else piece[:0])
        for segment, left in enumerate(range(0, self.dim, SEGMENT)):
            size = min(SEGMENT, self.dim - left)
            eps, one, two = piece[:size], one[:size].zero_(), two[:size].zero_()
            for i in range(self.directions):
                w1, w2 = weights[0][i], weights[1][i] if weights[1] else 0.0
                if w1 or w2:
                    self._normal(seed, counter + i * self.segments + segment, eps)
                    one.add_(eps, alpha=w1)
                    if w2:
                        two.addcmul_(eps, eps, value=w2)
            yield slice(left, left + size), one, two

    def _sums_of_blocks(self, seed: int, counter: int, first: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.kept:
            eps = self.rows(seed, counter, 0, self.directions)
            linear = first @ eps
            return linear, linear[:0] if second is None else second @ eps.square()
        linear = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
        square = torch.zeros_like(linear) if second is not None else linear[:0]
        for low in range(0, self.directions, self.block):
            high = min(low + self.block, self.directions)
            drawn = torch.empty(high - low, self.drawn, dtype=self.dtype, device=self.device)
            self._draw(seed, counter + low // self.block * self.segments, drawn)
            eps = self._expanded(drawn)
            linear += first[low:high] @ eps
            if second is not None:
                square += second[low:high] @ eps.square_()
        return linear, square

    def pieces(self, seed: int, counter: int, index: int) -> Iterator[tuple[slice, Tensor]]:
        """One direction in parts that are memory of their own until the next one is asked for."""
        if not self._long():
            yield slice(0, self.dim), self.rows(seed, counter, index, index + 1)[0].clone()
            return
        piece = torch.empty(min(SEGMENT, self.dim), dtype=self.dtype, device=self.device)
        for segment, left in enumerate(range(0, self.dim, SEGMENT)):
            size = min(SEGMENT, self.dim - left)
            yield (
                slice(left, left + size),
                self._normal(seed, counter + index * self.segments + segment, piece[:size]),
            )

    def _fill(self, seed: int, counter: int, start: int, stop: int, out: Tensor) -> None:
        if self.block >= self.directions and stop - start == self.directions and self.rank is None:
            self._draw(seed, counter, out)
            return
        for block in range(start // self.block, -(-stop // self.block)):
            low, high = block * self.block, min((block + 1) * self.block, self.directions)
            inside = start <= low and high <= stop and self.rank is None
            target = out[low - start : high - start] if inside else out.new_empty(high - low, self.drawn)
            self._draw(seed, counter + block * self.segments, target)
            if not inside:
                a, b = max(low, start), min(high, stop)
                out[a - start : b - start] = self._expanded(target[a - low : b - low])

    def _draw(self, seed: int, counter: int, out: Tensor) -> None:
        if self.segments == 1:
            self._normal(seed, counter, out)
            return
        for segment, part in enumerate(torch.split(out.view(-1), SEGMENT)):
            self._normal(seed, counter + segment, part)

    def _normal(self, seed: int, counter: int, out: Tensor) -> Tensor:
        """One block of numbers, whose generator is seeded for it alone."""
        return out.normal_(generator=self._generator.manual_seed(key(seed, counter)))

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
