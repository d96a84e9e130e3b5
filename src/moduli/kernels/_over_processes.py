"""Reductions over the lists of several processes, each of which has other shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

Lists = Sequence[Sequence[torch.Tensor]]
_PEAKS = ("amax", "largest")

# The process group (None for all processes), and for each tensor of a list whether this process includes it in sums.
scope: ContextVar[tuple[Any, Sequence[bool]] | None] = ContextVar("reducing over processes", default=None)


@contextmanager
def reducing_over(group: Any, counted: Sequence[bool]) -> Iterator[None]:
    """Have reductions in a block be over the lists of all processes of a group, each of which has other shards.

    Args:
        group: The processes; None for all.
        counted: For each position of the lists whether this process includes its tensor: if several processes have it, one
            does.

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> torch.distributed.is_initialized()  # otherwise: with kernels.reducing_over(None, [True]): kernels.norm([shard])
        False
    """
    token = scope.set((group, counted))
    try:
        yield
    finally:
        scope.reset(token)


def over_processes() -> tuple[Any, Sequence[bool]] | None:
    """Return the group and the flags of the enclosing block, see `reducing_over`; None outside one.

    Example:
        >>> from moduli import kernels
        >>> kernels.over_processes() is None
        True
    """
    return scope.get()


def reduce_counted(reduce: Callable[..., torch.Tensor], kind: str, lists: Lists, scale: float) -> torch.Tensor:
    """Return the reduction over the tensors that this process counts, and then over processes.

    Args:
        reduce: Reduces lists of this process.
        kind: The reduction.
        lists: The lists.
        scale: A factor of the elements.
    """
    group, counted = scope.get() or (None, ())
    flags = [True] * len(lists[0]) if all(counted) else counted
    if len(flags) != len(lists[0]):
        raise ValueError(
            f"a reduction over {len(lists[0])} tensors, but there are {len(counted)} pieces, of which other processes count "
            "some; reduce lists with one tensor for each parameter"
        )
    chosen = [i for i, tensor in enumerate(lists[0]) if flags[i] and tensor.numel()]
    token = scope.set(None)
    try:
        if chosen:
            result = reduce(kind, [[tensors[i] for i in chosen] for tensors in lists], scale).clone()
        else:
            device = lists[0][0].device if lists[0] else None
            result = torch.tensor(-torch.inf if kind == "amax" else 0.0, dtype=torch.float64, device=device)
    finally:
        scope.reset(token)
    how = torch.distributed.ReduceOp.MAX if kind in _PEAKS else torch.distributed.ReduceOp.SUM
    torch.distributed.all_reduce(result, how, group=group)
    return result
