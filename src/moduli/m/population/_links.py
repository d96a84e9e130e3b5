"""The links around searches over the members of a population: each names its search, whose settings it has."""

from __future__ import annotations

from ... import evolve
from ..evolution._adapter import PopulationLink


class CEM(PopulationLink):
    r"""Draws members from a Gaussian that follows the best of them.

    Args:
        sigma: The first standard deviation around the mean of the members; None for theirs.
        elites: The share of members that the Gaussian follows.
        smoothing: How much of the new Gaussian is taken.
        noise: Added to the deviations, so that they do not vanish too early.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> _ = torch.manual_seed(0)
        >>> pop = mo.Population.of(torch.nn.Linear, 32, 2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(pop, m.CEM())
        >>> for _ in range(40):
        ...     losses = opt.step(mo.closure(lambda net: (net(x) - y).square().mean()))
        >>> opt.attrs["best_loss"] < 1e-2
        True

    References:
        R. Y. Rubinstein, "The cross-entropy method for combinatorial and continuous optimization", Methodology and Computing in
        Applied Probability 1 (1999).
    """

    search_class = evolve.CEM


class DE(PopulationLink):
    r"""Tries differences of members added to members, and keeps what is better.

    Args:
        strategy: "rand/1", "best/1" or "current-to-pbest/1".
        adapt: None, "jade" or "shade": learn scale and rate from what has worked.
        scale: The factor of differences, F.
        rate: The share of coordinates taken from a trial, CR.
        p: The share of best members, for "current-to-pbest/1".
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> _ = torch.manual_seed(0)
        >>> pop = mo.Population.of(torch.nn.Linear, 32, 2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(pop, m.DE())
        >>> for _ in range(60):
        ...     losses = opt.step(mo.closure(lambda net: (net(x) - y).square().mean()))
        >>> opt.attrs["best_loss"] < 1e-3
        True

    References:
        R. Storn, K. Price, "Differential evolution", Journal of Global Optimization 11 (1997). J. Zhang, A. C. Sanderson, "JADE",
        IEEE TEC 13 (2009). R. Tanabe, A. Fukunaga, "Success-history based parameter adaptation for differential evolution",
        CEC 2013.
    """

    search_class = evolve.DE


class GA(PopulationLink):
    r"""Tournaments choose parents, simulated binary crossover and polynomial mutation make children; elites stay.

    Args:
        elites: How many of the best stay.
        tournament: How many compete to become a parent.
        crossover: The probability that two parents mix.
        eta: How near children are to their parents.
        mutation: The probability that a coordinate mutates; None for one in P.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> _ = torch.manual_seed(0)
        >>> pop = mo.Population.of(torch.nn.Linear, 32, 2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(pop, m.GA())
        >>> for _ in range(60):
        ...     losses = opt.step(mo.closure(lambda net: (net(x) - y).square().mean()))
        >>> opt.attrs["best_loss"] < 0.1
        True

    References:
        K. Deb, R. B. Agrawal, "Simulated binary crossover for continuous search space", Complex Systems 9 (1995).
    """

    search_class = evolve.GA
