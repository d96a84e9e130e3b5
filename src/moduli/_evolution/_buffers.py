"""Memory that is used again, and uniform numbers at the speed of memory.

A fresh matrix of a megabyte costs a page fault for every 4 KiB of it, which is more than most passes over it.
"""

import sys

import torch
from torch import Tensor

__all__ = ["Buffers", "coins", "uniforms"]


class Buffers:
    """Scratch by name, and matrices that are handed out and taken back when nobody holds them any more."""

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
            if held.shape == shape and held.dtype == dtype and _alone(held):
                self._given.append(held)
                return held
            self._given.insert(index, held)
        new = torch.empty(shape, dtype=dtype, device=device)
        self._given = [*self._given[-5:], new]
        return new


def _alone(tensor: Tensor) -> bool:
    """Whether only the caller's own variable holds the tensor or its storage."""
    return sys.getrefcount(tensor) <= _ALONE[0] and _uses(tensor) <= _ALONE[1]


def _uses(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _counts() -> tuple[int, int]:
    """What the two counts are for a tensor that nobody else holds, on this interpreter and version of torch."""
    seen: list[tuple[int, int]] = []

    def look(tensor: Tensor) -> None:
        seen.append((sys.getrefcount(tensor), _uses(tensor)))

    held = torch.empty(1)
    look(held)
    return seen[0]


_ALONE = _counts()


def uniforms(out: Tensor, generator: torch.Generator, buffers: Buffers) -> Tensor:
    """Fill a tensor with uniform numbers in [0, 1].

    Single precision takes 32 bits of what the generator gives; torch spends twice as many on each number.
    """
    if out.dtype != torch.float32 or out.device.type != "cpu" or out.numel() % 2 or not out.is_contiguous():
        return out.uniform_(generator=generator)
    words = buffers.scratch("words", (out.numel() // 2,), torch.int64, out.device)
    words.random_(-(2**63), None, generator=generator)
    return out.copy_(words.view(torch.int32).view(out.shape)).mul_(2.0**-32).add_(0.5)


def coins(chance: Tensor | float, shape: tuple[int, int], generator: torch.Generator, buffers: Buffers) -> Tensor:
    """A matrix that is true with a chance, of all or of each row (a column), to a 65536th. It is scratch."""
    words = buffers.scratch("coins", (-(-shape[0] * shape[1] // 4),), torch.int64, generator.device)
    words.random_(-(2**63), None, generator=generator)
    draws = words.view(torch.int16)[: shape[0] * shape[1]].view(shape)
    limit = torch.as_tensor(chance, dtype=torch.float64, device=words.device) * 65536 - 32768
    mask = buffers.scratch("mask", shape, torch.bool, words.device)
    # The certain event is one more than 16 bits can say.
    torch.lt(draws, limit.round().clamp(max=32767).to(torch.int16), out=mask)
    if bool((limit >= 32767.5).any()):
        mask.logical_or_(limit >= 32767.5)
    return mask
