"""Populations over several processes: the range of members of each, and the exchange of their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import map_tensors

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Shard:
    """The range of members that this process stores of a sharded population. Made by `Population.shard`.

    Members are numbered over all processes; rank r stores those from `start` up to `stop`. All methods but `own` are
    collective: every process of the mesh calls them, in the same order.

    Args:
        mesh: One dimension of processes.
        total: The number of members in all processes.

    Attributes:
        total: The number of members in all processes.
        start: The first member of this process.
        stop: The end of the range of this process.

    Example:
        >>> from moduli.population import Shard
        >>> Shard.__name__
        'Shard'
    """

    def __init__(self, mesh: DeviceMesh, total: int) -> None:
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names
            raise ValueError(
                f"members lie along one dimension of processes, the mesh has {mesh.ndim}"
                + (f"; choose one: pop.shard(mesh[{names[0]!r}])" if names else "; give one dimension of it")
            )
        self.mesh = mesh
        self.group = mesh.get_group()
        self.size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        if total < self.size:
            raise ValueError(f"{total} members for {self.size} processes; give at least one to each")
        self.total = total
        small, more = divmod(total, self.size)
        self.starts = [rank * small + min(rank, more) for rank in range(self.size + 1)]
        self.start, self.stop = self.starts[self.rank], self.starts[self.rank + 1]

    def __repr__(self) -> str:
        return f"Shard(members {self.start} to {self.stop - 1} of {self.total}, rank {self.rank} of {self.size})"

    def own(self, rows: Any) -> Any:
        """Return the rows (or items of a list) of this process's members, from those of all members."""
        return rows[self.start : self.stop]

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of all members, from the rows that each process has."""
        most = self.starts[1]  # the first processes have the most members
        padded = rows.new_zeros(most, *rows.shape[1:])
        padded[: len(rows)] = rows.detach()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.group)
        sizes = [stop - start for start, stop in self._spans()]
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def fetch(self, rows: Tensor, members: Tensor) -> Tensor:
        """Return the rows of some members in every process, whichever process stores them."""
        here = (members >= self.start) & (members < self.stop)
        result = rows.new_zeros(len(members), *rows.shape[1:])
        result[here.to(result.device)] = rows.detach()[(members[here] - self.start).to(rows.device)]
        # Each row comes from one process and is zero in the others, so the sum is exact.
        dist.all_reduce(result, group=self.group)
        return result

    def take(self, rows: Tensor, sources: Tensor) -> Tensor:
        """Return for every member of this process the row of its source member.

        Args:
            rows: The rows of this process's members.
            sources: One member for each of all members, the same in every process.
        """
        return self._fetch_distant(rows, [sources[start:stop] for start, stop in self._spans()])

    def shift(self, rows: Tensor, by: int) -> Tensor:
        """Return the rows of the `|by|` members after this process's (before, if `by` is negative), around the ring."""
        ends = [(stop if by > 0 else start + by, stop + by if by > 0 else start) for start, stop in self._spans()]
        return self._fetch_distant(rows, [torch.arange(first, last) % self.total for first, last in ends])

    def _fetch_distant(self, rows: Tensor, wanted: list[Tensor]) -> Tensor:
        """Return the rows that this process wants; `wanted` has the members that each process wants.

        Only rows that another process wants are transferred.
        """
        spans = zip(self._spans(), wanted, strict=True)
        away = {i for (start, stop), each in spans for i in each.tolist() if not start <= i < stop}
        distant, own = torch.tensor(sorted(away), dtype=torch.int64), wanted[self.rank].cpu()
        result = rows.detach()[(own - self.start).clamp(0, len(rows) - 1).to(rows.device)]
        if away:
            sent, gone = self.fetch(rows, distant), (own < self.start) | (own >= self.stop)
            result[gone.to(result.device)] = sent[torch.searchsorted(distant, own[gone]).to(sent.device)]
        return result

    def _spans(self) -> list[tuple[int, int]]:
        return list(zip(self.starts, self.starts[1:], strict=False))

    def copy(self, rows: Tensor, targets: Tensor, sources: Tensor) -> None:
        """Copy the rows of some members to others, in place.

        Args:
            rows: The rows of this process's members, which are written to.
            targets: The members that are overwritten, the same in every process.
            sources: The members that are copied, one for each target.
        """
        copies = self.fetch(rows, sources)
        here = (targets >= self.start) & (targets < self.stop)
        rows[(targets[here] - self.start).to(rows.device)] = copies[here.to(copies.device)]

    def draw(self, sample: Callable[[int], Tensor]) -> Tensor:
        """Return random rows for this process's members, equal to those that one process would draw for all members.

        Args:
            sample: Draws a number of rows, one after the other, from a generator in the same state in every process.
        """
        step = max(self.stop - self.start, 1)
        self._skip(sample, 0, self.start, step)
        own = sample(self.stop - self.start)
        self._skip(sample, self.stop, self.total, step)
        return own

    @staticmethod
    def _skip(sample: Callable[[int], Tensor], start: int, stop: int, step: int) -> None:
        for first in range(start, stop, step):
            sample(min(step, stop - first))

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def collect(self, value: Any) -> list[Any]:
        """Return the value of each process, in the order of ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def join(self, value: Any) -> Any:
        """Return a tree with every tensor of one row per local member gathered to one row for each of all members."""
        return self._map_members(value, self.stop - self.start, self.gather)

    def part(self, value: Any) -> Any:
        """Return a tree with every tensor of one row for each of all members sliced to this process's members."""
        return self._map_members(value, self.total, self.own)

    def _map_members(self, value: Any, count: int, act: Callable[[Tensor], Tensor]) -> Any:
        def of_members(tensor: Tensor) -> bool:  # states of generators are bytes
            return tensor.dim() > 0 and len(tensor) == count and tensor.dtype is not torch.uint8

        return map_tensors(value, lambda tensor: act(tensor) if of_members(tensor) else tensor)
