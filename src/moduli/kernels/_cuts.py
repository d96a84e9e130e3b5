"""The split of lists for foreach operations: on the CPU groups that stay in the cache, elsewhere all tensors at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ._memory import KeptMemory

#: Elements in a block of a large tensor, or in a group of small ones: few enough to stay in the cache between operations.
BLOCK = 1 << 17

Lists = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of the lists that is processed together: small tensors, or the blocks of a large one."""

    indices: list[int] | None  # None for all of them
    flat: list[bool] | None  # which of them have to be read as vectors; None if none has
    blocks: bool = False
    stacked: bool = False  # small tensors of one shape, which are copied into one tensor for each list
    buffers: KeptMemory = field(default_factory=KeptMemory)  # of intermediate values on a device

    def follow(self, every: Lists) -> Iterator[Lists]:
        """Yield the part of these lists, or its blocks one after the other."""
        if self.blocks and self.indices is not None:
            blocks = [torch.split(_flat(tensors[self.indices[0]]), BLOCK) for tensors in every]
            yield from ([[block] for block in row] for row in zip(*blocks, strict=True))
            return
        chosen = every if self.indices is None else [[tensors[i] for i in self.indices] for tensors in every]
        if self.flat is not None:
            chosen = [[_flat(t) if flat else t for t, flat in zip(own, self.flat, strict=True)] for own in chosen]
        yield chosen


def is_on_host(device: torch.device) -> bool:
    """Return whether tensors on a device are processed in groups that fit the caches, and not all at once."""
    return device.type == "cpu"


def cut_lists(every: Lists) -> tuple[Cut, ...]:
    """Return the parts of lists: on the CPU blocks of large tensors and groups of small ones; elsewhere one part."""
    first = every[0]
    if not is_on_host(first[0].device):
        return (_group(every, list(range(len(first)))),)
    cuts: list[Cut] = []
    others: list[int] = []
    alike: dict[torch.Size, list[int]] = {}
    for i, size in enumerate(map(torch.numel, first)):
        if size * 4 > BLOCK and _is_dense([tensors[i] for tensors in every]):
            cuts.append(Cut([i], [True], blocks=True))
        elif 0 < size * 16 <= BLOCK and all(  # for larger ones copies cost more than the calls they save
            tensors[i].shape == first[i].shape for tensors in every
        ):
            alike.setdefault(first[i].shape, []).append(i)
        elif size:
            others.append(i)
    for shape, chosen in alike.items():
        if len(chosen) < 3:
            others += chosen
            continue
        step = BLOCK // shape.numel()
        parts = [chosen[start : start + step] for start in range(0, len(chosen), step)]
        cuts += [Cut(None if len(part) == len(first) else part, None, stacked=True) for part in parts]
    return (*cuts, *_collect_groups(every, sorted(others)))


def _collect_groups(every: Lists, chosen: list[int]) -> Iterator[Cut]:
    """Yield groups of tensors with at most BLOCK elements."""
    waiting: list[int] = []
    total = 0
    for i in chosen:
        size = every[0][i].numel()
        if waiting and total + size > BLOCK:
            yield _group(every, waiting)
            waiting, total = [], 0
        waiting.append(i)
        total += size
    if waiting:
        yield _group(every, waiting)


def _group(every: Lists, chosen: list[int]) -> Cut:
    first = every[0]
    flat = [any(tensors[i].shape != first[i].shape for tensors in every) for i in chosen]
    return Cut(None if len(chosen) == len(first) else chosen, flat if any(flat) else None)


def _is_dense(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors have equal layouts without gaps."""
    layouts = {(tensor.is_contiguous() or tensor.stride()) for tensor in tensors}
    return len(layouts) == 1 and preserve_strides(tensors[0]) == tensors[0].stride()


def preserve_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of the result of a pointwise operation: those of the tensor, if it has no gaps."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all elements of a dense tensor in the order of their addresses."""
    if tensor.dim() == 1:
        return tensor
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
