"""Variation: mutation, crossover, replacement and migration of members.

Every method is a fixed number of operations on whole matrices. Noise depends only on a member's seed and a position in it (see
`_noise`), so children do not depend on the size of chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from moduli.layout import Guard
from moduli.particles import StructureError

from . import selection
from ._arithmetic import check_count, match
from ._core import Values, allocate
from ._indexing import Indexing
from ._noise import draw_fractions, find_places, normal, seeds, uniform

_KINDS = ("uniform", "one_point", "layer", "arithmetic")


class Variation(Indexing):
    """The methods of a population that make new members and exchange them."""

    # -- variation ---------------------------------------------------------------------------------------------------

    def seeds(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw one seed per member, for `mutate`, `crossover`, `rand` and `randn`.

        The noise of a member depends on its seed alone: a part of the population with its part of the seeds has the same
        children as in the whole population.

        Args:
            generator: Where they come from; torch's own by default.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear, 6, 3, 2)
            >>> seeds = pop.seeds(torch.Generator().manual_seed(0))
            >>> whole, part = pop.mutate(seeds=seeds), pop[2:4].mutate(seeds=seeds[2:4])
            >>> torch.equal(whole.matrix[2:4], part.matrix)
            True
        """
        shard = self._shard
        # Every process of a sharded population draws the seeds of all members, and uses its own.
        return seeds(self._count, generator) if shard is None else shard.own(seeds(shard.total, generator))

    def rand(self, scale: float | Tensor = 1.0, generator: Any = None, seeds: Tensor | None = None) -> Self:
        """Return a population of values drawn uniformly from [0, scale).

        Args:
            scale: One number, or one per member.
            generator: Where the seeds come from; torch's own by default.
            seeds: One seed per member, instead of a generator.

        Example:
            >>> from moduli.population import Population
            >>> bool((Population.of(nn.Linear, 6, 3, 2).rand(0.5).matrix < 0.5).all())
            True
        """
        return self._draw_around(uniform, scale, generator, seeds)

    def randn(self, scale: float | Tensor = 1.0, generator: Any = None, seeds: Tensor | None = None) -> Self:
        """Return a population of values drawn from a normal distribution of mean 0.

        Args:
            scale: The standard deviation; one number, or one per member.
            generator: Where the seeds come from; torch's own by default.
            seeds: One seed per member, instead of a generator.

        Example:
            >>> from moduli.population import Population
            >>> Population.of(nn.Linear, 6, 3, 2).randn(0.0).matrix.abs().sum().item()
            0.0
        """
        return self._draw_around(normal, scale, generator, seeds)

    def mutate(
        self,
        rate: float | Tensor = 1.0,
        scale: float | Tensor = 0.1,
        generator: torch.Generator | None = None,
        seeds: Tensor | None = None,
        chunk_size: int | None = None,
    ) -> Self:
        r"""Return children with normal noise: each value changes with probability `rate`, by $\mathcal N(0, scale^2)$.

        Frozen parameters and integers keep their values.

        Args:
            rate: The probability; one number, or one per member.
            scale: The standard deviation; one number, or one per member.
            generator: Where the seeds come from; torch's own by default.
            seeds: One seed per member, instead of a generator.
            chunk_size: The most members at a time, to bound memory. The children do not depend on it.

        Raises:
            ValueError: If the rate is no probability, or the scale is negative.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear(3, 2), 5)
            >>> torch.equal(pop.mutate(rate=0.0).matrix, pop.matrix)
            True
        """
        self._check_members()
        low, high = _bounds(rate)
        if low < 0.0 or high > 1.0:
            raise ValueError(f"the rate of mutation is a probability; got {rate}")
        if _bounds(scale)[0] < 0.0:
            raise ValueError(f"the scale of mutation is a standard deviation, which is not negative; got {scale}")
        keys = self._keys(generator, seeds)
        if isinstance(rate, Tensor):
            self._fits(rate, "rate")
        if isinstance(scale, Tensor):
            self._fits(scale, "scale")
        values = allocate(self.layout, self._count)
        with torch.no_grad(), torch.inference_mode(False):
            for start, stop in _chunks(self._count, chunk_size):
                some = slice(start, stop)
                limit = None if low == 1.0 else rate[some].reshape(-1, 1) if isinstance(rate, Tensor) else rate
                steps = self._draw_steps(keys[some], scale[some] if isinstance(scale, Tensor) else scale, limit)
                for out, matrix, step in zip(values.matrices, self._values.matrices, steps, strict=True):
                    if step is None:
                        out[some].copy_(matrix[some])
                    else:
                        torch.add(matrix[some], step, out=out[some])
            self._restore(values, self._inert() | {place for place, flag in enumerate(self._flags) if not flag})
        return self._make_alike(values, self._count, self._copy_buffers())

    def _draw_steps(self, keys: Tensor, scale: float | Tensor, limit: float | Tensor | None) -> Iterator[Tensor | None]:
        """Iterate over the noise of each group, zero where a uniform number is not below `limit`; None for integers."""
        noise = normal(self.layout, keys, scale)
        chances = [None] * len(noise) if limit is None else uniform(self.layout, keys, stream=1)
        for group, step, chance in zip(self.layout.groups, noise, chances, strict=True):
            if not (group.dtype.is_floating_point or group.dtype.is_complex):
                yield None
                continue
            if chance is not None and limit is not None:
                at = limit.to(group.device) if isinstance(limit, Tensor) else limit
                step.masked_fill_(chance.real >= at if chance.is_complex() else chance >= at, 0.0)
            yield step

    def crossover(
        self,
        other: Self,
        kind: str = "uniform",
        rate: float = 0.5,
        generator: torch.Generator | None = None,
        seeds: Tensor | None = None,
    ) -> Self:
        """Return children of two populations, member by member; labels are aligned by name.

        Args:
            other: The second parents, as many as there are members.
            kind: `"uniform"`: each value is the second parent's with probability `rate`; `"layer"`: the direct parameters and
                buffers of each module are, together; `"one_point"`: all values behind a random position are;
                `"arithmetic"`: a random mean of both, with a weight in [0, 2 rate] for the second, one per member.
            rate: The probability or half the largest weight of the second parent, see `kind`.
            generator: Where the seeds come from; torch's own by default.
            seeds: One seed per member, instead of a generator.

        Raises:
            StructureError: If the parents differ in structure or number.
            ValueError: If the kind is unknown, or the rate is no probability.

        Example:
            >>> from moduli.population import Population
            >>> a, b = Population.of(nn.Linear, 4, 3, 2), Population.of(nn.Linear, 4, 3, 2)
            >>> child = a.crossover(b, "layer")
            >>> bool(((child.matrix == a.matrix) | (child.matrix == b.matrix)).all())
            True
        """
        if kind not in _KINDS:
            raise ValueError(f"crossover of the kind {kind!r}; choose from {', '.join(_KINDS)}")
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"the rate of crossover is a probability; got {rate}")
        self._check_members()
        if not isinstance(other, Indexing):
            raise TypeError(f"the second parents are a Population, not a {type(other).__name__}")
        check_count(self, other)
        second, second_buffers = match(self, other)
        keys = self._keys(generator, seeds)
        values = allocate(self.layout, self._count)
        buffers = self._copy_buffers()
        with torch.no_grad(), torch.inference_mode(False):
            masks, weight, from_second = self._masks(kind, rate, keys)
            for index, out in enumerate(values.matrices):
                ours, theirs = self._values.matrices[index], second[index]
                if weight is not None and (ours.is_floating_point() or ours.is_complex()):
                    torch.lerp(ours, theirs, weight.to(ours.device, ours.dtype).reshape(-1, 1), out=out)
                elif weight is not None:
                    out.copy_(ours)
                else:
                    torch.where(masks[index], theirs, ours, out=out)
            for name, chosen in from_second.items():
                buffer = buffers[name]
                pick = chosen.to(buffer.device).reshape(-1, *[1] * (buffer.dim() - 1))
                buffers[name] = torch.where(pick, second_buffers[name], buffer)
        return self._make_alike(values, self._count, buffers)

    def replace(self, index: Any, source: Any) -> None:
        """Copy other values and buffers into some members, in place.

        Args:
            index: The members: indices, each once, or a mask.
            source: A population of as many members, or one module for all of them.

        Raises:
            StructureError: If the structure or number differs.
            ValueError: If an index occurs twice.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear, 4, 3, 2)
            >>> storage = pop.matrix.data_ptr()
            >>> pop.replace([0, 1], pop[2:])
            >>> torch.equal(pop.matrix[0], pop.matrix[2]), pop.matrix.data_ptr() == storage
            (True, True)
        """
        with Guard(deferred=True, grad=False):
            self._replace(index, source)

    def _replace(self, index: Any, source: Any) -> None:
        self._check_members()
        places = self._indices(index)
        if len(places) != len(torch.unique(places)):
            raise ValueError("a member is replaced twice; give every index once")
        if isinstance(source, Indexing):
            if len(source) != len(places):
                raise StructureError(f"{len(places)} members cannot be replaced by {len(source)}")
            matrices, theirs = match(self, source)
            parts: list[Tensor] = [matrix.detach().clone() for matrix in matrices]
            buffers = {name: buffer.clone() for name, buffer in theirs.items()}
        elif isinstance(source, nn.Module):
            matrices, theirs = match(self, source)
            parts = [row.expand(len(places), -1) for row in matrices]
            buffers = {name: buffer.detach().expand(len(places), *buffer.shape) for name, buffer in theirs.items()}
        else:
            raise TypeError(f"members are replaced by a Population or a module, not by a {type(source).__name__}")
        shapes = [{name: buffer.shape[1:] for name, buffer in each.items()} for each in (self._buffers, buffers)]
        if shapes[0] != shapes[1]:
            name = dict(shapes[0].items() ^ shapes[1].items()).popitem()[0]
            raise StructureError(f"buffer {name!r} differs between the members and the source, or only one has it")
        for matrix, part in zip(self._values.matrices, parts, strict=True):
            matrix.index_copy_(0, places.to(matrix.device), part)
        for name, own in self._buffers.items():
            own.index_copy_(0, places.to(own.device), buffers[name].to(own.dtype))
        self._mark_changed()

    def migrate(self, fitness: Tensor, islands: int, count: int = 1, maximize: bool = False) -> Tensor:
        """Replace the worst members of each island by the best of the one before, around a ring, in place.

        The population is divided into `islands` of equal size, one after the other.

        Args:
            fitness: One number per member; lower is better.
            islands: The number of islands.
            count: How many members leave each island.
            maximize: Whether higher is better.

        Returns:
            For each member the index of the member whose values it now has, which is its own for those that stayed.

        Raises:
            ValueError: If the population cannot be divided so, or more members would leave than an island has.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear, 4, 3, 2)
            >>> pop.migrate(torch.tensor([1.0, 2.0, 3.0, 4.0]), islands=2)
            tensor([0, 2, 2, 0])

        References:
            R. Tanese, *Distributed genetic algorithms*, ICGA 1989.
        """
        self._rank(fitness)
        if islands < 1 or self._count % islands:
            raise ValueError(f"{self._count} members cannot be divided into {islands} islands of equal size")
        size = self._count // islands
        if not 0 <= count <= size:
            raise ValueError(f"{count} members cannot leave an island of {size}")
        # Sort by ranks, so that NaN comes last on its island too.
        rank = torch.empty(self._count, dtype=torch.int64, device=fitness.device)
        rank[selection.order(fitness, maximize)] = torch.arange(self._count, device=fitness.device)
        order = rank.reshape(islands, size).argsort(1) + torch.arange(islands, device=rank.device)[:, None] * size
        source = torch.arange(self._count, device=rank.device)
        if count and islands > 1:
            source[order[:, size - count :].reshape(-1)] = order[:, :count].roll(1, 0).reshape(-1)
            moved = (source != torch.arange(self._count, device=rank.device)).nonzero().reshape(-1)
            self.replace(moved, self._take_members(source[moved]))
        return source

    # -- inside ------------------------------------------------------------------------------------------------------

    def _keys(self, generator: torch.Generator | None, given: Tensor | None) -> Tensor:
        if given is None:
            return self.seeds(generator)
        if generator is not None:
            raise ValueError("give a generator or seeds, not both")
        if not isinstance(given, Tensor) or given.shape != (self._count,) or given.dtype != torch.int64:
            raise ValueError(f"seeds are one int64 for each of {self._count} members, as pop.seeds() makes them")
        return given

    def _draw_around(self, draw: Any, scale: Any, generator: Any, given: Tensor | None) -> Self:
        self._check_members()
        if isinstance(scale, Tensor) and scale.dim():
            self._fits(scale, "scale")
        for group in self.layout.groups:
            if not (group.dtype.is_floating_point or group.dtype.is_complex or self._left_out(group)):
                name = self.layout.entries[group.indices[0]].name
                raise TypeError(
                    f"{name!r} holds {group.dtype}, for which nothing can be drawn; leave it out with "
                    f"pop.template.set_param_config(operational=False, name={name!r})"
                )
        with torch.no_grad(), torch.inference_mode(False):
            values = Values(draw(self.layout, self._keys(generator, given), scale))
            self._restore(values, self._inert())
            buffers = self._copy_buffers()
        return self._make_alike(values, self._count, buffers)

    def _masks(self, kind: str, rate: float, keys: Tensor) -> tuple[list[Tensor], Tensor | None, dict[str, Tensor]]:
        """Return where values come from the second parent: a mask per group, or a weight per member, and masks of buffers."""
        layout = self.layout
        if kind == "uniform":
            return [chance.real < rate for chance in uniform(layout, keys)], None, {}
        if kind == "arithmetic":
            return [], draw_fractions(keys, 1)[:, 0] * (2.0 * rate), {}
        if kind == "one_point":
            cut = (draw_fractions(keys, 1)[:, :1] * (layout.numel + 1)).floor()
            cuts = [(group, cut.to(group.device)) for group in layout.groups]
            return [find_places(layout, group.indices, group.device) >= at for group, at in cuts], None, {}
        owners = list(dict.fromkeys(e.name.rpartition(".")[0] for e in layout))
        number = {owner: place for place, owner in enumerate(owners)}
        chosen = draw_fractions(keys, max(len(owners), 1)) < rate
        masks = []
        for group in layout.groups:
            entries = [layout.entries[i] for i in group.indices]
            column = torch.cat([torch.full((e.numel,), number[e.name.rpartition(".")[0]]) for e in entries])
            masks.append(chosen[:, column].to(group.device))
        from_second = {}
        for name in self._buffers:
            owner = name.rpartition(".")[0]
            if owner in number:
                from_second[name] = chosen[:, number[owner]]
        return masks, None, from_second


def _bounds(value: float | Tensor) -> tuple[float, float]:
    if isinstance(value, Tensor):
        return (float(value.amin()), float(value.amax())) if value.numel() else (1.0, 1.0)
    return float(value), float(value)


def _chunks(count: int, size: int | None) -> list[tuple[int, int]]:
    if size is not None and size < 1:
        raise ValueError(f"chunk_size is a positive number of members, not {size!r}")
    step = size or max(count, 1)
    return [(start, min(count, start + step)) for start in range(0, count, step)]
