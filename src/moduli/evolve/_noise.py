"""Gaussian directions that are never stored: each is a function of (seed, counter), drawn again when needed.

Directions are drawn in blocks of at most `SEGMENT` numbers (a longer direction in several), each from a generator seeded for it
alone. Any block can therefore be made anywhere (another process, another rank) and again later, and a sum over a whole
population needs the memory of one direction, or of one block where its parts are used one after the other.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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
        # Short directions are drawn several at a time, long ones in several segments.
        self.block = 1 if rank else max(1, SEGMENT // max(dim, 1))
        self.segments = max(1, -(-self.drawn // SEGMENT))
        # How many generators there are, and so how many counters a generation uses up.
        self.blocks = -(-directions // self.block) * self.segments
        self.kept = directions * dim <= KEPT
        # Whether `pieces` gives a direction in several, and nothing of it is kept.
        self.in_pieces = dim > SEGMENT and not self.kept
        self._generator = torch.Generator(device)
        self._whole = self._empty(0)
        self._held: tuple[int, int] | None = None
        # Who makes one member after the other gives memory for a direction: the mirrored member has the same.
        self.last: dict[Any, Tensor] | None = None

    def copy_plan(self) -> Noise:
        """Return the same plan without what it has drawn and stored."""
        out = copy.copy(self)
        out._whole, out._held, out.last = self._empty(0), None, None
        return out

    def rows(self, seed: int, counter: int, start: int, stop: int) -> Tensor:
        """Directions `start` to `stop`, one per row. Not to be written to."""
        if not self.kept:
            return self._draw_rows(seed, counter, start, stop)
        if self._held != (seed, counter):
            self._whole = self._draw_rows(seed, counter, 0, self.directions)
            self._held = (seed, counter)
        return self._whole[start:stop]

    def pieces(self, seed: int, counter: int, index: int) -> Iterator[tuple[slice, Tensor]]:
        """One direction in parts, each to be used before the next one is asked for; not to be written to where it is kept."""
        if self.kept or self.block > 1:
            yield slice(0, self.dim), self.rows(seed, counter, index, index + 1)[0]
        else:
            yield from self._recall_pieces(seed, counter + index * self.segments)

    def _recall_pieces(self, seed: int, counter: int) -> Iterator[tuple[slice, Tensor]]:
        """A direction as it was drawn last, which is forgotten: it may be written over. Or else one that is drawn, and kept."""
        # A product of low rank is made again in less time than it is copied in.
        if self.last is None or self.rank is not None:
            yield from self._draw_pieces(seed, counter)
            return
        known = (seed, counter) in self.last
        values = self.last.popitem()[1] if self.last else self._empty(self.dim)
        if known:
            yield from ((columns, values[columns]) for columns in self._cut())
        else:
            for columns, piece in self._draw_pieces(seed, counter):
                values[columns] = piece
                yield columns, piece
        self.last[None if known else (seed, counter)] = values

    def factors(self, seed: int, counter: int, indices: Sequence[int]) -> list[tuple[Tensor, Tensor | None]]:
        """Return directions of low rank as they are drawn, for each parameter: (A, B) with A / √rank, or (numbers, None).

        Args:
            seed: Of the run.
            counter: Of the generation.
            indices: The directions; they are along the first axis.
        """
        rank = self.rank or 1
        drawn = self._empty(len(indices), self.drawn)
        for row, index in zip(drawn, indices, strict=True):
            for segment, part in enumerate(torch.split(row, SEGMENT)):
                self._normal(seed, counter + index * self.segments + segment, part)
        found: list[tuple[Tensor, Tensor | None]] = []
        at = 0
        for m, n in self.parts:
            size = rank * (m + n) if n else m
            part, at = drawn[:, at : at + size], at + size
            if not n:
                found.append((part, None))
                continue
            left, right = torch.split(part.reshape(len(indices), m + n, rank), [m, n], 1)
            found.append((left / math.sqrt(rank), right))
        return found

    def sum_weighted(
        self, seed: int, counter: int, first: Tensor, second: Tensor | None = None, share: Share | None = None
    ) -> tuple[Tensor, Tensor]:
        """Σ_i first_i ε_i, and Σ_i second_i ε_i² (empty without `second`), in the memory of one direction."""
        sums = [(one.clone(), two.clone()) for _, one, two in self.sums(seed, counter, first, second, share)]
        linear, square = zip(*sums, strict=True)
        return torch.cat(linear), torch.cat(square)

    def sums(
        self, seed: int, counter: int, first: Tensor, second: Tensor | None = None, share: Share | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """`sum_weighted` in parts that are memory of their own until the next one is asked for: (coordinates, sum, sum).

        Args:
            seed: Of the run.
            counter: Of the generation.
            first: One weight for each direction.
            second: One weight for each square.
            share: This process's part of long sums, where several processes have the same plan.
        """
        first, second = first.to(self.dtype), None if second is None else second.to(self.dtype)
        if not self.in_pieces or self.rank is not None:
            linear = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
            square = torch.zeros_like(linear) if second is not None else linear[:0]
            if self.rank is not None and second is None and not self.kept:
                self._add_products(seed, counter, first, linear)
                yield slice(0, self.dim), linear, square
                return
            step = self.directions if self.kept else self.block
            for low in range(0, self.directions, step):
                some = slice(low, min(low + step, self.directions))
                eps = self.rows(seed, counter, some.start, some.stop)
                linear += first[some] @ eps
                if second is not None:
                    square += second[some] @ eps.square()
            yield slice(0, self.dim), linear, square
            return
        weights = list(zip(first.tolist(), [0.0] * len(first) if second is None else second.tolist(), strict=True))
        # A direction that is drawn takes some 6 ns for each number, one that is exchanged over 1 Gbit/s some 80.
        if share is not None and (1 - 1 / share.world) * self.directions < 16:
            share = None
        own = range(self.directions) if share is None else range(share.rank, self.directions, share.world)
        piece, one = self._empty(SEGMENT), self._empty(SEGMENT)
        two = self._empty(0 if second is None else SEGMENT)
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
            for total in (one, two):
                if share is not None and len(total):
                    share.reduce(total)
            yield columns, one, two

    def _add_products(self, seed: int, counter: int, weights: Tensor, out: Tensor) -> None:
        """Add Σ_i w_i A_i B_iᵀ by one product for each parameter: over directions and ranks at once."""
        step = max(1, SEGMENT * 8 // max(self.drawn, 1))
        for start in range(0, self.directions, step):
            some = range(start, min(start + step, self.directions))
            own, at = weights[some.start : some.stop], 0
            for (left, right), (m, n) in zip(self.factors(seed, counter, some), self.parts, strict=True):
                place = out[at : at + m * max(n, 1)]
                at += len(place)
                if right is None:
                    place += own @ left
                else:
                    wide = (left * own[:, None, None]).transpose(0, 1).flatten(1)
                    place.view(m, n).addmm_(wide, right.transpose(0, 1).flatten(1).T)

    def _cut(self) -> Iterator[slice]:
        """The coordinates of a long direction, as many at a time as a segment has."""
        for at in range(0, self.dim, SEGMENT):
            yield slice(at, min(at + SEGMENT, self.dim))

    def _draw_rows(self, seed: int, counter: int, start: int, stop: int) -> Tensor:
        if self.block > 1:
            first, last = start // self.block, -(-stop // self.block)
            out = self._empty(min(last * self.block, self.directions) - first * self.block, self.dim)
            if last - first == 1 and start == 0 and stop == len(out):
                return self._normal(seed, counter + first, out)
            for number, part in enumerate(torch.split(out, self.block), first):
                self._normal(seed, counter + number, part)
            return out[start - first * self.block : stop - first * self.block]
        out = self._empty(stop - start, self.dim)
        for row, index in zip(out, range(start, stop), strict=True):
            for columns, piece in self._draw_pieces(seed, counter + index * self.segments):
                row[columns] = piece
        return out

    def _draw_pieces(self, seed: int, counter: int) -> Iterator[tuple[slice, Tensor]]:
        """One direction in parts; one of low rank as its factors, multiplied a few rows at a time, which stay in the cache."""
        piece, rank = self._empty(SEGMENT), self.rank
        if rank is None:
            for segment, columns in enumerate(self._cut()):
                yield columns, self._normal(seed, counter + segment, piece[: columns.stop - columns.start])
            return
        drawn = self._empty(self.drawn)
        for segment, part in enumerate(torch.split(drawn, SEGMENT)):
            self._normal(seed, counter + segment, part)
        at = place = 0
        for m, n in self.parts:
            if not n:
                yield slice(place, place + m), drawn[at : at + m]
                at, place = at + m, place + m
                continue
            left, right = torch.split(drawn[at : at + rank * (m + n)].view(m + n, rank), [m, n])
            at += rank * (m + n)
            for some in torch.split(left / math.sqrt(rank), max(1, SEGMENT // n)):
                size = len(some) * n
                out = piece[:size] if size <= SEGMENT else self._empty(size)
                torch.mm(some, right.mT, out=out.view(-1, n))
                yield slice(place, place + size), out
                place += size

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _normal(self, seed: int, counter: int, out: Tensor) -> Tensor:
        """One block of numbers, whose generator is seeded for it alone."""
        return out.normal_(generator=self._generator.manual_seed(key(seed, counter)))


def _parts(dim: int, shapes: Sequence[Sequence[int]] | None, rank: int) -> list[tuple[int, int]]:
    if shapes is None:
        raise ValueError(f"rank={rank} needs the shapes of the parameters: shapes=[(64, 32), (64,)]")
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
