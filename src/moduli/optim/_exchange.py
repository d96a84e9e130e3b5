"""Pieces of tensors that several processes hold, and the collectives that put them together and take them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layout import Box, cut


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
        self.owners = self._share_out()

    def _share_out(self) -> list[int]:
        """An owner for each tensor, so that each process has about as much to multiply."""
        loads = [0.0] * self.size
        owners = [0] * len(self.shapes)
        costs = [float(torch.Size(shape).numel()) * min(shape, default=1) for shape in self.shapes]
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            owners[i] = loads.index(min(loads))
            loads[owners[i]] += max(costs[i], 1.0)
        return owners

    def find_source(self, i: int, box: Box, wanted_by: int) -> int:
        """The process that sends a piece: the one that wants it, where it has it, otherwise the holders in turn."""
        held = self.boxes[i]
        if held[wanted_by] == box:
            return wanted_by
        holders = [rank for rank, other in enumerate(held) if other == box]
        return holders[i % len(holders)]

    def to_owners(self, pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Of tensors in pieces, those that this process owns, whole."""
        me, boxes, owners = self.rank, self.boxes, self.owners
        sends = [
            [t for i, t in pieces.items() if owners[i] == d and self.find_source(i, boxes[i][me], d) == me]
            for d in range(self.size)
        ]
        wanted = [
            [(i, boxes[i][s]) for i in pieces if owners[i] == me and self.find_source(i, boxes[i][s], me) == s]
            for s in range(self.size)
        ]
        return self._assemble(pieces, self._route(pieces, sends, wanted))

    def from_owners(self, wholes: Mapping[int, Tensor], pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The pieces that this process holds, of tensors that their owners have whole.

        Args:
            wholes: What this process owns.
            pieces: Tensors with the dtypes of all of them.
        """
        me, boxes, owners = self.rank, self.boxes, self.owners
        sends = [
            [cut(wholes[i], boxes[i][d]).to(t.dtype) for i, t in pieces.items() if owners[i] == me]
            for d in range(self.size)
        ]
        wanted = [[(i, boxes[i][me]) for i in pieces if owners[i] == s] for s in range(self.size)]
        return {i: piece for i, _, piece in self._route(pieces, sends, wanted)}

    def to_all(self, pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """All tensors whole, in every process."""
        boxes = self.boxes
        given = [[(i, boxes[i][s]) for i in pieces if boxes[i].index(boxes[i][s]) == s] for s in range(self.size)]
        own = [pieces[i] for i, _ in given[self.rank]]
        return self._assemble(pieces, self._route(pieces, [own] * self.size, given))

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

    def _assemble(self, pieces: Mapping[int, Tensor], found: Sequence[tuple[int, Box, Tensor]]) -> dict[int, Tensor]:
        out: dict[int, Tensor] = {}
        for i, box, piece in found:
            if box[1] == self.shapes[i]:
                out[i] = piece
                continue
            if i not in out:
                out[i] = torch.empty(self.shapes[i], dtype=piece.dtype, device=piece.device)
            cut(out[i], box).copy_(piece)
        return {i: out[i] for i in pieces if i in out}
