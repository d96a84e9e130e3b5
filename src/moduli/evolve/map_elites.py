"""MAP-Elites: an archive of the best member in each cell of a grid over descriptors of members.

References:
    Mouret and Clune, Illuminating search spaces by mapping elites (2015), arXiv:1504.04909; Vassiliades and Mouret, Discovering the
    elite hypervolume by leveraging interspecies correlation, GECCO 2018, for the variation along the line between two elites.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._figures import make_axes
from ._noise import key
from ._problem import Bounds, Coordinates, check_sigma, clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class MAPElites:
    """A search that stores the best member of each cell of a grid over descriptors, which the user measures.

    One generation is `x = search.ask()`, `search.tell(fitness, descriptors)`. Children are elites plus noise, plus a step along
    the line to another elite.

    Args:
        x0: The start: the first members are drawn around it.
        ranges: (low, high) of each descriptor; values outside belong to the cell at that end.
        cells: The number of cells along each descriptor: a number, or one for each.
        population: The number of members of a generation.
        sigma: The standard deviation of the noise, and of the first members around x0.
        line: The standard deviation of the step along the line to another elite, relative to their distance.
        bounds: (lower, upper), numbers or tensors.
        seed: Decides every random number.

    Example:
        >>> import torch
        >>> from moduli.evolve import MAPElites
        >>> search = MAPElites(torch.zeros(4), ranges=[(-1.0, 1.0), (-1.0, 1.0)], cells=10, bounds=(-1.0, 1.0), sigma=0.2)
        >>> for _ in range(60):
        ...     x = search.ask()
        ...     search.tell(x.square().sum(1), x[:, :2])
        >>> search.coverage > 0.9, bool(search.best.abs().max() < 0.2)
        (True, True)
    """

    def __init__(
        self,
        x0: Tensor,
        *,
        ranges: Sequence[tuple[float, float]],
        cells: int | Sequence[int] = 20,
        population: int = 64,
        sigma: float = 0.1,
        line: float = 0.2,
        bounds: Bounds | None = None,
        seed: int = 0,
    ) -> None:
        check_sigma(sigma)
        counts = (cells,) * len(ranges) if isinstance(cells, int) else tuple(cells)
        if len(counts) != len(ranges) or not ranges or any(not low < high for low, high in ranges) or min(counts) < 1:
            raise ValueError(
                f"each descriptor has a range from low to high and a number of cells; got {ranges} and {cells}"
            )
        if x0.dim() != 1 or not x0.is_floating_point() or population < 1:
            raise ValueError("MAPElites starts from a vector of floating-point numbers, with at least one member")
        self.ranges, self.cells, self.sigma, self.line = [tuple(each) for each in ranges], counts, sigma, line
        self.coordinates = Coordinates(x0.numel(), x0.dtype, x0.device, bounds, None, None)
        self._generator = torch.Generator(x0.device)
        size = math.prod(counts)
        self.state: dict[str, Any] = {
            "seed": int(seed), "generation": 0, "evaluations": 0, "population": population,
            "start": x0.detach().clamp(self.coordinates.lower, self.coordinates.upper),
            "x": x0.new_zeros(size, x0.numel()),
            "fitness": torch.full((size,), torch.inf, dtype=torch.float64, device=x0.device),
        }  # fmt: skip

    @torch.no_grad()
    def ask(self) -> Tensor:
        """Return the members to evaluate, one per row."""
        state, n = self.state, self.state["population"]
        generator = self._generator.manual_seed(key(state["seed"], state["generation"]))
        start = state["start"]
        noise = torch.randn(n, len(start) + 1, generator=generator, dtype=start.dtype, device=start.device)
        filled = state["fitness"].isfinite().nonzero()[:, 0]
        base = start.expand(n, -1)
        if len(filled):
            chosen = torch.randint(len(filled), (2, n), generator=generator, device=start.device)
            one, two = state["x"][filled[chosen[0]]], state["x"][filled[chosen[1]]]
            base = one + self.line * noise[:, -1:] * (two - one)
        children: Tensor = base + self.sigma * noise[:, :-1]
        return children.clamp(self.coordinates.lower, self.coordinates.upper)

    @torch.no_grad()
    def tell(self, fitness: Any, descriptors: Any) -> None:
        """Take the fitness and the descriptors of every member that `ask` returned; lower fitness is better.

        Args:
            fitness: One number for each member. Members whose fitness is not finite are dropped.
            descriptors: One row for each member, one column for each descriptor.

        Raises:
            ValueError: If shapes do not fit, or a descriptor is not a number. Nothing has changed then.
        """
        state, n = self.state, self.state["population"]
        seen, kinds = clean(torch.as_tensor(fitness)), torch.as_tensor(descriptors).detach().double()
        if seen.shape != (n,) or kinds.shape != (n, len(self.cells)) or bool(kinds.isnan().any()):
            raise ValueError(f"tell: {n} numbers, and {n} rows of {len(self.cells)} descriptors that are numbers")
        x, cell = self.ask(), self.find_cell(kinds).to(state["x"].device)
        seen = seen.to(state["x"].device)
        # Sorted so that the best member of a cell comes last, and overwrites the others.
        order = seen.argsort(descending=True, stable=True)
        order = order[seen[order] < state["fitness"][cell[order]]]
        places = cell[order]
        last = {int(place): int(at) for place, at in zip(places, order, strict=True)}
        if last:
            rows, members = (torch.tensor(each, device=x.device) for each in (list(last), list(last.values())))
            state["x"][rows], state["fitness"][rows] = x[members], seen[members]
        state["generation"] += 1
        state["evaluations"] += n

    def find_cell(self, descriptors: Tensor) -> Tensor:
        """Return the number of the cell of each row of descriptors."""
        cell = torch.zeros(len(descriptors), dtype=torch.long, device=descriptors.device)
        for column, (low, high), count in zip(descriptors.T, self.ranges, self.cells, strict=True):
            place = ((column - low) / (high - low) * count).floor().clamp(0, count - 1).long()
            cell = cell * count + place
        return cell

    @property
    def archive(self) -> Tensor:
        """The fitness of the best member of each cell, one axis for each descriptor; infinite where there is none."""
        table: Tensor = self.state["fitness"].view(self.cells)
        return table.clone()

    @property
    def elites(self) -> tuple[Tensor, Tensor]:
        """The members of the archive, one per row, and their fitness."""
        filled = self.state["fitness"].isfinite()
        return self.state["x"][filled].clone(), self.state["fitness"][filled].clone()

    @property
    def coverage(self) -> float:
        """The share of cells that have a member."""
        return float(self.state["fitness"].isfinite().double().mean())

    @property
    def best(self) -> Tensor:
        """The member with the lowest fitness; x0 until there is one."""
        fitness = self.state["fitness"]
        best: Tensor = self.state["x"][fitness.argmin()] if bool(fitness.isfinite().any()) else self.state["start"]
        return best.clone()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state: tensors and numbers by name."""
        return {"method": "MAPElites"} | {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned.

        Raises:
            ValueError: If it is the state of another search, or of another grid.
        """
        if state.get("method") != "MAPElites" or state["x"].shape != self.state["x"].shape:
            raise ValueError(f"the state is one of {state.get('method')}, or of another grid than this MAPElites")
        self.state = {k: state[k].clone() if isinstance(v, Tensor) else state[k] for k, v in self.state.items()}

    def plot(self, ax: Any = None) -> Figure:
        """Draw the fitness of the archive over its first two descriptors; needs matplotlib (extra `plot`).

        Args:
            ax: The axes of matplotlib to draw into; by default those of a new figure.

        Raises:
            ImportError: Without matplotlib.
            ValueError: If there is one descriptor only.
        """
        if len(self.cells) < 2:
            raise ValueError("an archive is drawn over two descriptors, and this one has one")
        ax = make_axes(ax, (4.8, 3.8))
        table = self.archive
        while table.dim() > 2:
            table = table.amin(-1)
        image = torch.where(table.isfinite(), table, torch.nan).T.cpu().numpy()
        (a, b), (c, d) = self.ranges[:2]
        drawn = ax.imshow(image, origin="lower", extent=(a, b, c, d), aspect="auto")
        ax.figure.colorbar(drawn, ax=ax, label="fitness")
        ax.set(xlabel="first descriptor", ylabel="second descriptor")
        return ax.figure  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        count = int(self.state["fitness"].isfinite().sum())
        return f"MAPElites({count} of {math.prod(self.cells)} cells, generation={self.state['generation']})"
