"""Cutting lists of tensors into blocks: large ones are cut, small ones share a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["BLOCK", "Layout", "Pack", "Target", "chosen", "flat_of", "layout_of", "vector_of"]

#: Elements in a block: few enough to stay in the cache between operations, enough that calling them costs little.
BLOCK = 65536
_SMALL = 16384
_TINY = 1024

#: Where an output goes: a list of tensors, or a vector with an offset for each.
Target = list[torch.Tensor] | tuple[torch.Tensor, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Pack:
    """Small tensors that share a block; `tails` has for each list the common shape behind the first axis, or None."""

    indices: Sequence[int]
    sizes: list[int]
    held: int
    tails: list[torch.Size | None]


@dataclass(frozen=True, slots=True)
class Layout:
    """How lists are cut into blocks: tensors large enough to be cut, and packs of small ones."""

    large: list[tuple[int, int]]
    middle: list[Sequence[int]]
    packs: list[Pack]


def _groups(sizes: Sequence[int], low: int, high: int) -> list[list[int]]:
    """Tensors of low <= size < high, in groups of at most a block."""
    groups: list[list[int]] = []
    held = BLOCK
    for i, size in enumerate(sizes):
        if low <= size < high:
            if held + size > BLOCK:
                groups.append([])
                held = 0
            groups[-1].append(i)
            held += size
    return groups


def layout_of(lists: Sequence[list[torch.Tensor]], targets: Sequence[Target], over_lists: bool) -> Layout:
    """Cut lists into blocks."""
    sizes = [tensor.numel() for tensor in lists[0]]
    large = [(i, size) for i, size in enumerate(sizes) if size >= _SMALL]
    edge = _TINY if over_lists else _SMALL
    packs = []
    for group in _groups(sizes, 1, edge):
        parts = [sizes[i] for i in group]
        tails = [_tail(tensors, group) for tensors in lists]
        tails += [None if isinstance(target, tuple) else _tail(target, group) for target in targets]
        whole = group == list(range(group[0], group[-1] + 1))
        indices: Sequence[int] = range(group[0], group[-1] + 1) if whole else group
        packs.append(Pack(indices, parts, sum(parts), tails))
    return Layout(large, list(_groups(sizes, edge, _SMALL)), packs)


def _tail(tensors: Sequence[torch.Tensor], group: Sequence[int]) -> torch.Size | None:
    """The shape behind the first axis, where all have the same: such tensors join without being flattened."""
    shapes = {tensors[i].shape[1:] if tensors[i].dim() else None for i in group}
    return shapes.pop() if len(shapes) == 1 else None


def chosen(tensors: list[torch.Tensor], indices: Sequence[int]) -> list[torch.Tensor]:
    if isinstance(indices, range):
        return tensors[indices.start : indices.stop]
    return [tensors[i] for i in indices]


def vector_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def flat_of(target: Target, i: int, size: int) -> torch.Tensor:
    if isinstance(target, tuple):
        return target[0].narrow(0, target[1][i], size)
    return vector_of(target[i])
