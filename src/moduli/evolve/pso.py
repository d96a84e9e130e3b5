"""Particle swarms.

References:
    Kennedy and Eberhart, Particle swarm optimization, ICNN 1995; inertia of Shi and Eberhart (1998), equation (1);
    constriction of Clerc and Kennedy, IEEE TEC 6 (2002); ring neighbourhoods of Kennedy and Mendes (2002); fully informed
    swarms of Mendes, Kennedy, Neves, IEEE TEC 8 (2004), equations (2) and (3).
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import fuse
from ._matrix_search import MatrixSearch
from ._problem import check_choice

__all__ = ["PSO", "informed_velocity", "neighbourhood_best", "remember_best", "swarm_velocity"]


class PSO(MatrixSearch):
    """A particle swarm: each member is attracted by its best position so far and by that of its neighbourhood.

    v ← w v + c₁ r₁ (own best - x) + c₂ r₂ (neighbourhood's best - x), x ← x + v, with fresh uniform r₁, r₂ for each
    coordinate. At a bound the position is clamped, and the velocity becomes the actual displacement. Integer coordinates are
    evaluated at the nearest whole number.

    Args:
        x0: The start.
        population: The number of members.
        topology: `"global"` (all members are neighbours), `"ring"` (the `radius` nearest on either side), or `"informed"`
            (every neighbour on the ring attracts, not only the best of them).
        radius: The number of neighbours on either side on the ring.
        inertia: w.
        cognitive: c₁.
        social: c₂; with `"informed"`, c₁ + c₂ is shared among the neighbours, and w is the constriction χ.
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
        cognitive: float = 1.496179765663133,
        social: float = 1.496179765663133,
        **options: Any,
    ) -> None:
        check_choice("topology", topology, ("global", "ring", "informed"))
        if radius < 1:
            raise ValueError(f"radius={radius}: a ring has at least one neighbour on either side")
        for old, new in (("cognition", "cognitive"), ("sociality", "social")):
            if old in options:
                warnings.warn(f"PSO({old}=) is called {new} now", DeprecationWarning, stacklevel=2)
        cognitive, social = options.pop("cognition", cognitive), options.pop("sociality", social)
        self.topology = topology
        self.inertia, self.cognitive, self.social = inertia, cognitive, social
        # On a small ring no particle is a neighbour twice.
        self.radius = min(radius, (population - 1) // 2)
        super().__init__(x0, population=population, **options)

    def _start(self, x0: Tensor) -> None:
        x = self._draw_first(x0)
        self.state["x"], self.state["v"], self.state["own"] = x, torch.zeros_like(x), x.clone()
        self.state["own_fitness"] = torch.full((len(x),), torch.inf, dtype=torch.float64, device=self.device)

    def _move(self) -> dict[str, Tensor]:
        x, v, own = self._tensor("x"), self._tensor("v"), self._tensor("own")
        c = self.coordinates
        if self.generation == 0:
            return {"x": c.rounded(x), "position": x, "v": v}
        # Two pairs of buffers alternate: the state is in the other one.
        position, moved = (self._scratch(f"{name}{self.generation % 2}") for name in ("x", "v"))
        if self.topology == "informed":
            draws = self._draw(2 * self.radius + 1)
            total = self.cognitive + self.social
            # χ (v + Σ φ / K ...): with w = χ, the pull of the canonical swarm is c / χ before it is multiplied.
            informed_velocity(x, v, own, draws, self.radius, self.inertia, total / self.inertia, moved)
            torch.add(x, moved, out=position)
            if c.bounded:
                torch.clamp(position, c.lower, c.upper, out=position)
                torch.sub(position, x, out=moved)
        else:
            roles = [[role] for role in (x, v, own, self._social(own), *self._draw(2))]
            pulls = self.inertia, self.cognitive, self.social
            move(*roles, *self._walls(), *pulls, out=([position], [moved]))
        return {"x": c.rounded(position), "position": position, "v": moved}

    def _social(self, own: Tensor) -> Tensor:
        """Return the best position of each member's neighbourhood."""
        fitness = self._tensor("own_fitness")
        if self.topology == "global":
            return self._scratch("social").copy_(own[int(fitness.argmin())])
        near = neighbourhood_best(fitness, self.radius)
        return torch.index_select(own, 0, near, out=self._scratch("social"))

    def _draw(self, count: int) -> Tensor:
        """Return `count` uniform matrices, in a buffer that every generation reuses."""
        return uniforms(self._scratch("draws", count), self._make_generator())

    def _select(self, proposal: dict[str, Tensor], fitness: Tensor) -> None:
        remember_best(proposal["x"], fitness, self._tensor("own"), self._tensor("own_fitness"))
        self.state["x"], self.state["v"] = proposal["position"], proposal["v"]


def swarm_velocity(
    x: Tensor, v: Tensor, own: Tensor, near: Tensor, r1: Tensor, r2: Tensor, inertia: Any, cognitive: Any, social: Any
) -> Tensor:
    """Return w v + c₁ r₁ (own - x) + c₂ r₂ (near - x).

    Args:
        x: The positions, N x P.
        v: The velocities.
        own: The best position of each member so far.
        near: The best position of each member's neighbourhood, N x P or P.
        r1: Uniform numbers.
        r2: Uniform numbers.
        inertia: w, a number or a column with one for each member.
        cognitive: c₁, likewise.
        social: c₂, likewise.

    Example:
        >>> import torch
        >>> from moduli.evolve import swarm_velocity
        >>> x, v, own, near = torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1), torch.full((1, 1), 2.0)
        >>> swarm_velocity(x, v, own, near, torch.ones(1, 1), torch.ones(1, 1), 0.5, 1.0, 10.0)
        tensor([[21.5000]])
    """
    pull: Tensor = inertia * v + cognitive * r1 * (own - x) + social * r2 * (near - x)
    return pull


def _move_swarm(
    x: Tensor,
    v: Tensor,
    own: Tensor,
    social: Tensor,
    r1: Tensor,
    r2: Tensor,
    lower: Tensor,
    upper: Tensor,
    w: float,
    c1: float,
    c2: float,
) -> tuple[Tensor, Tensor]:
    faster = swarm_velocity(x, v, own, social, r1, r2, w, c1, c2)
    there = x + faster
    inside = torch.where(there < lower, lower, there)
    inside = torch.where(inside > upper, upper, inside)
    return inside, faster + (inside - there)


move = fuse(_move_swarm)
"""x + `swarm_velocity` clamped to bounds (numbers or matrices), and the actual displacement, in one pass."""


def informed_velocity(
    x: Tensor, v: Tensor, own: Tensor, draws: Tensor, radius: int, constriction: float, weight: float, out: Tensor
) -> Tensor:
    """Compute χ (v + Σ_k φ_k (own_k - x) / K) over the K = 2 radius + 1 neighbours on the ring, φ_k = weight · uniform.

    Args:
        x: The positions, N x P.
        v: The velocities.
        own: The best position of each member so far.
        draws: K uniform N x P matrices, one for each neighbour from -radius to radius.
        radius: The number of neighbours on either side.
        constriction: χ.
        weight: The factor of φ.
        out: Receives the result.

    Returns:
        `out`.

    Example:
        >>> import torch
        >>> from moduli.evolve import informed_velocity
        >>> x = torch.tensor([[0.0], [1.0], [2.0]])
        >>> informed_velocity(x, 0 * x, x, torch.ones(3, 3, 1), 1, 1.0, 3.0, torch.empty(3, 1))
        tensor([[ 3.],
                [ 0.],
                [-3.]])
    """
    out.zero_()
    for k, shift in enumerate(range(-radius, radius + 1)):
        out.addcmul_(draws[k], own.roll(-shift, 0) - x)
    return out.mul_(weight / (2 * radius + 1)).add_(v).mul_(constriction)


def neighbourhood_best(own_fitness: Tensor, radius: int) -> Tensor:
    """Return for each member the index of the best of its neighbours on a ring; of equal ones the nearest, itself first.

    Example:
        >>> import torch
        >>> from moduli.evolve import neighbourhood_best
        >>> neighbourhood_best(torch.tensor([3.0, 1.0, 2.0, 0.0]), 1)
        tensor([3, 1, 3, 3])
    """
    n = len(own_fitness)
    here = torch.arange(n, device=own_fitness.device)
    shifts = sorted(range(-radius, radius + 1), key=lambda s: (abs(s), s))
    near = torch.stack([(here + shift) % n for shift in shifts])
    return near.gather(0, own_fitness[near].argmin(0, keepdim=True))[0]


def remember_best(x: Tensor, fitness: Tensor, own: Tensor, own_fitness: Tensor) -> None:
    """Update the best position and fitness of every member that improved, in place.

    Args:
        x: The positions, N x P.
        fitness: Their fitness.
        own: The best position of each member so far, which is updated.
        own_fitness: The fitness of these, which is updated.

    Example:
        >>> import torch
        >>> from moduli.evolve import remember_best
        >>> own, best = torch.zeros(2, 1), torch.tensor([1.0, 1.0])
        >>> remember_best(torch.ones(2, 1), torch.tensor([0.5, 2.0]), own, best)
        >>> own.flatten(), best
        (tensor([1., 0.]), tensor([0.5000, 1.0000]))
    """
    better = (fitness < own_fitness).nonzero()[:, 0]
    if len(better) == len(x):
        own.copy_(x)
        own_fitness.copy_(fitness)
    elif len(better):
        own.index_copy_(0, better, x.index_select(0, better))
        own_fitness.index_copy_(0, better, fitness[better])


def uniforms(out: Tensor, generator: torch.Generator) -> Tensor:
    """Fill a tensor with uniform numbers between 0 and 1; in single precision on the CPU, from 32 random bits each.

    NumPy's SFC64 generates 64 bits in the time that torch's generator takes for 28, and its state is small enough to seed a
    generator for each matrix.
    """
    if out.dtype != torch.float32 or out.device.type != "cpu" or out.numel() % 2:
        return out.uniform_(generator=generator)
    words = np.random.SFC64(int(torch.randint(2**62, (1,), generator=generator)))
    half = torch.tensor(0.5)
    for part in torch.split(out.view(-1), 1 << 17):  # while the words are in the cache
        part.copy_(torch.from_numpy(words.random_raw(part.numel() // 2).view(np.int32)))
        torch.add(half, part, alpha=2.0**-32 * (1 - 2.0**-23), out=part)
    return out
