"""What several processes that train one model must have in common: the loss, derivatives, and tensors put together.

Gradients of `backward` are averaged by what wraps the model (DistributedDataParallel). Everything else is known to one
process only: the loss of its data, derivatives taken by `torch.autograd.grad` (which passes the hooks of the wrapper), and
what it draws at random. A link that used these as they are would take another step in every process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import Box, cut
from ._needs import Across, ChainError, Need, keeps_graph
from ._vectors import fill_zeros

if TYPE_CHECKING:
    from . import Module, Optimizer


def are_several() -> bool:
    """Whether this process is one of several."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class OverProcesses:
    """The sum or the mean over all processes."""

    def __init__(self, *, mean: bool) -> None:
        self.mean = mean

    def __call__(self, loss: Tensor) -> Tensor:
        return self.reduce([loss])[0]

    def reduce(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """New tensors with the sum or the mean of those of all processes."""
        out = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
        for tensor in out:
            torch.distributed.all_reduce(tensor)
            if self.mean:
                tensor /= torch.distributed.get_world_size()
        return out


def reduce_derivatives(reduce: Callable[[Tensor], Tensor] | None, found: Sequence[Tensor]) -> list[Tensor]:
    """Derivatives of this process's loss made derivatives of the loss of all; as they are where there is one process."""
    return reduce.reduce(found) if isinstance(reduce, OverProcesses) else list(found)


def reduce_gradients(
    reduce: Callable[[Tensor], Tensor] | None, found: Sequence[Tensor | None], params: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients with a graph: the values are those of all processes, the graph is that of this one.

    Differentiated once more they give this process's product, which `reduce_derivatives` makes the product of all.
    """
    if not isinstance(reduce, OverProcesses):
        return list(found)
    own = fill_zeros(found, params)
    whole = reduce.reduce(own)
    return [w + (g - g.detach()) for g, w in zip(own, whole, strict=True)]


def choose_reduction(reduce: Any, optimizer: Optimizer, in_pieces: bool) -> Callable[[Tensor], Tensor] | None:
    """How the losses of several processes become one for these links; a chain that would drift apart is refused.

    Args:
        reduce: As it was given to the optimizer.
        optimizer: The optimizer.
        in_pieces: Whether processes hold pieces of the parameters, which then are those of one model.
    """
    if not callable(reduce) and reduce not in (None, "auto", "mean", "sum"):
        raise ValueError(f"reduce is {reduce!r}; it is 'mean', 'sum', a function of the loss, or None")
    if reduce is None or (reduce == "auto" and not are_several()):
        return None
    links = [link for _, link in optimizer._links]
    if optimizer.population is not None:
        if optimizer.population.sharding is not None and reduce == "auto":
            return None  # gradients and losses are those of the members here
        raise ChainError("spread a population over processes with pop.shard(mesh); reduce=None if each has its own")
    if reduce == "auto":
        if not any(need.evaluates for link in links for need in link.all_needs()):
            return None
        if not in_pieces and not isinstance(optimizer.model, torch.nn.parallel.DistributedDataParallel):
            raise ChainError("processes may differ on this loss; give the wrapped module, or reduce='mean' or None")
        reduce = "mean"
    chosen = reduce if callable(reduce) else OverProcesses(mean=reduce == "mean")
    for link in links:
        name = type(link).__name__
        if Need.RESIDUALS in link.needs:
            raise ChainError(f"{name} needs all residuals, and each process has its own; gather them, say reduce=None")
        if keeps_graph(link.needs) and not isinstance(chosen, OverProcesses):
            raise ChainError(f"{name} needs second derivatives, reduced by reduce='mean' or 'sum', not by a function")
    return chosen


def find_across(link: Module) -> Across:
    """What a link and those inside it need across processes; inner links see what theirs sees, in one process as in many."""
    from .chain import Chain

    run_apart = isinstance(link, Chain) or link.divides_params  # each child by itself may need something else
    return Across.EVERYTHING if link.children and not run_apart else link.across


class Exchange:
    """Exchanges pieces of tensors between the processes of a group; each call is one collective for each dtype.

    Args:
        group: The processes; None for all.
        shapes: The shape of each whole tensor.
        boxes: For each tensor what this process holds of it.
    """

    def __init__(self, group: Any, shapes: Sequence[tuple[int, ...]], boxes: Sequence[Box]) -> None:
        distributed = torch.distributed
        self.group = group
        self.rank: int = distributed.get_rank(group)
        self.size: int = distributed.get_world_size(group)
        self.shapes = list(shapes)
        every: list[Any] = [None] * self.size
        distributed.all_gather_object(every, list(boxes), group=group)
        #: For each tensor the piece of each process.
        self.boxes: list[list[Box]] = [list(held) for held in zip(*every, strict=True)]
        #: For each tensor whether no earlier process holds the same piece, so that sums count it here.
        self.counted = [held.index(held[self.rank]) == self.rank for held in self.boxes]
        #: For each tensor the process that works on it where it is worked on whole.
        self.owners = [0] * len(self.shapes)
        costs = [torch.Size(shape).numel() * min(shape, default=1) for shape in self.shapes]
        # So that each process has about as much to multiply.
        for place, i in enumerate(sorted(range(len(costs)), key=lambda i: -costs[i])):
            self.owners[i] = place % self.size

    def gather(self, pieces: Mapping[int, Tensor], everywhere: bool) -> dict[int, Tensor]:
        """Of tensors in pieces, those that this process owns (or all of them), whole."""
        me, boxes, every = self.rank, self.boxes, range(self.size)

        def comes_from(i: int, holder: int, reader: int) -> bool:
            """Whether a process gets a piece from this holder: itself, where it has it, otherwise the first that has."""
            if not everywhere and self.owners[i] != reader:
                return False
            box = boxes[i][holder]
            return holder == (reader if boxes[i][reader] == box else boxes[i].index(box))

        sends = [[tensor for i, tensor in pieces.items() if comes_from(i, me, reader)] for reader in every]
        wanted = [[(i, boxes[i][holder]) for i in pieces if comes_from(i, holder, me)] for holder in every]
        out: dict[int, Tensor] = {}
        for i, box, piece in self._route(pieces, sends, wanted):
            if box[1] == self.shapes[i]:
                out[i] = piece
                continue
            if i not in out:
                out[i] = torch.empty(self.shapes[i], dtype=piece.dtype, device=piece.device)
            cut(out[i], box).copy_(piece)
        return {i: out[i] for i in pieces if i in out}

    def from_owners(self, wholes: Mapping[int, Tensor], pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The pieces that this process holds, of tensors that their owners have whole.

        Args:
            wholes: What this process owns.
            pieces: Tensors with the dtypes of all of them.
        """
        me, boxes, owners = self.rank, self.boxes, self.owners
        mine = {i: wholes[i].to(t.dtype) for i, t in pieces.items() if owners[i] == me}
        sends = [[cut(whole, boxes[i][d]) for i, whole in mine.items()] for d in range(self.size)]
        wanted = [[(i, boxes[i][me]) for i in pieces if owners[i] == s] for s in range(self.size)]
        return {i: piece for i, _, piece in self._route(pieces, sends, wanted)}

    def _route(
        self, pieces: Mapping[int, Tensor], sends: list[list[Tensor]], wanted: list[list[tuple[int, Box]]]
    ) -> list[tuple[int, Box, Tensor]]:
        """Send tensors to each process and receive what each sends; backends move bytes of any dtype."""
        found: list[tuple[int, Box, Tensor]] = []
        for dtype in sorted({tensor.dtype for tensor in pieces.values()}, key=str):  # in the same order everywhere
            out = [[t.reshape(-1) for t in held if t.dtype is dtype] for held in sends]
            lists = [[(i, box) for i, box in held if pieces[i].dtype is dtype] for held in wanted]
            counts = [[torch.Size(box[1]).numel() for _, box in held] for held in lists]
            empty = torch.empty(0, dtype=dtype, device=next(iter(pieces.values())).device)
            flat = torch.cat([empty, *(t for held in out for t in held)])
            into = empty.new_empty(sum(map(sum, counts)))
            torch.distributed.all_to_all_single(
                into.view(torch.uint8),
                flat.view(torch.uint8),
                [sum(held) * dtype.itemsize for held in counts],
                [sum(t.numel() for t in held) * dtype.itemsize for held in out],
                group=self.group,
            )
            places = [entry for held in lists for entry in held]
            parts = torch.split(into, [count for held in counts for count in held])
            found += [(i, box, part.view(box[1])) for (i, box), part in zip(places, parts, strict=True)]
        return found
