"""`PSO`: particle swarms, asked and told."""

from typing import Any

import torch
from torch import Tensor

from .._evolution import _pso as core
from .._evolution._buffers import uniforms
from ._base import Members

__all__ = ["PSO"]


class PSO(Members):
    """A particle swarm: each member remembers its best place and is drawn to it and to its neighbours'.

    v ← w v + c₁ r₁ (own best - x) + c₂ r₂ (neighbourhood's best - x), x ← x + v, with fresh uniform r₁, r₂ for each
    coordinate. At a bound the position is clamped, and the velocity is what was really moved. Integer coordinates are evaluated at
    the nearest whole number.

    Args:
        x0: Where to start.
        population: How many members.
        topology: `"global"` (everybody is a neighbour), `"ring"` (the `radius` nearest on either side), or `"informed"`
            (every neighbour on the ring pulls, not only the best of them).
        radius: How many neighbours there are on either side of the ring.
        inertia: w.
        cognition: c₁.
        sociality: c₂; with `"informed"`, c₁ + c₂ is shared among the neighbours, and w is the constriction χ.
        **options: `spread` (deviation of the first members around x0 where bounds are not finite), `initial` (the first
            members themselves), and those of `Search`.

    Example:
        >>> import torch
        >>> from moduli.evolve import PSO
        >>> search = PSO(torch.full((3,), 2.0), population=32, bounds=(-5.0, 5.0))
        >>> for _ in range(100):
        ...     search.tell(search.ask().square().sum(1))
        >>> search.best_fitness < 1e-6
        True

    References:
        Kennedy and Eberhart (1995); Shi and Eberhart (1998); Clerc and Kennedy (2002), whose constants are the defaults;
        Mendes, Kennedy and Neves (2004).
    """

    allows_integer = True

    def __init__(
        self,
        x0: Tensor,
        *,
        population: int = 64,
        topology: str = "global",
        radius: int = 1,
        inertia: float = 0.7298437881283576,
        cognition: float = 1.496179765663133,
        sociality: float = 1.496179765663133,
        **options: Any,
    ) -> None:
        if topology not in ("global", "ring", "informed"):
            raise ValueError(f"topology={topology!r} is unknown; there are 'global', 'ring' and 'informed'")
        if radius < 1:
            raise ValueError(f"radius={radius}: a ring has at least one neighbour on either side")
        self.topology = topology
        self.inertia, self.cognition, self.sociality = inertia, cognition, sociality
        # On a small ring nobody is a neighbour twice.
        self.radius = min(radius, (population - 1) // 2)
        super().__init__(x0, population=population, **options)

    def _start(self, x0: Tensor) -> None:
        x = self._first(x0)
        self.state["x"], self.state["v"], self.state["own"] = x, torch.zeros_like(x), x.clone()
        self.state["own_fitness"] = torch.full((len(x),), torch.inf, dtype=torch.float64, device=self.device)

    def _move(self) -> dict[str, Tensor]:
        x, v, own = self._tensor("x"), self._tensor("v"), self._tensor("own")
        c = self.coordinates
        if self.generation == 0:
            return {"x": c.rounded(x).clone(), "position": x, "v": v}
        # What is asked for is the caller's; the state keeps its own.
        moved, position, asked = (self._fresh(*x.shape) for _ in range(3))
        if self.topology == "informed":
            draws = self._uniform(2 * self.radius + 1)
            total = self.cognition + self.sociality
            # χ (v + Σ φ / K ...): with w = χ, the pull of the canonical swarm is c / χ before it is multiplied.
            core.informed_velocity(x, v, own, draws, self.radius, self.inertia, total / self.inertia, moved)
            torch.add(x, moved, out=position)
            if c.bounded:
                torch.maximum(position, c.lower, out=position)
                torch.minimum(position, c.upper, out=position)
                torch.sub(position, x, out=moved)
            asked.copy_(position)
        else:
            roles = [[role] for role in (x, v, own, self._social(own), *self._uniform(2))]
            pulls, out = (self.inertia, self.cognition, self.sociality), ([position], [asked], [moved])
            if c.bounded:
                lower, upper = self._walls()
                core.move_inside(*roles, [lower], [upper], *pulls, out=out)
            else:
                core.move(*roles, *pulls, out=out)
        return {"x": c.rounded(asked), "position": position, "v": moved}

    def _social(self, own: Tensor) -> Tensor:
        """The best place of each member's neighbourhood."""
        fitness = self._tensor("own_fitness")
        if self.topology == "global":
            return self._scratch("social").copy_(own[int(fitness.argmin())])
        near = core.neighbourhood_best(fitness, self.radius)
        return torch.index_select(own, 0, near, out=self._scratch("social"))

    def _uniform(self, count: int) -> Tensor:
        """`count` uniform matrices, in memory that is used again in every generation."""
        return uniforms(self._scratch("draws", count), self._seeded())

    def _select(self, proposal: dict[str, Tensor], fitness: Tensor) -> None:
        core.remember(proposal["x"], fitness, self._tensor("own"), self._tensor("own_fitness"))
        self.state["x"], self.state["v"] = proposal["position"], proposal["v"]
