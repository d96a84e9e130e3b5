"""Gaussian directions that are never stored: each is a function of (seed, counter), drawn again when needed.

Directions are drawn in blocks of at most `SEGMENT` numbers (a longer direction in several), each from a generator seeded for it
alone. Any block can therefore be made anywhere (another process, another rank) and again later, and a sum over a whole
population needs the memory of one direction, or of one block where its parts are used one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SEGMENT = 1 << 17
KEPT = 1 << 20  # directions of at most this many numbers together are drawn once and kept for one generation


def key(seed: int, counter: int) -> int:
    """The 32-bit seed of one block.

    torch's CPU generator looks at 32 bits of a seed only. Each step below is a bijection of 32-bit numbers, so the first
    2³² counters of a run get different streams, whatever the seed of the run.
    """
    x = (counter + _mix(seed & 0xFFFFFFFF) + 0x9E3779B9 * (seed >> 32)) & 0xFFFFFFFF
    return _mix(x)


def _mix(x: int) -> int:
    """The 32-bit finaliser of MurmurHash3 (Appleby): xor-shifts and odd multipliers, hence a bijection."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & 0xFFFFFFFF
    x ^= x >> 13
    x = x * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


class Share(NamedTuple):
    """Which of several processes that run the same search this is, and how a vector is summed over them, in place."""

    rank: int
    world: int
    reduce: Callable[[Tensor], None]


