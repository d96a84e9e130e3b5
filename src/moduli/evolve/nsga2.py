"""NSGA-II: the Pareto front of several objectives.

References:
    Deb, Pratap, Agarwal, Meyarivan, A fast and elitist multiobjective genetic algorithm: NSGA-II, IEEE Transactions on
    Evolutionary Computation 6 (2002) 182-197; Deb and Agrawal, Simulated binary crossover (1995); Deb and Goyal, A combined genetic
    adaptive search (1996), for polynomial mutation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._figures import make_axes
from ._noise import key
from ._problem import Bounds, Coordinates
from .ga import sbx

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class ParetoFront:
    """Points of which none is better than another in all objectives.

    Attributes:
        x: The points, one per row.
        fitness: Their objectives, one column for each; sorted by the first.

    Example:
        >>> import torch
        >>> from moduli.evolve import ParetoFront
        >>> ParetoFront(torch.zeros(2, 1), torch.tensor([[0.0, 1.0], [1.0, 0.0]])).find_hypervolume([2.0, 2.0])
        3.0
    """

    x: Tensor
    fitness: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        return f"ParetoFront({len(self.x)} points, {self.fitness.shape[1]} objectives)"

    def find_hypervolume(self, reference: Any) -> float:
        """Return the volume of the objective values that a point of the front dominates and that dominate `reference`.

        Args:
            reference: One number for each objective.

        Raises:
            ValueError: If there are more or fewer numbers than objectives.
        """
        corner = torch.as_tensor(reference, dtype=torch.float64)
        if corner.shape != self.fitness.shape[1:]:
            raise ValueError(f"the reference has {corner.numel()} numbers for {self.fitness.shape[1]} objectives")
        points = self.fitness.double().cpu()
        return _measure_volume(points[(points < corner).all(1)], corner)

    def plot(self, ax: Any = None) -> Figure:
        """Draw the first two objectives; needs matplotlib (extra `plot`).

        Args:
            ax: The axes of matplotlib to draw into; by default those of a new figure.

        Raises:
            ImportError: Without matplotlib.
        """
        ax = make_axes(ax, (4.8, 3.6))
        ax.plot(*self.fitness[:, :2].T.cpu().numpy(), ".")
        ax.set(xlabel="first objective", ylabel="second objective")
        return ax.figure  # type: ignore[no-any-return]


def _measure_volume(points: Tensor, corner: Tensor) -> float:
    """Return the hypervolume, summed over slices along the last objective."""
    if len(points) == 0:
        return 0.0
    if points.shape[1] == 1:
        return float(corner[0] - points.min())
    order = points[:, -1].argsort()
    points, ends = points[order], torch.cat([points[order][1:, -1], corner[-1:]])
    volume = 0.0
    for at in range(len(points)):
        height = float(ends[at] - points[at, -1])
        if height > 0:
            volume += height * _measure_volume(points[: at + 1, :-1], corner[:-1])
    return volume


def sort_fronts(fitness: Tensor) -> Tensor:
    """Return for each row the number of its front: 0 if no row is better, 1 if only rows of front 0 are, and so on.

    A row is better than another if no objective is higher and at least one is lower.

    Args:
        fitness: One row for each member, one column for each objective; NaN counts as the worst.
    """
    seen = fitness.nan_to_num(nan=torch.inf)
    better = (seen[:, None] <= seen[None]).all(-1) & (seen[:, None] < seen[None]).any(-1)
    counts, ranks = better.sum(0), torch.full((len(seen),), -1, dtype=torch.long, device=fitness.device)
    rank = 0
    while bool((ranks < 0).any()):
        front = (counts == 0) & (ranks < 0)
        ranks[front] = rank
        counts = counts - better[front].sum(0)
        rank += 1
    return ranks


def measure_crowding(fitness: Tensor, ranks: Tensor) -> Tensor:
    """Return the distance between the two neighbours of each member in its front, summed over objectives; infinite at ends.

    Args:
        fitness: One row for each member.
        ranks: The front of each.
    """
    distance = torch.zeros(len(fitness), dtype=fitness.dtype, device=fitness.device)
    for column in fitness.T:
        low = column.nan_to_num(nan=torch.inf)
        # Sort by front, and within a front by the objective.
        order = low.argsort(stable=True)
        order = order[ranks[order].argsort(stable=True)]
        values, fronts = low[order], ranks[order]
        first = torch.ones_like(fronts, dtype=torch.bool)
        first[1:] = fronts[1:] != fronts[:-1]
        last = torch.ones_like(first)
        last[:-1] = first[1:]
        finite = values[values.isfinite()]
        width = float(finite.max() - finite.min()) if len(finite) else 0.0
        gap = torch.zeros_like(distance)
        if len(values) > 2 and width > 0:
            gap[1:-1] = (values[2:] - values[:-2]) / width
        gap[first | last] = torch.inf
        distance[order] += gap.nan_to_num(nan=0.0, posinf=torch.inf)
    return distance


class NSGA2:
    """A search for the front of several objectives: non-dominated sorting, crowding, crossover and mutation.

    One generation is `x = search.ask()`, `search.tell(fitness)` with one row of objectives for each row of x. All objectives are
    minimised. As with `Search`, members are a function of the state.

    Args:
        x0: The first member, whose length, dtype and device are those of the search; others are drawn between the bounds.
        bounds: (lower, upper), numbers or tensors, both finite.
        population: The number of members of a generation; even.
        seed: Decides every random number.
        crossover: The probability that a child has two parents.
        eta: The order of the crossover.
        mutation: The probability that a coordinate mutates; by default 1/P.
        eta_mutation: The order of the mutation: the higher, the smaller its steps.

    Example:
        >>> import torch
        >>> from moduli.evolve import NSGA2
        >>> search = NSGA2(torch.zeros(1), bounds=(-4.0, 4.0), population=40)
        >>> for _ in range(40):
        ...     x = search.ask()[:, 0]
        ...     search.tell(torch.stack([x**2, (x - 2) ** 2], 1))
        >>> front = search.front
        >>> bool((front.x >= -0.05).all()), bool((front.x <= 2.05).all()), front.find_hypervolume([4.0, 4.0]) > 12.5
        (True, True, True)
    """

    def __init__(
        self,
        x0: Tensor,
        *,
        bounds: Bounds,
        population: int = 100,
        seed: int = 0,
        crossover: float = 0.9,
        eta: float = 15.0,
        mutation: float | None = None,
        eta_mutation: float = 20.0,
    ) -> None:
        if population < 4 or population % 2:
            raise ValueError(f"NSGA2 has pairs of parents: population={population} has to be even, and at least 4")
        self.coordinates = Coordinates(x0.numel(), x0.dtype, x0.device, bounds, None, None)
        low, high = self.coordinates.lower, self.coordinates.upper
        if not bool((low.isfinite() & high.isfinite()).all()):
            raise ValueError("NSGA2 draws its first members between bounds, which have to be finite")
        self.crossover, self.eta, self.eta_mutation = crossover, eta, eta_mutation
        self.mutation = 1 / x0.numel() if mutation is None else mutation
        self._generator = torch.Generator(x0.device)
        self.state: dict[str, Any] = {
            "seed": int(seed), "generation": 0, "evaluations": 0, "population": population,
            "x": low + (high - low) * self._uniform(seed, 0, population, x0.numel()).to(x0.dtype),
            "fitness": torch.zeros(0, 0, dtype=torch.float64, device=x0.device),
        }  # fmt: skip
        self.state["x"][0] = x0.detach().clamp(low, high)

    def _uniform(self, seed: int, counter: int, *shape: int) -> Tensor:
        self._generator.manual_seed(key(seed, counter))
        return torch.rand(shape, generator=self._generator, dtype=torch.float64, device=self._generator.device)

    @property
    def generation(self) -> int:
        """The number of completed generations."""
        return int(self.state["generation"])

    @property
    def evaluations(self) -> int:
        """The number of evaluated members."""
        return int(self.state["evaluations"])

    @torch.no_grad()
    def ask(self) -> Tensor:
        """Return the members to evaluate, one per row: the first ones, then children of the survivors."""
        x: Tensor = self.state["x"]
        if self.generation == 0:
            return x.clone()
        n, dim = self.state["population"], x.shape[1]
        ranks = sort_fronts(self.state["fitness"])
        crowding = measure_crowding(self.state["fitness"], ranks)
        drawn = self._uniform(self.state["seed"], self.generation, 7, n, max(dim, 4))
        entrants = (drawn[0, :, :4] * n).long().clamp(max=n - 1).view(2 * n, 2)
        one, two = entrants.T
        wins = (ranks[one] < ranks[two]) | ((ranks[one] == ranks[two]) & (crowding[one] >= crowding[two]))
        parents = x[torch.where(wins, one, two)]
        a, b, drawn = parents[:n], parents[n:], drawn[:, :, :dim].to(x.dtype)
        crossed = sbx(a, b, drawn[1], drawn[2] < 0.5, self.eta)
        # Crossover changes each coordinate with probability ½; the others are the first parent's.
        mixed = torch.where(drawn[3] < 0.5, crossed, a)
        child = torch.where(drawn[4][:, :1] < self.crossover, mixed, a)
        low, high = self.coordinates.lower, self.coordinates.upper
        power, u = 1 / (self.eta_mutation + 1), drawn[5]
        step = torch.where(u < 0.5, (2 * u).pow(power) - 1, 1 - (2 * (1 - u)).pow(power))
        mutated = torch.where(drawn[6] < self.mutation, child + (high - low) * step, child)
        return mutated.clamp(low, high)

    @torch.no_grad()
    def tell(self, fitness: Any) -> None:
        """Take the objectives of every member that `ask` returned, in order; lower is better.

        Args:
            fitness: One row for each member, one column for each objective; NaN counts as the worst.

        Raises:
            ValueError: If there is not one row for each member, with at least two objectives, as many as before. Nothing has
                changed then.
        """
        state, seen = self.state, torch.as_tensor(fitness).detach().double()
        before = state["fitness"]
        right = seen.dim() == 2 and len(seen) == state["population"] and seen.shape[1] >= 2
        if not right or (self.generation and seen.shape[1] != before.shape[1]):
            raise ValueError(
                f"tell: one row of two or more objectives for each of {state['population']} members; got {tuple(seen.shape)}"
            )
        seen = seen.to(before.device)
        x = self.ask()
        if self.generation:
            x, seen = torch.cat([state["x"], x]), torch.cat([before, seen])
        ranks = sort_fronts(seen)
        crowding = measure_crowding(seen, ranks)
        order = crowding.argsort(descending=True, stable=True)
        order = order[ranks[order].argsort(stable=True)][: state["population"]]
        state["x"], state["fitness"] = x[order].clone(), seen[order].clone()
        state["generation"] += 1
        state["evaluations"] += state["population"]

    @property
    def front(self) -> ParetoFront:
        """The members of front 0, which no other member dominates."""
        if self.generation == 0:
            return ParetoFront(self.state["x"][:0], self.state["fitness"])
        first = (sort_fronts(self.state["fitness"]) == 0).nonzero()[:, 0]
        first = first[self.state["fitness"][first, 0].argsort()]
        return ParetoFront(self.state["x"][first].clone(), self.state["fitness"][first].clone())

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state: tensors and numbers by name."""
        return {"method": "NSGA2"} | {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned.

        Raises:
            ValueError: If it is the state of another search.
        """
        if state.get("method") != "NSGA2" or state["x"].shape[1:] != self.state["x"].shape[1:]:
            raise ValueError(f"the state is one of {state.get('method')}, or of another dimension than this NSGA2")
        self.state = {k: state[k].clone() if isinstance(v, Tensor) else state[k] for k, v in self.state.items()}

    def __repr__(self) -> str:
        return f"NSGA2(dim={self.state['x'].shape[1]}, population={self.state['population']}, generation={self.generation})"
