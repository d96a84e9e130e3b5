"""Values that must agree in all processes that train one model: the loss, derivatives, and gathered tensors.

Gradients of `backward` are averaged by the wrapper of the model (DistributedDataParallel). Everything else is local to one
process: the loss of its data, derivatives by `torch.autograd.grad` (which does not run the hooks of the wrapper), and its random
numbers. A link that used these unmodified would take another step in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import Box, cut
from ._needs import Across, ChainError, Need, keeps_graph
from ._vectors import fill_zeros

if TYPE_CHECKING:
    from ..population import Population
    from . import Module, Optimizer


def are_several() -> bool:
    """Return whether this process is one of several."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class OverProcesses:
    """A reduction over all processes: sum or mean."""

    def __init__(self, *, mean: bool) -> None:
        self.mean = mean

    def __call__(self, loss: Tensor) -> Tensor:
        return self.reduce([loss])[0]

    def reduce(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return new tensors with the sum or the mean of those of all processes."""
        out = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        for tensor in out:
            torch.distributed.all_reduce(tensor)
            if self.mean:
                tensor /= torch.distributed.get_world_size()
        return out


def reduce_derivatives(reduce: Callable[[Tensor], Tensor] | None, derivatives: Sequence[Tensor]) -> list[Tensor]:
    """Return derivatives of the loss over all processes, from those of this process; unmodified in one process."""
    return reduce.reduce(derivatives) if isinstance(reduce, OverProcesses) else list(derivatives)


def reduce_gradients(
    reduce: Callable[[Tensor], Tensor] | None, grads: Sequence[Tensor | None], params: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return gradients with the values of all processes and the graph of this one.

    Differentiated again they give this process's product, which `reduce_derivatives` sums over processes.

    Args:
        reduce: The reduction; other functions leave gradients unmodified.
        grads: The gradients of this process.
        params: The parameters.
    """
    if not isinstance(reduce, OverProcesses):
        return list(grads)
    own = fill_zeros(grads, params)
    whole = reduce.reduce(own)
    return [w + (g - g.detach()) for g, w in zip(own, whole, strict=True)]


def choose_reduction(reduce: Any, optimizer: Optimizer, sharded: bool) -> Callable[[Tensor], Tensor] | None:
    """Return the reduction of the losses of several processes; raise ChainError for a chain whose processes would diverge.

    Args:
        reduce: The argument `reduce` of the optimizer.
        optimizer: The optimizer.
        sharded: Whether the parameters are sharded, so that all processes train one model.
    """
    if not callable(reduce) and reduce not in (None, "auto", "mean", "sum"):
        raise ValueError(f"reduce is {reduce!r}; it is 'mean', 'sum', a function of the loss, or None")
    if reduce is None or (reduce == "auto" and not are_several()):
        return None
    links = [link for _, link in optimizer._links]
    if optimizer.population is not None:
        _check_population_reduction(reduce, optimizer.population)
        return None
    if reduce == "auto":
        if not any(need.evaluates for link in links for need in link.all_needs()):
            return None
        if not sharded and not isinstance(optimizer.model, torch.nn.parallel.DistributedDataParallel):
            raise ChainError("processes may differ on this loss; give the wrapped module, or reduce='mean' or None")
        reduce = "mean"
    chosen: Callable[[Tensor], Tensor] = reduce if callable(reduce) else OverProcesses(mean=reduce == "mean")
    _check_reduction(links, chosen)
    return chosen


def _check_population_reduction(reduce: Any, population: Population) -> None:
    """Raise ChainError unless the population is sharded: its gradients and losses are those of the members here."""
    if reduce != "auto" or population.sharding is None:
        raise ChainError("spread a population over processes with pop.shard(mesh); reduce=None if each has its own")


def _check_reduction(links: Sequence[Module], chosen: Callable[[Tensor], Tensor]) -> None:
    """Raise ChainError for links with needs that a reduction does not meet."""
    for link in links:
        name = type(link).__name__
        if Need.RESIDUALS in link.needs:
            raise ChainError(f"{name} needs all residuals, and each process has its own; gather them, say reduce=None")
        if keeps_graph(link.needs) and not isinstance(chosen, OverProcesses):
            raise ChainError(f"{name} needs second derivatives, reduced by reduce='mean' or 'sum', not by a function")


def find_across(link: Module) -> Across:
    """Return the requirement of a link and its children on sharded parameters; children work on the tensors of their parent."""
    from .chain import Chain

    run_apart = isinstance(link, Chain) or link.divides_params  # each child may have another requirement
    return Across.EVERYTHING if link.children and not run_apart else link.across


class Exchange:
    """Exchanges shards of tensors between the processes of a group; each call is one collective for each dtype.

    Args:
        group: The processes; None for all.
        shapes: The shape of each whole tensor.
        boxes: The local shard of each tensor, as a box of indices.
    """

    def __init__(self, group: Any, shapes: Sequence[tuple[int, ...]], boxes: Sequence[Box]) -> None:
        distributed = torch.distributed
        self.group = group
        self.rank: int = distributed.get_rank(group)
        self.size: int = distributed.get_world_size(group)
        self.shapes = list(shapes)
        boxes_by_rank: list[Any] = [None] * self.size
        distributed.all_gather_object(boxes_by_rank, list(boxes), group=group)
        #: For each tensor the shard of each process.
        self.boxes: list[list[Box]] = [list(shards) for shards in zip(*boxes_by_rank, strict=True)]
        #: For each tensor whether no process of lower rank has the same shard, so that sums count it here.
        self.counted = [shards.index(shards[self.rank]) == self.rank for shards in self.boxes]
        #: For each tensor the process that owns it: the one that computes on the gathered tensor.
        self.owners = [0] * len(self.shapes)
        costs = [torch.Size(shape).numel() * min(shape, default=1) for shape in self.shapes]
        # Balance the cost of matrix products over processes.
        for turn, i in enumerate(sorted(range(len(costs)), key=lambda i: -costs[i])):
            self.owners[i] = turn % self.size

    def gather(self, shards: Mapping[int, Tensor], everywhere: bool) -> dict[int, Tensor]:
        """Return gathered tensors: those that this process owns, or all of them.

        Args:
            shards: The local shards.
            everywhere: Whether every process gets every tensor.
        """
        me, boxes, every = self.rank, self.boxes, range(self.size)

        def comes_from(i: int, holder: int, reader: int) -> bool:
            """Return whether a process gets a shard from this one: from itself if it has the shard, otherwise from the first.

            Args:
                i: The index of the tensor.
                holder: The rank of a process that has the shard.
                reader: The rank of the process that gets it.
            """
            if not everywhere and self.owners[i] != reader:
                return False
            box = boxes[i][holder]
            return holder == (reader if boxes[i][reader] == box else boxes[i].index(box))

        sends = [[tensor for i, tensor in shards.items() if comes_from(i, me, reader)] for reader in every]
        wanted = [[(i, boxes[i][holder]) for i in shards if comes_from(i, holder, me)] for holder in every]
        out: dict[int, Tensor] = {}
        for i, box, shard in self._route(shards, sends, wanted):
            if box[1] == self.shapes[i]:
                out[i] = shard
                continue
            if i not in out:
                out[i] = torch.empty(self.shapes[i], dtype=shard.dtype, device=shard.device)
            cut(out[i], box).copy_(shard)
        return {i: out[i] for i in shards if i in out}

    def from_owners(self, wholes: Mapping[int, Tensor], shards: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the local shards of tensors that their owners have whole.

        Args:
            wholes: The tensors that this process owns.
            shards: Tensors with the dtypes of all of them.
        """
        me, boxes, owners = self.rank, self.boxes, self.owners
        owned = {i: wholes[i].to(shard.dtype) for i, shard in shards.items() if owners[i] == me}
        sends = [[cut(whole, boxes[i][rank]) for i, whole in owned.items()] for rank in range(self.size)]
        wanted = [[(i, boxes[i][me]) for i in shards if owners[i] == rank] for rank in range(self.size)]
        return {i: shard for i, _, shard in self._route(shards, sends, wanted)}

    def _route(
        self, shards: Mapping[int, Tensor], sends: list[list[Tensor]], wanted: list[list[tuple[int, Box]]]
    ) -> list[tuple[int, Box, Tensor]]:
        """Send tensors to each process, as bytes, which every backend can send, and return the received tensors.

        Args:
            shards: Tensors with the dtypes of all of them.
            sends: The tensors to send, by rank.
            wanted: The index and the box of the tensors to receive, by rank.
        """
        received: list[tuple[int, Box, Tensor]] = []
        # The dtypes in the same order in all processes.
        for dtype in sorted({tensor.dtype for tensor in shards.values()}, key=str):
            out = [[t.reshape(-1) for t in tensors if t.dtype is dtype] for tensors in sends]
            lists = [[(i, box) for i, box in entries if shards[i].dtype is dtype] for entries in wanted]
            counts = [[torch.Size(box[1]).numel() for _, box in entries] for entries in lists]
            empty = torch.empty(0, dtype=dtype, device=next(iter(shards.values())).device)
            flat = torch.cat([empty, *chain.from_iterable(out)])
            into = empty.new_empty(sum(map(sum, counts)))
            torch.distributed.all_to_all_single(
                into.view(torch.uint8),
                flat.view(torch.uint8),
                [sum(sizes) * dtype.itemsize for sizes in counts],
                [sum(t.numel() for t in tensors) * dtype.itemsize for tensors in out],
                group=self.group,
            )
            parts = torch.split(into, list(chain.from_iterable(counts)))
            expected = zip(chain.from_iterable(lists), parts, strict=True)
            received += [(i, box, part.view(box[1])) for (i, box), part in expected]
        return received
