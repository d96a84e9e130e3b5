"""Selection of members by fitness: functions of one number per member that return indices.

Lower fitness is better, as with losses, unless `maximize` is set. NaN ranks last, and a warning names those members.
`Population` has methods of the same names that return the chosen members; the indices are for other data of members, such as
the state of an optimizer.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

__all__ = ["order", "roulette", "top", "tournament"]


def ranked(fitness: Tensor, maximize: bool = False) -> Tensor:
    """Return fitness as costs: lower is better, and NaN becomes infinity."""
    if fitness.dim() != 1:
        raise ValueError(f"fitness is one number per member; got shape {tuple(fitness.shape)}")
    if fitness.is_complex():
        raise TypeError("fitness is a real number per member; complex numbers have no order")
    costs = fitness.detach()
    costs = costs.double() if not costs.is_floating_point() else costs
    missing = costs.isnan()
    if bool(missing.any()):
        members = missing.nonzero().reshape(-1).tolist()
        named = ", ".join(map(str, members[:8])) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
        warnings.warn(f"the fitness of member {named} is not a number; ranked last", UserWarning, stacklevel=3)
    costs = -costs if maximize else costs
    return torch.where(missing, torch.full_like(costs, torch.inf), costs)


def order(fitness: Tensor, maximize: bool = False) -> Tensor:
    """Return the indices of all members, best first; equals keep their order.

    Args:
        fitness: One number per member.
        maximize: Whether higher is better.

    Example:
        >>> from moduli.population import selection
        >>> selection.order(torch.tensor([3.0, 1.0, 2.0]))
        tensor([1, 2, 0])
    """
    costs = ranked(fitness, maximize)
    by_cost = torch.argsort(costs, stable=True)
    # Members with NaN come after those with infinite costs.
    missing = torch.as_tensor(fitness).detach().isnan()[by_cost]
    return by_cost[torch.argsort(missing.to(torch.int8), stable=True)]


def top(fitness: Tensor, k: int, maximize: bool = False) -> Tensor:
    """Return the indices of the `k` best members, best first.

    Args:
        fitness: One number per member.
        k: The number of members.
        maximize: Whether higher is better.

    Raises:
        ValueError: If there are fewer than `k` members.

    Example:
        >>> from moduli.population import selection
        >>> selection.top(torch.tensor([3.0, 1.0, 2.0]), 2)
        tensor([1, 2])
    """
    if not 0 <= k <= len(fitness):
        raise ValueError(f"the best {k} of {len(fitness)} members")
    return order(fitness, maximize)[:k]


def tournament(
    fitness: Tensor, k: int, size: int = 2, maximize: bool = False, generator: torch.Generator | None = None
) -> Tensor:
    """Return the indices of the winners of `k` tournaments, each between `size` members drawn with replacement.

    Args:
        fitness: One number per member.
        k: The number of tournaments.
        size: How many members take part in each.
        maximize: Whether higher is better.
        generator: Where the randomness comes from; torch's own by default.

    Example:
        >>> from moduli.population import selection
        >>> selection.tournament(torch.tensor([3.0, 1.0]), 4, size=50)
        tensor([1, 1, 1, 1])

    References:
        D. E. Goldberg and K. Deb, *A comparative analysis of selection schemes used in genetic algorithms*, 1991.
    """
    _check_size(fitness, k)
    if size < 1:
        raise ValueError(f"a tournament of {size} members has no winner")
    rank = torch.empty(len(fitness), dtype=torch.int64, device=fitness.device)
    rank[order(fitness, maximize)] = torch.arange(len(fitness), device=fitness.device)
    if k == 0:
        return rank[:0]
    device = fitness.device if generator is None else generator.device
    drawn = torch.randint(len(fitness), (k, size), generator=generator, device=device).to(fitness.device)
    return drawn.gather(1, rank[drawn].argmin(1, keepdim=True)).reshape(-1)


def roulette(fitness: Tensor, k: int, maximize: bool = False, generator: torch.Generator | None = None) -> Tensor:
    r"""Return the indices of `k` members drawn with replacement, in proportion to how much better than the worst they are.

    The probability of member i is $p_i \propto |f_i - f_{worst}|$; the worst, and those whose fitness is NaN, are
    never drawn, unless all are equal, in which case all are equally likely.

    Args:
        fitness: One number per member.
        k: The number of members.
        maximize: Whether higher is better.
        generator: Where the randomness comes from; torch's own by default.

    Example:
        >>> from moduli.population import selection
        >>> sorted(set(selection.roulette(torch.tensor([3.0, 1.0, 3.0]), 8).tolist()))
        [1]

    References:
        J. H. Holland, *Adaptation in natural and artificial systems*, 1975.
    """
    _check_size(fitness, k)
    costs = ranked(fitness, maximize).double()
    finite = costs.isfinite()
    best = costs == -torch.inf
    if bool(best.any()):
        # Beside an infinitely good member, finite ones have probability zero.
        weights = best.double()
    else:
        worst = torch.where(finite, costs, torch.full_like(costs, -torch.inf)).amax() if len(costs) else costs.sum()
        weights = torch.where(finite, worst - costs, torch.zeros_like(costs))
        if not bool((weights > 0).any()):
            weights = finite.double() if bool(finite.any()) else torch.ones_like(costs)
    if k == 0:
        return torch.zeros(0, dtype=torch.int64, device=costs.device)
    edges = (weights / weights.sum()).cumsum(0)
    device = costs.device if generator is None else generator.device
    drawn = torch.rand(k, generator=generator, dtype=torch.float64, device=device).to(costs.device) * edges[-1]
    return torch.searchsorted(edges, drawn, right=True).clamp_(max=int(weights.nonzero().amax()))


def _check_size(fitness: Tensor, k: int) -> None:
    if k < 0:
        raise ValueError(f"{k} members cannot be chosen")
    if k and not len(fitness):
        raise ValueError(f"{k} members cannot be chosen from none")
