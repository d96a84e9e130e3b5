"""Members of a population, and populations of some of them, chosen by index or by fitness."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from . import selection
from ._core import Core, Values, allocate
from ._members import build, refuse_moved, row_view, tracks_versions


class Indexing(Core):
    """The methods of a population that read, write and choose members."""

    def __getitem__(self, index: Any) -> Any:
        """Return a member, or a population of some: slices share the storage, masks and lists of indices copy.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear(3, 2), 5)
            >>> type(pop[0]).__name__, len(pop[1:3]), len(pop[torch.tensor([0, 0, 4])])
            ('Linear', 2, 3)
        """
        self._check_members()
        if isinstance(index, slice):
            return self._part(index)
        if hasattr(index, "__index__") and not (isinstance(index, Tensor) and (index.dim() or _is_bool(index))):
            return self._member(operator.index(index))
        return self._take_members(self._indices(index))

    def _member(self, index: int) -> nn.Module:
        place = index + self._count if index < 0 else index
        if not 0 <= place < self._count:
            raise IndexError(f"member {index} of a population of {self._count}")
        live = self._members.get(place)
        if live is not None:
            return live
        shared = tracks_versions(self.template)
        with torch.no_grad(), torch.inference_mode(False):
            matrices = self._values.matrices
            parameters: list[Any] = []
            for number, (entry, flag) in enumerate(zip(self.layout, self._flags, strict=True)):
                if shared:
                    part = matrices[entry.group][place].narrow(0, entry.offset, entry.numel).view(entry.shape)
                else:
                    part = row_view(matrices[entry.group], place, entry.offset, entry.shape)
                leaf = self._members.leaves.get((place, number))
                if leaf is not None and (leaf.data_ptr(), leaf.dtype) != (part.data_ptr(), part.dtype):
                    refuse_moved(place, leaf)
                parameters.append(nn.Parameter(part, requires_grad=flag) if leaf is None else leaf)
            buffers = {
                name: row_view(
                    buffer.view(self._count, -1) if buffer.numel() else buffer.reshape(self._count, 0),
                    place,
                    0,
                    buffer.shape[1:],
                )
                for name, buffer in self._buffers.items()
            }
            member = build(self.template, self._evaluator.entries, parameters, buffers)
        self._members.add(place, member, parameters, list(buffers.values()))
        return member

    def _part(self, index: slice) -> Self:
        start, stop, step = index.indices(self._count)
        if step < 0:
            return self._take_members(torch.arange(self._count)[list(range(start, stop, step))])
        with torch.no_grad(), torch.inference_mode(False):
            values = Values([matrix[start:stop:step] for matrix in self._values.matrices])
            buffers = {name: buffer[start:stop:step] for name, buffer in self._buffers.items()}
        part = self._make_alike(values, len(range(start, stop, step)), buffers)
        part._parent = self
        return part

    def _take_members(self, index: Tensor) -> Self:
        """Return a population of copies of members."""
        with torch.no_grad(), torch.inference_mode(False):
            values = allocate(self.layout, len(index))
            for out, matrix in zip(values.matrices, self._values.matrices, strict=True):
                torch.index_select(matrix, 0, index.to(matrix.device), out=out)
            buffers = {name: buffer.index_select(0, index.to(buffer.device)) for name, buffer in self._buffers.items()}
        copies = self._make_alike(values, len(index), buffers)
        copies._shard = None  # chosen members are no longer a range of all members
        return copies

    def _indices(self, index: Any) -> Tensor:
        """Return the indices of members that a mask, a list or a tensor of integers selects."""
        try:
            chosen = index if isinstance(index, Tensor) else torch.as_tensor(index)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"members are chosen by an index, a slice, a mask or indices, not by {index!r}") from None
        if chosen.numel() == 0 and not _is_bool(chosen):
            chosen = chosen.to(torch.int64).reshape(-1)
        if _is_bool(chosen):
            if chosen.shape != (self._count,):
                raise IndexError(f"a mask of shape {tuple(chosen.shape)} for a population of {self._count}")
            return chosen.nonzero().reshape(-1)
        if chosen.dtype.is_floating_point or chosen.dtype.is_complex or chosen.dim() != 1:
            raise TypeError(
                f"members are chosen by a vector of integers, not by {chosen.dtype} of shape {tuple(chosen.shape)}"
            )
        chosen = chosen.to(torch.int64)
        wrong = chosen[(chosen < -self._count) | (chosen >= self._count)]
        if wrong.numel():
            raise IndexError(f"member {int(wrong[0])} of a population of {self._count}")
        return torch.where(chosen < 0, chosen + self._count, chosen)

    def __iter__(self) -> Iterator[nn.Module]:
        for index in range(self._count):
            yield self[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write members: `pop[i] = module`, `pop[indices] = population`.

        Example:
            >>> from moduli.population import Population
            >>> pop, net = Population.of(nn.Linear(3, 2), 5), nn.Linear(3, 2)
            >>> pop[2] = net
            >>> torch.equal(pop[2].weight, net.weight)
            True
        """
        if isinstance(index, int):
            index = [index]
        elif isinstance(index, slice):
            index = torch.arange(self._count)[index]
        whole: Any = self
        whole.replace(index, value)

    # -- by fitness --------------------------------------------------------------------------------------------------

    def sort(self, fitness: Tensor, maximize: bool = False) -> Self:
        """Return all members, best first.

        Args:
            fitness: One number per member; lower is better.
            maximize: Whether higher is better.

        Raises:
            ValueError: If there is not one number per member.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear, 3, 1, 1)
            >>> torch.equal(pop.sort(torch.tensor([3.0, 1.0, 2.0]))[0].weight, pop[1].weight)
            True
        """
        self._rank(fitness)
        return self._take_members(selection.order(fitness, maximize))

    def top(self, fitness: Tensor, k: int, maximize: bool = False) -> Self:
        """Return the `k` best members, best first.

        Args:
            fitness: One number per member; lower is better.
            k: How many.
            maximize: Whether higher is better.

        Example:
            >>> from moduli.population import Population
            >>> len(Population.of(nn.Linear, 3, 1, 1).top(torch.tensor([3.0, 1.0, 2.0]), 2))
            2
        """
        self._rank(fitness)
        return self._take_members(selection.top(fitness, k, maximize))

    def tournament(
        self,
        fitness: Tensor,
        k: int | None = None,
        size: int = 2,
        maximize: bool = False,
        generator: torch.Generator | None = None,
    ) -> Self:
        """Return the winners of `k` tournaments, by default as many as there are members.

        Args:
            fitness: One number per member; lower is better.
            k: The number of tournaments.
            size: How many members take part in each.
            maximize: Whether higher is better.
            generator: Where the randomness comes from; torch's own by default.

        Example:
            >>> from moduli.population import Population
            >>> len(Population.of(nn.Linear, 3, 1, 1).tournament(torch.tensor([3.0, 1.0, 2.0]), 7))
            7
        """
        self._rank(fitness)
        return self._take_members(
            selection.tournament(fitness, self._count if k is None else k, size, maximize, generator)
        )

    def roulette(
        self,
        fitness: Tensor,
        k: int | None = None,
        maximize: bool = False,
        generator: torch.Generator | None = None,
    ) -> Self:
        """Return `k` members drawn with probabilities proportional to how much better than the worst they are.

        Args:
            fitness: One number per member; lower is better.
            k: The number of members; by default as many as there are.
            maximize: Whether higher is better.
            generator: Where the randomness comes from; torch's own by default.

        Example:
            >>> from moduli.population import Population
            >>> len(Population.of(nn.Linear, 3, 1, 1).roulette(torch.tensor([3.0, 1.0, 2.0])))
            3
        """
        self._rank(fitness)
        return self._take_members(selection.roulette(fitness, self._count if k is None else k, maximize, generator))

    def _rank(self, fitness: Tensor) -> None:
        """Raise if the fitness has the wrong shape, or other processes hold some of the members."""
        self._refuse_shard("a choice by fitness")
        self._fits(fitness)

    def _fits(self, numbers: Any, what: str = "fitness") -> None:
        self._check_members()
        shape = tuple(numbers.shape) if isinstance(numbers, Tensor) else None
        if shape != (self._count,):
            got = f"shape {shape}" if shape is not None else f"a {type(numbers).__name__}"
            raise ValueError(f"{what} is a tensor of one number for each of {self._count} members; got {got}")


def _is_bool(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)
