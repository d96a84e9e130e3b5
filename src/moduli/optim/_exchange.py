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
            [(i, t) for i, t in pieces.items() if owners[i] == d and self.find_source(i, boxes[i][me], d) == me]
            for d in range(self.size)
        ]
        wanted = [
            [
                (i, boxes[i][s], t.dtype)
                for i, t in pieces.items()
                if owners[i] == me and self.find_source(i, boxes[i][s], me) == s
            ]
            for s in range(self.size)
        ]
        return self._assemble(pieces, self._route(_kinds(pieces), sends, wanted))

    def from_owners(self, wholes: Mapping[int, Tensor], pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The pieces that this process holds, of tensors that their owners have whole.

        Args:
            wholes: What this process owns.
            pieces: Tensors with the dtypes of all of them.
        """
        me, boxes, owners = self.rank, self.boxes, self.owners
        sends = [
            [(i, cut(wholes[i], boxes[i][d]).to(t.dtype)) for i, t in pieces.items() if owners[i] == me and d != me]
            for d in range(self.size)
        ]
        wanted = [
            [(i, boxes[i][me], t.dtype) for i, t in pieces.items() if owners[i] == s and s != me]
            for s in range(self.size)
        ]
        found = {i: cut(wholes[i], boxes[i][me]).to(t.dtype).contiguous() for i, t in pieces.items() if owners[i] == me}
        found.update({i: piece for i, _, piece in self._route(_kinds(pieces), sends, wanted)})
        return found

    def to_all(self, pieces: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """All tensors whole, in every process."""
        boxes = self.boxes
        given = [
            [(i, boxes[i][s], t.dtype) for i, t in pieces.items() if boxes[i].index(boxes[i][s]) == s]
            for s in range(self.size)
        ]
        found: list[tuple[int, Box, Tensor]] = []
        for dtype in _kinds(pieces):
            sizes = [sum(_count(box) for _, box, kind in held if kind is dtype) for held in given]
            own = _join([pieces[i] for i, _, kind in given[self.rank] if kind is dtype], dtype, max(sizes))
            every = [torch.empty_like(own) for _ in range(self.size)]
            torch.distributed.all_gather([_bytes(t) for t in every], _bytes(own), group=self.group)
            for s in range(self.size):
                found += _split(every[s], [entry for entry in given[s] if entry[2] is dtype])
        return self._assemble(pieces, found)

    def _route(
        self,
        kinds: list[torch.dtype],
        sends: list[list[tuple[int, Tensor]]],
        wanted: list[list[tuple[int, Box, torch.dtype]]],
    ) -> list[tuple[int, Box, Tensor]]:
        """Send tensors to each process and receive what each sends."""
        found: list[tuple[int, Box, Tensor]] = []
        for dtype in kinds:
            width = dtype.itemsize
            out = [[t for _, t in held if t.dtype is dtype] for held in sends]
            sizes = [sum(t.numel() for t in held) * width for held in out]
            lists = [[entry for entry in held if entry[2] is dtype] for held in wanted]
            expected = [sum(_count(box) for _, box, _ in held) * width for held in lists]
            flat = _join([t for held in out for t in held], dtype, sum(sizes) // width)
            into = torch.empty(sum(expected) // width, dtype=dtype, device=flat.device)
            torch.distributed.all_to_all_single(_bytes(into), _bytes(flat), expected, sizes, group=self.group)
            found += _split(into, [entry for held in lists for entry in held])
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


def _count(box: Box) -> int:
    return torch.Size(box[1]).numel()


def _kinds(pieces: Mapping[int, Tensor]) -> list[torch.dtype]:
    """The dtypes, in an order that all processes agree on."""
    return sorted({tensor.dtype for tensor in pieces.values()}, key=str)


def _bytes(tensor: Tensor) -> Tensor:
    """Backends move bytes of any dtype."""
    return tensor.view(torch.uint8)


def _join(tensors: Sequence[Tensor], dtype: torch.dtype, size: int) -> Tensor:
    """One vector of this many elements, the last ones unused."""
    device = tensors[0].device if tensors else None
    out = torch.empty(size, dtype=dtype, device=device)
    if tensors:
        count = sum(tensor.numel() for tensor in tensors)
        torch.cat([tensor.reshape(-1) for tensor in tensors], out=out[:count])
    return out


def _split(flat: Tensor, entries: Sequence[tuple[int, Box, Any]]) -> list[tuple[int, Box, Tensor]]:
    out, place = [], 0
    for i, box, _ in entries:
        count = _count(box)
        out.append((i, box, flat[place : place + count].view(box[1])))
        place += count
    return out
