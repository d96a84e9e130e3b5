"""Storage for results, used again when no reference to it is left.

A fresh large vector costs a page fault for every 4 KiB of it: the C library maps and unmaps it each time. Results of
arithmetic come and go, so the few that went last are kept for those that come next.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from moduli._torch import UNKNOWN, count_references, count_storage_uses, is_wrapped
from moduli.layout import Group, Layout

__all__ = ["Slab", "clear", "held", "take"]

# Below this the C library does as well.
_LEAST = 1 << 18
_KEPT_PER_SIZE = 3
_KEPT_BYTES = 1 << 30

_free: dict[tuple[int, torch.dtype], list[Tensor]] = {}
_lock = threading.Lock()
_probe = torch.empty(1, device="cpu")
# How often a storage is counted that one tensor holds; where that is not known, nothing counts as free.
ALONE = -1 if count_storage_uses(_probe) == UNKNOWN else count_storage_uses(_probe)


class Slab:
    """The vectors of one result, one for each group of its layout, and how many results use them."""

    __slots__ = ("large", "users", "vectors")

    def __init__(self, vectors: list[Tensor], large: bool = True) -> None:
        self.vectors = vectors
        self.users = 0
        # Whether it is worth the trouble to use the storage again.
        self.large = large

    def release(self) -> None:
        """One user fewer. The last one gives the vectors back, unless there are other references to them."""
        self.users -= 1
        if self.users == 0 and self.large:
            vectors, self.vectors = self.vectors, []
            # What the count is for something without other references is seen on an object made here and now: how many references
            # a call adds depends on the interpreter, and on whether tools such as torch.compile watch its frames.
            alone = [object()]
            while vectors:
                # Parameters are NumPy views of the vector and hold this very object; views made by torch hold its storage.
                # A holder of either may still read or write it.
                free = (
                    _worth_keeping(vectors[-1])
                    and count_references(vectors[-1]) <= count_references(alone[-1])
                    and count_storage_uses(vectors[-1]) <= ALONE
                )
                vector = vectors.pop()
                if free:
                    _give(vector)


def take(group: Group) -> Tensor:
    """An uninitialised vector for a group."""
    if group.numel * group.dtype.itemsize >= _LEAST and group.device.type == "cpu":
        with _lock:
            kept = _free.get((group.numel, group.dtype))
            if kept:
                return kept.pop()
    return group.empty()


def empty(layout: Layout) -> list[Tensor]:
    """Uninitialised vectors for a layout."""
    return [take(group) for group in layout.groups]


def held() -> int:
    """How many bytes are kept for later."""
    with _lock:
        return sum(numel * dtype.itemsize * len(kept) for (numel, dtype), kept in _free.items())


def clear() -> None:
    """Give everything back to the system."""
    with _lock:
        _free.clear()


def _worth_keeping(vector: Tensor) -> bool:
    return (
        vector.numel() * vector.element_size() >= _LEAST
        and vector.device.type == "cpu"
        and type(vector) is Tensor
        and not (vector.requires_grad or vector.is_inference() or is_wrapped(vector))
    )


def _give(vector: Tensor) -> None:
    size = vector.numel() * vector.element_size()
    with _lock:
        kept = _free.setdefault((vector.numel(), vector.dtype), [])
        total = sum(numel * dtype.itemsize * len(each) for (numel, dtype), each in _free.items())
        if len(kept) < _KEPT_PER_SIZE and total + size <= _KEPT_BYTES:
            kept.append(vector)
        elif not kept:
            del _free[(vector.numel(), vector.dtype)]
