"""Memory for large results.

Fresh memory costs more than the arithmetic on it: the system hands it out in pages of 4 KB, each at the price of a fault.
An allocator keeps what was freed for the next result, but not where a whole model was freed at once. One mapping in huge
pages has a five-hundredth of the faults.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE = 1 << 23
"""From this many elements on results have memory of their own. Below, allocators keep what was freed."""

_ALIGNMENT = 64
_PAGE = 1 << 21
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def is_large(tensors: Sequence[Tensor]) -> bool:
    """Whether copies of tensors are better in a mapping of their own: many bytes of plain numbers on the CPU."""
    return (
        _HUGE is not None
        and sum(map(Tensor.numel, tensors)) >= LARGE
        and all(t.device.type == "cpu" and t.is_floating_point() and t.layout is torch.strided for t in tensors)
    )


def allocate_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Uninitialised contiguous tensors of the shapes and dtypes of others.

    Each has a storage of its own, so saving one of them writes that part only, and a version counter of its own. The
    mapping goes with the last of them.
    """
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = mmap.mmap(-1, end + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE is not None:
        memory.madvise(_HUGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _PAGE
    made = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        if not tensor.numel():
            made.append(torch.empty_like(tensor))
            continue
        part = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start + offset)
        made.append(part.view(tensor.shape))
    return made
