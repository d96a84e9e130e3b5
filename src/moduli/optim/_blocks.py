"""Parameters of a population that move as one matrix, and what a link keeps for them seen as that of one parameter."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..layout import map_tensors
from ._state import ParamState


class Block:
    """Parameters that move as one matrix.

    Attributes:
        tensor: The matrix, N x P; its `grad` is their gradient, of which leaves show the columns as theirs.
        leaves: The population's leaves that its columns belong to, in order.
        sizes: How many columns each has.
        group: Which matrix of the population they are in.
        whole: Whether it is that matrix itself.
        reduced: The version of the gradient that is that of all processes, where several train the same members.
    """

    __slots__ = ("group", "leaves", "reduced", "sizes", "tensor", "whole")

    def __init__(self, leaves: list[Tensor], group: int) -> None:
        self.leaves = leaves
        self.sizes = [leaf.shape[1:].numel() for leaf in leaves]
        self.group = group
        self.whole = False
        self.reduced: int | None = None
        self.tensor = torch.nn.Parameter(
            torch.empty(0, dtype=leaves[0].dtype, device=leaves[0].device), requires_grad=leaves[0].requires_grad
        )

    def is_in_order(self) -> bool:
        """Whether the columns are those of the storage, in its order."""
        places = [leaf.storage_offset() for leaf in self.leaves]
        return places == sorted(places)

    def split(self, matrix: Tensor) -> list[Tensor]:
        """The columns of each leaf, as a view in the leaf's shape."""
        return [
            part.view(leaf.shape) for part, leaf in zip(torch.split(matrix, self.sizes, 1), self.leaves, strict=True)
        ]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """One matrix of tensors in the leaves' shapes."""
        count = len(self.leaves[0])
        rows = [part.reshape(count, size) for part, size in zip(parts, self.sizes, strict=True)]
        return torch.cat(rows, 1) if len(rows) > 1 else rows[0].contiguous()

    def gather(self) -> Tensor | None:
        """The gradient of all columns, from those of the leaves; None where no leaf has one."""
        found = [leaf.grad for leaf in self.leaves]
        whole = self.tensor.grad
        if whole is not None and all(grad is not None and grad._base is whole for grad in found):
            return whole  # they are its columns: what was added to them, or zeroed, is there already
        if all(grad is None for grad in found):
            return None
        return self.join(
            [
                torch.zeros_like(leaf) if grad is None else grad if grad.layout is torch.strided else grad.to_dense()
                for leaf, grad in zip(self.leaves, found, strict=True)
            ]
        )

    # ------------------------------------------------------------------ what links keep

    def column(self, value: Any, i: int) -> Any:
        """What a value of a link's state says about one leaf."""
        start, size, shape = sum(self.sizes[:i]), self.sizes[i], self.leaves[i].shape

        def narrow(tensor: Tensor) -> Tensor:
            if tensor.dim() < 2 or tensor.shape[1] != sum(self.sizes):
                return tensor
            return tensor.narrow(1, start, size).view(*shape, *tensor.shape[2:])

        return map_tensors(value, narrow)

    def find(self, store: Any, i: int) -> ParamState | None:
        """What a link keeps for the whole block as that of one leaf; what is written goes to the block."""
        return ColumnState(store[self.tensor], self, i) if self.tensor in store else None

    def join_values(self, values: Sequence[Any]) -> Any:
        """The value of which these are the columns."""
        first = values[0]
        if isinstance(first, Tensor):
            shapes = [leaf.shape for leaf in self.leaves]
            if all(value.shape[: len(s)] == s for value, s in zip(values, shapes, strict=True)):
                count = len(self.leaves[0])
                rest = first.shape[len(shapes[0]) :]
                return torch.cat([v.reshape(count, n, *rest) for v, n in zip(values, self.sizes, strict=True)], 1)
            return first
        if isinstance(first, list | tuple | deque):
            made = [self.join_values(items) for items in zip(*values, strict=True)]
            return deque(made, maxlen=first.maxlen) if isinstance(first, deque) else type(first)(made)
        if isinstance(first, dict):
            return {key: self.join_values([value[key] for value in values]) for key in first}
        return first


class ColumnState(ParamState):
    """What a link keeps for one parameter of a population: columns of what it keeps for the whole matrix."""

    __slots__ = ()

    def __init__(self, row: ParamState, block: Block, place: int) -> None:
        super().__init__(row._changes, {key: block.column(value, place) for key, value in row.items()})

    def __setitem__(self, key: str, value: Any) -> None:
        held = self.get(key)
        if not isinstance(held, Tensor) or not isinstance(value, Tensor) or held.shape != value.shape:
            raise TypeError(
                f"{key!r} of one parameter of a population is a column of what is kept for all of them; write a tensor of "
                f"the same shape, or set it for all with link.state[objective.params[0]]"
            )
        held.copy_(value)


def copy_columns(value: Any) -> Any:
    """Columns as tensors of their own."""
    return map_tensors(value, Tensor.contiguous)


def describe_row(row: Any) -> Any:
    """What states have to have in common to be columns of one."""
    if isinstance(row, Tensor):
        return ("tensor", row.dtype)
    if isinstance(row, dict):
        return tuple((key, describe_row(value)) for key, value in sorted(row.items()))
    if isinstance(row, list | tuple | deque):
        return (type(row).__name__, *[describe_row(item) for item in row])
    return row if isinstance(row, int | float | str | bool | None) else id(row)
