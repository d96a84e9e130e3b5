"""Differential evolution, with the adaptations of JADE and SHADE.

References:
    Storn and Price, Differential evolution, J. Global Optimization 11 (1997) 341-359;
    Zhang and Sanderson, JADE: adaptive differential evolution with optional external archive, IEEE TEC 13 (2009) 945-958;
    Tanabe and Fukunaga, Success-history based parameter adaptation for differential evolution, CEC 2013;
    Tanabe and Fukunaga, Improving the search performance of SHADE using linear population size reduction, CEC 2014.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..kernels import fuse
from ._matrix_search import MatrixSearch
from ._problem import check_choice
from .pso import uniforms


class DE(MatrixSearch):
    """Differential evolution: each member is compared with a mutant, and replaced if the mutant is better.

    Mutants are x_a + F (x_b - x_c) (`"rand/1"`), best + F (x_b - x_c) (`"best/1"`), or
    x + F (x_p - x) + F (x_a - x_b) with x_p one of the best 100 p % and x_b from the members or an archive of replaced ones
    (`"current-to-pbest/1"`). Coordinates cross over with the member at rate CR. A coordinate that leaves the bounds is set
    to the midpoint between the bound and the member.

    Args:
        x0: Where to start.
        population: How many members; at least 4. By default 10 for each coordinate (Storn and Price), 18 with `shrink=True`
            (L-SHADE), but at least 20 and at most 400, nor more than a 25th of `max_evaluations` where that is known.
        strategy: One of the three above.
        adapt: `"jade"` or `"shade"` (both for `"current-to-pbest/1"`): draw F and CR for each member around what has
            succeeded; None uses `scale` and `rate`.
        scale: F.
        rate: CR.
        p: The share of members that count as best.
        memory: How many means SHADE stores.
        learning: How fast the means of JADE move (its c).
        shrink: Whether the population falls linearly to 4 while `max_evaluations` are spent, the worst first (L-SHADE).
        **options: `spread`, `initial`, and those of `Search`.

    Example:
        >>> import torch
        >>> from moduli.evolve import DE
        >>> search = DE(torch.zeros(4), population=40, bounds=(-5.0, 5.0), integer=[0], adapt="shade",
        ...             strategy="current-to-pbest/1")
        >>> for _ in range(150):
        ...     search.tell((search.ask() - torch.tensor([2.0, 0.5, -1.0, 3.0])).square().sum(1))
        >>> search.best.round(decimals=2)
        tensor([ 2.0000,  0.5000, -1.0000,  3.0000])

    References:
        Storn and Price (1997); Zhang and Sanderson (2009) for JADE; Tanabe and Fukunaga (2013) for SHADE, and (2014) for L-SHADE.
    """

    allows_integer = True
    least = 4

    def __init__(
        self,
        x0: Tensor,
        *,
        population: int | None = None,
        strategy: str = "rand/1",
        adapt: str | None = None,
        scale: float = 0.5,
        rate: float = 0.9,
        p: float = 0.1,
        memory: int = 10,
        learning: float = 0.1,
        shrink: bool = False,
        **options: Any,
    ) -> None:
        check_choice("strategy", strategy, ("rand/1", "best/1", "current-to-pbest/1"))
        check_choice("adapt", adapt, ("jade", "shade", None))
        if adapt and strategy != "current-to-pbest/1":
            raise ValueError(f"{adapt.upper()} adapts 'current-to-pbest/1', not {strategy!r}; give that strategy")
        if not 0 < p <= 1:
            raise ValueError(f"p={p}: the share of best members lies between 0 and 1")
        budget = options.get("max_evaluations")
        if shrink and budget is None:
            raise ValueError("shrink=True spreads the reduction over max_evaluations; give that number")
        if population is None:
            population = choose_members(x0.numel(), 18 if shrink else 10, budget)
        self.strategy, self.adapt, self.shrink = strategy, adapt, shrink
        self._first_population = population
        self.scale, self.rate, self.p, self.learning = scale, rate, p, learning
        self.memory = memory if adapt == "shade" else 1
        super().__init__(x0, population=population, **options)

    def _start(self, x0: Tensor) -> None:
        x = self._draw_first(x0)
        self.state["x"] = x
        self.state["fitness"] = torch.full((len(x),), torch.inf, dtype=torch.float64, device=self.device)
        if self.strategy == "current-to-pbest/1":
            self.state["archive"], self.state["archived"] = torch.zeros_like(x), 0
        if self.adapt:
            half = torch.full((self.memory,), 0.5, dtype=torch.float64, device=self.device)
            self.state["rates"], self.state["scales"], self.state["slot"] = half, half.clone(), 0

    def _move(self) -> dict[str, Tensor]:
        x, c, g = self._tensor("x"), self.coordinates, self._make_generator()
        if self.generation == 0:
            return {"x": x}
        scale, rate, extra = self._settings(g)
        base, a, b = self._pick(x, scale, g)
        # The draws that select the mutant's coordinates; one coordinate of each member is always the mutant's.
        draw = uniforms(self._scratch("draws"), g)
        forced = torch.randint(self.dim, (len(x),), generator=g, device=self.device)
        draw.scatter_(1, forced[:, None], -torch.inf)
        # The fused pass takes a number, or a matrix in a list where members differ.
        numbers = [[n.expand_as(x).contiguous()] if isinstance(n, Tensor) else n for n in (scale, rate)]
        crossed([base], [a], [b], [x], [draw], *self._walls(), *numbers, out=[base])
        return {"x": c.rounded(base), **extra}

    def _pick(self, x: Tensor, scale: Tensor | float, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return the terms of the mutants base + F (a - b): a base that may be overwritten, a and b."""
        if self.strategy == "current-to-pbest/1":
            return self._move_towards_best(x, scale, g)
        picks = distinct(len(x), 3, g, self.device)
        if self.strategy == "best/1":
            picks[0] = self._tensor("fitness").argmin()
        base, a, b = (torch.index_select(x, 0, p, out=self._scratch(f"parent {i}")) for i, p in enumerate(picks))
        return base, a, b

    def _settings(self, g: torch.Generator) -> tuple[Tensor | float, Tensor | float, dict[str, Tensor]]:
        """Return F and CR of each member, fixed or drawn around past successes (JADE (9) and (11), SHADE (5) and (6))."""
        if self.adapt is None:
            return self.scale, self.rate, {}
        n = self.population
        slots = torch.randint(self.memory, (n,), generator=g, device=self.device)
        normal = torch.randn(n, generator=g, dtype=torch.float64, device=self.device)
        rate = normal.mul_(0.1).add_(self._tensor("rates")[slots]).clamp_(0, 1)
        scale = cauchy(self._tensor("scales")[slots], 0.1, g)
        return scale.to(self.dtype)[:, None], rate.to(self.dtype)[:, None], {"scale": scale, "rate": rate}

    def _move_towards_best(self, x: Tensor, scale: Tensor | float, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return x + F (x_p - x), x_a and x_b: JADE, equation (6)."""
        n, fitness, archived = len(x), self._tensor("fitness"), self._int("archived")
        top = fitness.argsort(stable=True)
        if self.adapt == "shade":  # p is drawn for each member from [2/N, 0.2]
            low = min(2 / n, 0.2)
            share = low + (0.2 - low) * torch.rand(n, generator=g, dtype=torch.float64, device=self.device)
        else:
            share = torch.full((n,), self.p, dtype=torch.float64, device=self.device)
        among = (share * n).round().clamp(1, n)
        place = (torch.rand(n, generator=g, dtype=torch.float64, device=self.device) * among).long()
        leader = x.index_select(0, top[place])
        here = torch.arange(n, device=self.device)
        first = distinct(n, 1, g, self.device)[0]
        second = torch.randint(n + archived - 2, (n,), generator=g, device=self.device)
        for taken in torch.stack([here, first]).sort(0).values:
            second += second >= taken
        pool = torch.cat([x, self._tensor("archive")[:archived]])
        return leader.sub_(x).mul_(scale).add_(x), x.index_select(0, first), pool.index_select(0, second)

    def _select(self, proposal: dict[str, Tensor], fitness: Tensor) -> None:
        x, old = self._tensor("x"), self._tensor("fitness")
        if self.generation == 0:
            self.state["fitness"] = fitness
            return
        won = (fitness <= old).nonzero()[:, 0]
        gain = old - fitness
        better = (fitness < old).nonzero()[:, 0]
        if self.strategy == "current-to-pbest/1" and len(better):
            self._archive(x.index_select(0, better))
        if self.adapt and len(better):
            # JADE smooths its two means (10), (13); SHADE replaces the oldest entry of its memory (7), (8).
            weights = (
                gain_weights(gain[better]) if self.adapt == "shade" else torch.full_like(gain[better], 1 / len(better))
            )
            share, slot = 1.0 if self.adapt == "shade" else self.learning, self._int("slot")
            means = success_means(proposal["rate"][better], proposal["scale"][better], weights)
            for memory, mean in zip((self._tensor("rates"), self._tensor("scales")), means, strict=True):
                memory[slot] = (1 - share) * memory[slot] + share * mean
            self.state["slot"] = (slot + 1) % self.memory
        x.index_copy_(0, won, proposal["x"].index_select(0, won))
        old.index_copy_(0, won, fitness[won])
        if self.shrink:
            self._drop_worst()

    def _drop_worst(self) -> None:
        """Shrink the population linearly with the spent evaluations: L-SHADE, equation (10)."""
        spent = (self.evaluations + self.population) / (self.max_evaluations or 1)
        first = self._first_population
        size = max(self.least, min(self.population, round(first + (self.least - first) * spent)))
        if size < self.population:
            staying = self._tensor("fitness").argsort(stable=True)[:size].sort().values
            for name in ("x", "fitness"):
                self.state[name] = self._tensor(name).index_select(0, staying)
            self.state["population"] = size
            if "archived" in self.state:
                self.state["archived"] = min(self._int("archived"), size)
            self._restore_derived()

    def _restore_derived(self) -> None:
        self._bounds = None  # matrices with a row for each member

    def _archive(self, replaced: Tensor) -> None:
        """Add replaced members to the archive; of more than N, keep a random subset."""
        pool = torch.cat([self._tensor("archive")[: self._int("archived")], replaced])
        n = self.population
        if len(pool) > n:
            # The second stream of this generation: the first one made the trials.
            order = torch.randperm(len(pool), generator=self._make_generator(1), device=self.device)[:n]
            pool = pool.index_select(0, order.sort().values)
        self._tensor("archive")[: len(pool)] = pool
        self.state["archived"] = len(pool)

    def _draws(self) -> int:
        return 2


def choose_members(dim: int, each: int, budget: int | None) -> int:
    """Return the default population: `each` members per coordinate, at least 20, limited by 400 and the budget.

    Args:
        dim: The number of coordinates.
        each: How many members there are for each coordinate.
        budget: The number of evaluations, or None if unlimited.
    """
    most = 400 if budget is None else min(400, max(20, budget // 25), max(budget, DE.least))
    return min(max(20, each * dim), most)


def distinct(n: int, k: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return k x n indices: for every member k different other members, all choices equally likely.

    Args:
        n: The number of members.
        k: How many to choose for each.
        generator: The source of random numbers.
        device: The device of the result.
    """
    taken = [torch.arange(n, device=device)]
    for j in range(k):
        pick = torch.randint(n - 1 - j, (n,), generator=generator, device=device)
        # Skipping the taken ones in ascending order maps 0..n-2-j onto the remaining indices.
        for other in torch.stack(taken).sort(0).values:
            pick += pick >= other
        taken.append(pick)
    return torch.stack(taken[1:])


def _cross(
    base: Tensor, a: Tensor, b: Tensor, x: Tensor, draw: Tensor, lower: Any, upper: Any, scale: Any, rate: Any
) -> Tensor:
    """Return the mutant base + F (a - b) where the draw is below CR, else the member (Storn and Price, (1) and (5)).

    A value beyond a bound becomes the midpoint of the bound and the member (Zhang and Sanderson 2009, section III).
    """
    trial = torch.where(draw < rate, base + scale * (a - b), x)
    trial = torch.where(trial < lower, 0.5 * (x + lower), trial)
    return torch.where(trial > upper, 0.5 * (x + upper), trial)


crossed = fuse(_cross)
"""`_cross` fused into one pass; bounds and settings are numbers or matrices."""


def cauchy(location: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """Return Cauchy numbers that are positive (drawn again otherwise) and at most one: JADE, equation (11).

    Args:
        location: The centre of each number.
        scale: The scale of all of them.
        generator: The source of random numbers.
    """
    out = torch.full_like(location, -1.0)
    for _ in range(64):
        bad = out <= 0
        if not bool(bad.any()):
            break
        u = torch.rand(location.shape, generator=generator, dtype=location.dtype, device=location.device)
        out = torch.where(bad, location + scale * torch.tan(math.pi * (u - 0.5)), out)
    return out.clamp(1e-3, 1.0)


def success_means(cr: Tensor, f: Tensor, weights: Tensor) -> tuple[float, float]:
    """Return the mean of CR and the Lehmer mean Σ w F² / Σ w F of successes: JADE, equation (14), and SHADE, (10) and (13).

    Args:
        cr: CR of the members that improved.
        f: F of these members.
        weights: Their weights w, which sum to one.
    """
    return float((weights * cr).sum()), float((weights * f.square()).sum() / (weights * f).sum())


def gain_weights(gain: Tensor) -> Tensor:
    """Return the weights of successes, proportional to their gain: SHADE, equation (11)."""
    # An infinite gain would get all the weight; it is replaced by the largest finite gain.
    finite = gain[gain.isfinite()]
    gain = gain.clamp(max=float(finite.max()) if len(finite) else 1.0)
    return gain / gain.sum() if float(gain.sum()) > 0 else torch.ones_like(gain) / len(gain)
