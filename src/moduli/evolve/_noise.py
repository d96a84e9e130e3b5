"""Gaussian directions that are never stored: each is a function of (seed, counter), drawn again when needed.

Directions are drawn in blocks of at most `SEGMENT` numbers (a longer direction in several), each from a separately seeded
generator. Any block can therefore be drawn in any process and again later, and a sum over a whole population needs the memory of
one direction, or of one block where the parts of the sum are used one after the other.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SEGMENT = 1 << 17
KEPT = 1 << 20  # directions of at most this many numbers together are drawn once and stored for one generation


def key(seed: int, counter: int) -> int:
    """Return the 32-bit seed of one block.

    torch's CPU generator uses only 32 bits of a seed. Each step below is a bijection of 32-bit numbers, so the first 2³²
    counters of a run get different streams, whatever the seed of the run.
    """
    x = (counter + _mix(seed & 0xFFFFFFFF) + 0x9E3779B9 * (seed >> 32)) & 0xFFFFFFFF
    return _mix(x)


def _mix(x: int) -> int:
    """Apply the 32-bit finaliser of MurmurHash3 (Appleby): xor-shifts and odd multipliers, hence a bijection."""
    x ^= x >> 16
    x = x * 0x85EBCA6B & 0xFFFFFFFF
    x ^= x >> 13
    x = x * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


class Share(NamedTuple):
    """This process's rank among those that run the same search, their number, and a function that sums a vector over them."""

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
        self.parts: list[tuple[int, int]] = []  # (m, n) of matrices drawn as products, (length, 0) of other parameters
        if rank is not None:
            self.parts = _parts(dim, shapes, rank)
        self.drawn = sum(rank * (m + n) if n else m for m, n in self.parts) if rank else dim
        # Short directions are drawn several at a time, long ones in several segments.
        self.block = 1 if rank else max(1, SEGMENT // max(dim, 1))
        self.segments = max(1, -(-self.drawn // SEGMENT))
        # The number of seeded blocks, which is the number of counters that a generation uses.
        self.blocks = -(-directions // self.block) * self.segments
        self.kept = directions * dim <= KEPT
        # Whether `iterate_direction` yields several segments, none of which is stored.
        self.segmented = dim > SEGMENT and not self.kept
        self._generator = torch.Generator(device)
        self._whole = self._empty(0)
        self._held: tuple[int, int] | None = None
        # The last drawn direction by (seed, counter), for the mirrored member that follows; workers set it to a dictionary.
        self.last: dict[Any, Tensor] | None = None

    def copy_plan(self) -> Noise:
        """Return the same plan without stored directions."""
        out = copy.copy(self)
        out._whole, out._held, out.last = self._empty(0), None, None
        return out

    def rows(self, seed: int, counter: int, start: int, stop: int) -> Tensor:
        """Return directions `start` to `stop`, one per row, which must not be written to.

        Args:
            seed: The seed of the run.
            counter: The counter of the generation.
            start: The first direction.
            stop: The end of the range.
        """
        if not self.kept:
            return self._draw_rows(seed, counter, start, stop)
        if self._held != (seed, counter):
            self._whole = self._draw_rows(seed, counter, 0, self.directions)
            self._held = (seed, counter)
        return self._whole[start:stop]

    def iterate_direction(self, seed: int, counter: int, index: int) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over one direction in segments; each may be overwritten by the next one.

        Args:
            seed: The seed of the run.
            counter: The counter of the generation.
            index: The direction. If directions are stored (`kept`), its values must not be written to.
        """
        if self.kept or self.block > 1:
            yield slice(0, self.dim), self.rows(seed, counter, index, index + 1)[0]
        else:
            yield from self._recall_segments(seed, counter + index * self.segments)

    def _recall_segments(self, seed: int, counter: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the stored direction if it is the requested one, and drop it; else draw the direction and store it."""
        # A product of low rank is drawn again in less time than a copy takes.
        if self.last is None or self.rank is not None:
            yield from self._draw_segments(seed, counter)
            return
        stored = (seed, counter) in self.last
        values = self.last.popitem()[1] if self.last else self._empty(self.dim)
        if stored:
            yield from ((columns, values[columns]) for columns in self._cut())
        else:
            for columns, segment in self._draw_segments(seed, counter):
                values[columns] = segment
                yield columns, segment
        self.last[None if stored else (seed, counter)] = values

    def factors(self, seed: int, counter: int, indices: Sequence[int]) -> list[tuple[Tensor, Tensor | None]]:
        """Return the factors of low-rank directions for each parameter: (A / √rank, B), or (numbers, None) if not a product.

        Args:
            seed: The seed of the run.
            counter: The counter of the generation.
            indices: The directions, which are along the first axis of the results.
        """
        rank = self.rank or 1
        drawn = self._empty(len(indices), self.drawn)
        for row, index in zip(drawn, indices, strict=True):
            for segment, part in enumerate(torch.split(row, SEGMENT)):
                self._normal(seed, counter + index * self.segments + segment, part)
        factors: list[tuple[Tensor, Tensor | None]] = []
        at = 0
        for m, n in self.parts:
            size = rank * (m + n) if n else m
            part, at = drawn[:, at : at + size], at + size
            if not n:
                factors.append((part, None))
                continue
            left, right = torch.split(part.reshape(len(indices), m + n, rank), [m, n], 1)
            factors.append((left / math.sqrt(rank), right))
        return factors

    def sum_weighted(
        self, seed: int, counter: int, first: Tensor, second: Tensor | None = None, share: Share | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return Σ_i first_i ε_i, and Σ_i second_i ε_i² (empty without `second`), in the memory of one direction.

        Args:
            seed: The seed of the run.
            counter: The counter of the generation.
            first: One weight for each direction.
            second: One weight for each square.
            share: This process's part of long sums, where several processes have the same plan.
        """
        sums = [(one.clone(), two.clone()) for _, one, two in self.sums(seed, counter, first, second, share)]
        linear, square = zip(*sums, strict=True)
        return torch.cat(linear), torch.cat(square)

    def sums(
        self, seed: int, counter: int, first: Tensor, second: Tensor | None = None, share: Share | None = None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Iterate over `sum_weighted` in parts, (coordinates, sum, sum); each may be overwritten by the next one.

        Args:
            seed: The seed of the run.
            counter: The counter of the generation.
            first: One weight for each direction.
            second: One weight for each square.
            share: This process's part of long sums, where several processes have the same plan.
        """
        first, second = first.to(self.dtype), None if second is None else second.to(self.dtype)
        if self.segmented and self.rank is None:
            yield from self._sum_segments(seed, counter, first, second, share)
        else:
            yield slice(0, self.dim), *self._sum_rows(seed, counter, first, second)

    def _sum_rows(self, seed: int, counter: int, first: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return both sums over whole directions."""
        linear = torch.zeros(self.dim, dtype=self.dtype, device=self.device)
        square = torch.zeros_like(linear) if second is not None else linear[:0]
        if self.rank is not None and second is None and not self.kept:
            self._add_products(seed, counter, first, linear)
            return linear, square
        step = self.directions if self.kept else self.block
        for low in range(0, self.directions, step):
            some = slice(low, min(low + step, self.directions))
            eps = self.rows(seed, counter, some.start, some.stop)
            linear += first[some] @ eps
            if second is not None:
                square += second[some] @ eps.square()
        return linear, square

    def _sum_segments(
        self, seed: int, counter: int, first: Tensor, second: Tensor | None, share: Share | None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Iterate over both sums by segments, which are added up in the same buffers."""
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
        """Add Σ_i w_i A_i B_iᵀ to `out` by one product for each parameter, over directions and ranks at once."""
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
        """Iterate over the coordinates of a direction, segment by segment."""
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
            for columns, segment in self._draw_segments(seed, counter + index * self.segments):
                row[columns] = segment
        return out

    def _draw_segments(self, seed: int, counter: int) -> Iterator[tuple[slice, Tensor]]:
        """Draw one direction in parts; low-rank factors are multiplied a few rows at a time, so that these stay in the cache."""
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
        """Fill one block with normal numbers, from the generator seeded by (seed, counter)."""
        return out.normal_(generator=self._generator.manual_seed(key(seed, counter)))


def _parts(dim: int, shapes: Sequence[Sequence[int]] | None, rank: int) -> list[tuple[int, int]]:
    if shapes is None:
        raise ValueError(f"rank={rank} needs the shapes of the parameters: shapes=[(64, 32), (64,)]")
    if rank < 1:
        raise ValueError(f"rank={rank}: low-rank noise has a rank of at least 1")
    total = sum(math.prod(shape) for shape in shapes)
    if total != dim:
        raise ValueError(f"the shapes hold {total} numbers together, but the vector has {dim}")
    parts = []
    for shape in shapes:
        whole = math.prod(shape)
        m, n = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (whole, 0)
        # A matrix that is no larger than its two factors is drawn directly.
        parts.append((m, n) if rank * (m + n) < m * n else (whole, 0))
    return parts
