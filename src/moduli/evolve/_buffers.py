"""Memory that is used again, and uniform numbers at the speed of memory.

A fresh matrix of a megabyte costs a page fault for every 4 KiB of it, which is more than most passes over it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._torch import count_references, count_storage_uses

_CHUNK = 1 << 17  # numbers that are made of words while these are in the cache


class Buffers:
    """Scratch by name, and matrices that are handed out and taken back when no other reference to them is left."""

    def __init__(self) -> None:
        self._named: dict[str, Tensor] = {}
        self._given: list[Tensor] = []

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor that is overwritten whenever the same name is asked for again."""
        held = self._named.get(name)
        if held is None or held.shape != shape or held.dtype != dtype:
            held = self._named[name] = torch.empty(shape, dtype=dtype, device=device)
        return held

    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor that is the caller's for as long as the caller, or a view of it, lives."""
        for index in range(len(self._given)):
            held = self._given.pop(index)
            if held.shape == shape and held.dtype == dtype and _is_unshared(held):
                self._given.append(held)
                return held
            self._given.insert(index, held)
        new = torch.empty(shape, dtype=dtype, device=device)
        self._given = [*self._given[-5:], new]
        return new


def _is_unshared(tensor: Tensor) -> bool:
    """Whether only the caller's own variable holds the tensor or its storage."""
    return count_references(tensor) <= _ALONE[0] and count_storage_uses(tensor) <= _ALONE[1]


def _counts() -> tuple[int, int]:
    """What the two counts are for a tensor without other references, on this interpreter and version of torch."""
    seen: list[tuple[int, int]] = []

    def look(tensor: Tensor) -> None:
        seen.append((count_references(tensor), count_storage_uses(tensor)))

    held = torch.empty(1)
    look(held)
    return seen[0]


_ALONE = _counts()


def _words(generator: torch.Generator) -> np.random.SFC64:
    """A source of random words that begins where the generator says.

    It gives 64 bits in the time that torch's generator takes for 28, and is small enough to be begun anew for each matrix.
    """
    seed = torch.randint(2**62, (1,), generator=generator, dtype=torch.int64, device=generator.device)
    return np.random.SFC64(int(seed))


def _draw_words(words: np.random.SFC64, count: int) -> Tensor:
    return torch.from_numpy(words.random_raw(count).view(np.int64))


def uniforms(out: Tensor, generator: torch.Generator) -> Tensor:
    """Fill a tensor with uniform numbers in [0, 1]; single precision takes 32 bits for each, on the CPU."""
    if out.dtype != torch.float32 or out.device.type != "cpu" or out.numel() % 2 or not out.is_contiguous():
        return out.uniform_(generator=generator)
    words, half = _words(generator), torch.tensor(0.5)
    for part in torch.split(out.view(-1), _CHUNK):
        part.copy_(_draw_words(words, part.numel() // 2).view(torch.int32))
        torch.add(half, part, alpha=2.0**-32, out=part)
    return out


def draws(out: Tensor, generator: torch.Generator) -> Tensor:
    """Fill a tensor with whole numbers from -32768 to 32767, to be compared with `limit`."""
    if out.device.type != "cpu":
        return out.random_(-32768, 32768, generator=generator)
    words = _words(generator)
    for part in torch.split(out.view(-1), _CHUNK):
        part.copy_(_draw_words(words, -(-part.numel() // 4)).view(torch.int16)[: part.numel()])
    return out


def limit(chance: Any) -> Any:
    """What a draw is below with a chance, to a 65536th: never at 0, always at 1. A number or a tensor of them."""
    return (chance * 65536).round() - 32768 if isinstance(chance, Tensor) else round(chance * 65536) - 32768.0
