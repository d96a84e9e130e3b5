"""Reductions over tensors that several processes hold in shards (`torch.distributed.tensor.DTensor`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_sharded", "over_shards"]

LARGEST = ("amax", "largest")


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor; asked by what it can do, since importing the class takes a second.

    Example:
        >>> import torch
        >>> from moduli import kernels
        >>> kernels.is_sharded(torch.ones(2))
        False
    """
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def over_shards(kind: str, lists: Sequence[list[Tensor]], reduce: Callable[[Sequence[list[Tensor]]], Tensor]) -> Tensor:
    """Reduce what is held here, then over the processes that hold other shards.

    Args:
        kind: What is reduced: "amax" and "largest" take the maximum over processes, everything else the sum.
        lists: Lists of tensors, sharded or not; those at one position belong together.
        reduce: Reduces lists of ordinary tensors to one number.
    """
    groups: dict[Any, list[int]] = {}
    laid: list[list[Any]] = [list(tensors) for tensors in lists]
    for i, first in enumerate(laid[0]):
        if not is_sharded(first):
            groups.setdefault(None, []).append(i)
            continue
        first = laid[0][i] = _settled(first)
        for other in laid[1:]:
            other[i] = other[i].redistribute(first.device_mesh, first.placements)
        groups.setdefault((first.device_mesh, tuple(first.placements)), []).append(i)
    total: Tensor | None = None
    for key, positions in groups.items():
        chosen = [[tensors[i] for i in positions] for tensors in laid]
        if key is None:
            found = reduce(chosen)
        else:
            mesh, placements = key
            local = [[tensor.to_local().contiguous() for tensor in tensors] for tensors in chosen]
            # Where there are more processes than rows, some hold nothing.
            held = [i for i, tensor in enumerate(local[0]) if tensor.numel()]
            nothing = torch.tensor(-torch.inf if kind == "amax" else 0.0, dtype=torch.float64)
            found = reduce([[tensors[i] for i in held] for tensors in local]).clone() if held else nothing
            for dim, placement in enumerate(placements):
                if placement.is_shard():
                    how = torch.distributed.ReduceOp.MAX if kind in LARGEST else torch.distributed.ReduceOp.SUM
                    torch.distributed.all_reduce(found, how, group=mesh.get_group(dim))
        if total is None:
            total = found
        else:
            total = torch.maximum(total, found) if kind in LARGEST else total + found
    return torch.zeros((), dtype=torch.float64) if total is None else total


def _settled(tensor: Any) -> Any:
    """A tensor that processes hold as terms of a sum, summed."""
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
