"""The noise of members around a mean, which is drawn again from a seed whenever it is needed."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

BLOCK = 64
"""How many members are drawn together, from one seeded generator."""


class MemberNoise:
    """The seed of the noise of members, and the methods that draw it."""

    rank: int
    seed: int
    generation: int
    antithetic: bool

    def _draw(self, name: str, shape: tuple[int, ...], rows: range, like: Tensor) -> Tensor:
        """Return the normal numbers of members `rows`, which do not depend on which other members are drawn."""
        step = 2 if self.antithetic else 1
        first, last = rows.start // step, (rows.stop - 1) // step + 1
        begin, end = first // BLOCK, (last - 1) // BLOCK + 1
        # Whole blocks, so that a member does not depend on which others are drawn.
        blocks = torch.empty(end - begin, BLOCK, math.prod(shape), dtype=_noise_dtype(like))
        for at in range(begin, end):
            text = f"{self.seed} {self.generation} {name} {at}"
            number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
            blocks[at - begin].normal_(generator=torch.Generator().manual_seed(number))
        drawn = blocks.flatten(0, 1)[first - begin * BLOCK : last - begin * BLOCK]
        if self.antithetic:
            drawn = drawn.repeat_interleave(2, 0)[rows.start % 2 :][: len(rows)]
        return drawn.reshape(len(rows), *shape).to(like.device, like.dtype)

    def _draw_signs(self, rows: range, like: Tensor) -> Tensor:
        signs = torch.ones(len(rows), dtype=like.dtype, device=like.device)
        if self.antithetic:
            signs[(1 - rows.start % 2) :: 2] = -1.0
        return signs

    def _draw_factors(self, name: str, like: Tensor, rows: range) -> tuple[Tensor, Tensor]:
        """Return A and B of members for a matrix; A with the scale and the sign."""
        scale = self._draw_signs(rows, like) / math.sqrt(self.rank)
        a = self._draw(f"{name} A", (like.shape[0], self.rank), rows, like)
        b = self._draw(f"{name} B", (math.prod(like.shape[1:]), self.rank), rows, like)
        return a.mul_(scale[:, None, None]), b

    def _draw_vectors(self, name: str, like: Tensor, rows: range) -> Tensor:
        noise = self._draw(name, tuple(like.shape), rows, like)
        return noise.mul_(self._draw_signs(rows, like).view(-1, *[1] * like.dim()))


def _noise_dtype(like: Tensor) -> torch.dtype:
    return torch.float64 if like.dtype is torch.float64 else torch.float32