class DirectionMemory:
    """The direction that was drawn last, for the mirrored member, which is usually the next."""

    def __init__(self) -> None:
        self.key: tuple[int, int, int] | None = None
        self.values = torch.empty(0)


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
        share: This process's part of long sums, where several processes have the same plan.
    """

    def __init__(
        self,
        dim: int,
        directions: int,
        dtype: torch.dtype,
        device: torch.device,
        shapes: Sequence[Sequence[int]] | None = None,
        rank: int | None = None,
        share: Share | None = None,
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
        # A direction that is drawn takes some 6 ns for each number, one that is exchanged over 1 Gbit/s some 80.
        pays = share is not None and (1 - 1 / share.world) * directions >= 16
        self.share = share if pays else None
        # Given to a plan that makes one member after the other.
        self.memory: DirectionMemory | None = None
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

    def sum_weighted(
        self, seed: int, counter: int, first: Tensor, second: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Σ_i first_i ε_i, and Σ_i second_i ε_i² (empty without `second`), in the memory of one direction."""
        first, second = first.to(self.dtype), None if second is None else second.to(self.dtype)
        linear = torch.empty(self.dim, dtype=self.dtype, device=self.device)
        square = torch.empty_like(linear) if second is not None else linear[:0]
        for columns, one, two in self.sums(seed, counter, first, second):
            linear[columns] = one
            if second is not None:
                square[columns] = two
        return linear, square

    @property
    def in_pieces(self) -> bool:
        """Whether `pieces` gives a direction in several, and nothing of it is kept."""
        return self.dim > SEGMENT and not self.kept

    def sums(
        self, seed: int, counter: int, first: Tensor, second: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """`sum_weighted` in parts that are memory of their own until the next one is asked for: (coordinates, sum, sum)."""
        if not self.in_pieces or self.rank is not None:
            yield slice(0, self.dim), *self._sums_of_blocks(seed, counter, first, second)
            return
        weights = list(zip(first.tolist(), [0.0] * len(first) if second is None else second.tolist(), strict=True))
        share = self.share
        own = range(self.directions) if share is None else range(share.rank, self.directions, share.world)
        piece = torch.empty(SEGMENT, dtype=self.dtype, device=self.device)
        one, two = torch.empty_like(piece), torch.empty_like(piece if second is not None else piece[:0])
        for segment, columns in enumerate(self._cut()):
            size = columns.stop - columns.start
            eps, one, two = piece[:size], one[:size].zero_(), two[:size].zero_()
            for i in own:
                w1, w2 = weights[i]
                if w1 or w2:
                    self._normal(seed, counter + i * self.segments + segment, eps)
                    one.add_(eps, alpha=w1)
                    if w2:
                        two.addcmul_(eps, eps, value=w2)
            if share is not None:
                share.reduce(one)
                if second is not None:
                    share.reduce(two)
            yield columns, one, two

    def _cut(self) -> Iterator[slice]:
        """The coordinates of a long direction, as many at a time as a block has."""
        for at in range(0, self.dim, SEGMENT):
            yield slice(at, min(at + SEGMENT, self.dim))

    def _sums_of_blocks(self, seed: int, counter: int, first: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.kept:
            eps = self.rows(seed, counter, 0, self.directions)
            linear = first @ eps
            return linear, linear[:0] if second is None else second @ eps.square()
        linear = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
        square = torch.zeros_like(linear) if second is not None else linear[:0]
        for low in range(0, self.directions, self.block):
            high = min(low + self.block, self.directions)
            drawn = self._draw_block(seed, counter, low // self.block)
            for columns, left, right in self._factors(drawn):
                if right is None:
                    linear[columns] += first[low:high] @ left
                    if second is not None:
                        square[columns] += second[low:high] @ left.square()
                    continue
                # One product of matrices: the sum of A_i B_iᵀ over members is that of all columns of all A and B.
                m, n = left.shape[1], right.shape[1]
                wide = (left * first[low:high, None, None]).permute(1, 0, 2).reshape(m, -1)
                linear[columns].view(m, n).addmm_(wide, right.permute(0, 2, 1).reshape(-1, n))
                if second is not None:
                    for i in range(high - low):
                        square[columns].view(m, n).add_((left[i] @ right[i].mT).square_(), alpha=float(second[low + i]))
        return linear, square

    def pieces(self, seed: int, counter: int, index: int) -> Iterator[tuple[slice, Tensor]]:
        """One direction of several blocks in parts, each to be used before the next one is asked for. Not to be written to."""
        memory = self.memory
        if memory is None:
            yield from self._draw_pieces(seed, counter, index)
            return
        if memory.key == (seed, counter, index) and len(memory.values) == self.dim:
            yield from ((columns, memory.values[columns]) for columns in self._cut())
            return
        memory.key = None
        if memory.values.shape != (self.dim,) or memory.values.dtype is not self.dtype:
            memory.values = torch.empty(self.dim, dtype=self.dtype, device=self.device)
        for columns, piece in self._draw_pieces(seed, counter, index):
            memory.values[columns] = piece
            yield columns, piece
        memory.key = seed, counter, index

    def _draw_pieces(self, seed: int, counter: int, index: int) -> Iterator[tuple[slice, Tensor]]:
        if self.rank is not None:
            low = index // self.block * self.block
            drawn = self._draw_block(seed, counter, low // self.block)
            piece = torch.empty(SEGMENT, dtype=self.dtype, device=self.device)
            for columns, left, right in self._factors(drawn[index - low : index - low + 1]):
                if right is None:
                    yield columns, left[0]
                    continue
                n = right.shape[1]
                height = max(1, SEGMENT // n)  # a few rows of the product at a time, which stay in the cache
                for some in torch.split(left[0], height):
                    out = piece[: len(some) * n] if len(some) * n <= SEGMENT else piece.new_empty(len(some) * n)
                    torch.mm(some, right[0].mT, out=out.view(-1, n))
                    yield slice(columns.start, columns.start + len(out)), out
                    columns = slice(columns.start + len(out), columns.stop)
            return
        piece = torch.empty(SEGMENT, dtype=self.dtype, device=self.device)
        for segment, columns in enumerate(self._cut()):
            part = piece[: columns.stop - columns.start]
            yield columns, self._normal(seed, counter + index * self.segments + segment, part)

    def _fill(self, seed: int, counter: int, start: int, stop: int, out: Tensor) -> None:
        for block in range(start // self.block, -(-stop // self.block)):
            low, high = block * self.block, min((block + 1) * self.block, self.directions)
            if start <= low and high <= stop and self.rank is None:
                self._draw_block(seed, counter, block, out[low - start : high - start])
            else:
                a, b = max(low, start), min(high, stop)
                out[a - start : b - start] = self._expand(self._draw_block(seed, counter, block)[a - low : b - low])

    def _draw_block(self, seed: int, counter: int, block: int, out: Tensor | None = None) -> Tensor:
        """What one block of directions is made of."""
        if out is None:
            count = min(self.block, self.directions - block * self.block)
            out = torch.empty(count, self.drawn, dtype=self.dtype, device=self.device)
        for segment, part in enumerate(torch.split(out.view(-1), SEGMENT) if self.segments > 1 else (out,)):
            self._normal(seed, counter + block * self.segments + segment, part)
        return out

    def _normal(self, seed: int, counter: int, out: Tensor) -> Tensor:
        """One block of numbers, whose generator is seeded for it alone."""
        return out.normal_(generator=self._generator.manual_seed(key(seed, counter)))

    def _expand(self, drawn: Tensor) -> Tensor:
        """What was drawn as directions: the products of low rank multiplied out."""
        if self.rank is None:
            return drawn
        parts = [
            left if right is None else (left @ right.mT).view(len(drawn), -1) for _, left, right in self._factors(drawn)
        ]
        return torch.cat(parts, 1)

    def _factors(self, drawn: Tensor) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """What was drawn, by the coordinates that it is for: the numbers themselves, or two factors, the first scaled."""
        if self.rank is None:
            yield slice(0, self.dim), drawn, None
            return
        rows, at, place = len(drawn), 0, 0
        for m, n in self.parts:
            if not n:
                yield slice(place, place + m), drawn[:, at : at + m], None
                at, place = at + m, place + m
                continue
            left = drawn[:, at : at + m * self.rank].view(rows, m, self.rank) / math.sqrt(self.rank)
            at += m * self.rank
            right = drawn[:, at : at + n * self.rank].view(rows, n, self.rank)
            at += n * self.rank
            yield slice(place, place + m * n), left, right
            place += m * n


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
