"""Reductions over tensors of which several processes hold pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

LARGEST = ("amax", "largest")

# The process group (None for all processes), and for each tensor of a list whether this process counts it.
_scope: ContextVar[tuple[Any, Sequence[bool]] | None] = ContextVar("reducing over processes", default=None)


@contextmanager
def reducing_over(group: Any, counted: Sequence[bool]) -> Iterator[None]:
    """A block in which reductions are over the lists of all processes of a group, each of which holds other pieces.

    Args:
        group: The processes; None for all.
        counted: For each position of the lists whether this process counts its tensor: of a tensor that several have, one
            does.

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> torch.distributed.is_initialized()  # otherwise: with kernels.reducing_over(None, [True]): kernels.norm([shard])
        False
    """
    token = _scope.set((group, counted))
    try:
        yield
    finally:
        _scope.reset(token)


def over_processes() -> tuple[Any, Sequence[bool]] | None:
    """The group and the flags of the block around this call, see `reducing_over`; None outside one.

    Example:
        >>> from moduli import kernels
        >>> kernels.over_processes() is None
        True
    """
    return _scope.get()


def reduce_counted(kind: str, lists: Sequence[Sequence[Tensor]], reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce what this process counts, then over the processes of the block around this call."""
    scope = _scope.get()
    if scope is None:
        raise RuntimeError("there are no other processes to reduce over; use kernels.reducing_over")
    group, counted = scope
    if all(counted):
        flags: Sequence[bool] = [True] * len(lists[0])
    elif len(counted) == len(lists[0]):
        flags = counted
    else:
        raise ValueError(
            f"a reduction over {len(lists[0])} tensors, but there are {len(counted)} pieces, of which other processes count "
            "some; reduce lists with one tensor for each parameter"
        )
    held = [i for i, tensor in enumerate(lists[0]) if flags[i] and tensor.numel()]
    token = _scope.set(None)
    try:
        if held:
            found = reduce([tuple(tensors[i] for i in held) for tensors in lists]).clone()
        else:
            device = lists[0][0].device if lists[0] else None
            found = torch.tensor(-torch.inf if kind == "amax" else 0.0, dtype=torch.float64, device=device)
    finally:
        _scope.reset(token)
    how = torch.distributed.ReduceOp.MAX if kind in LARGEST else torch.distributed.ReduceOp.SUM
    torch.distributed.all_reduce(found, how, group=group)
    return found
