"""Links that try many models around the parameters of one."""

from __future__ import annotations

from .. import evolve
from ._search_link import ModelLink

__all__ = ["ARS", "CMAES", "GuidedES", "OpenES", "PGPE", "SNES", "XNES"]


class ARS(ModelLink):
    r"""Emits the mean of the best directions, weighted by the differences of their losses over the deviation of these.

    Args:
        population: How many models are tried, two for each direction.
        top: How many directions are kept; None for all.
        sigma: Their standard deviation around the parameters.
        rank: Draw noise of this rank for matrices. Models are then not made where the closure is a function of the model,
            `mo.closure(lambda net: ...)`: products serve all of them, as in `Population.around`. None for full noise.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(net, m.ARS(population=32), m.LR(0.05))
        >>> for _ in range(100):
        ...     loss = opt.step(mo.closure(lambda f: (f(x) - y).square().mean()))
        >>> bool((net(x) - y).abs().max() < 0.3)
        True

    References:
        H. Mania, A. Guy, B. Recht, "Simple random search of static linear policies is competitive for reinforcement learning",
        NeurIPS 2018, algorithm 2.
    """

    left_out = ()
    search_class = evolve.ARS


class CMAES(ModelLink):
    r"""Moves the parameters to the weighted mean of the best of a Gaussian whose covariance learns from the steps.

    Args:
        population: How many models are tried; None for 4 + 3 ln P.
        sigma: The first step size.
        covariance: "full" (P x P), or "separable".
        restarts: None, "ipop" or "bipop": begin again with larger populations where the search has converged.
        max_restarts: How often at most.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(net, m.CMAES(sigma=0.5))
        >>> for _ in range(80):
        ...     loss = opt.step(mo.closure(lambda f: (f(x) - y).square().mean()))
        >>> bool((net(x) - y).abs().max() < 0.1)
        True

    References:
        N. Hansen, "The CMA evolution strategy: a tutorial", 2016. R. Ros, N. Hansen, "A simple modification in CMA-ES achieving
        linear time and space complexity", PPSN 2008. N. Hansen, "Benchmarking a BI-population CMA-ES on the BBOB-2009
        function testbed", GECCO 2009.
    """

    search_class = evolve.CMAES
    left_out = ("restart_region",)


class GuidedES(ModelLink):
    r"""Emits a gradient estimate from noise that is stretched along the subspace of the latest estimates.

    Args:
        population: How many models are tried.
        sigma: Their standard deviation around the parameters.
        subspace: How many estimates span the subspace.
        alpha: How much of the noise is in the whole space.
        beta: Scale of the estimate.
        shape: How losses enter: "ranks" (centred ranks), "standardize" or "raw".
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(net, m.GuidedES(population=32), m.Adam(), m.LR(0.1))
        >>> for _ in range(80):
        ...     loss = opt.step(mo.closure(lambda f: (f(x) - y).square().mean()))
        >>> bool((net(x) - y).abs().max() < 0.3)
        True

    References:
        N. Maheswaranathan, L. Metz, G. Tucker, D. Choi, J. Sohl-Dickstein, "Guided evolutionary strategies", ICML 2019.
    """

    search_class = evolve.GuidedES


class OpenES(ModelLink):
    r"""Emits an estimate of the gradient of $E[f(x + \sigma\epsilon)]$, for the next link to use.

    $u = \frac{1}{n\sigma}\sum_i f(x + \sigma\epsilon_i)\,\epsilon_i$; the noise is drawn again from seeds, so that memory does not
    grow with the number of models.

    Args:
        population: How many models are tried.
        sigma: Their standard deviation around the parameters.
        antithetic: Whether models come in pairs, mirrored at the parameters.
        shape: How losses enter: "ranks" (centred ranks), "standardize" or "raw".
        rank: Draw noise of this rank for matrices. Models are then not made where the closure is a function of the model,
            `mo.closure(lambda net: ...)`: products serve all of them, as in `Population.around`. None for full noise.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(net, m.OpenES(population=32), m.Adam(), m.LR(0.1))
        >>> for _ in range(80):
        ...     loss = opt.step(mo.closure(lambda f: (f(x) - y).square().mean()))
        >>> bool((net(x) - y).abs().max() < 0.3)
        True

    References:
        T. Salimans, J. Ho, X. Chen, S. Sidor, I. Sutskever, "Evolution strategies as a scalable alternative to reinforcement
        learning", 2017, equation (1).
    """

    left_out = ()
    search_class = evolve.OpenES


class PGPE(ModelLink):
    r"""Emits an estimate of the gradient, and adapts the standard deviation of every parameter.

    Args:
        population: How many models are tried.
        sigma: The first standard deviation.
        sigma_lr: Learning rate of the deviations.
        max_change: The largest relative change of a deviation.
        shape: How losses enter: "ranks" (centred ranks), "standardize" or "raw".
        rank: Draw noise of this rank for matrices. Models are then not made where the closure is a function of the model,
            `mo.closure(lambda net: ...)`: products serve all of them, as in `Population.around`. None for full noise.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(net, m.PGPE(population=32), m.Adam(), m.LR(0.1))
        >>> for _ in range(80):
        ...     loss = opt.step(mo.closure(lambda f: (f(x) - y).square().mean()))
        >>> bool((net(x) - y).abs().max() < 0.3)
        True

    References:
        F. Sehnke, C. Osendorfer, T. Rückstiess, A. Graves, J. Peters, J. Schmidhuber, "Parameter-exploring policy gradients",
        Neural Networks 23 (2010), algorithm 1.
    """

    left_out = ()
    search_class = evolve.PGPE


class SNES(ModelLink):
    r"""Moves the parameters along the natural gradient of the expected loss, and adapts a deviation for each.

    Args:
        population: How many models are tried; None for 4 + 3 ln P.
        sigma: The first standard deviation.
        lr_mean: Learning rate of the parameters.
        lr_sigma: Learning rate of the deviations; None for the paper's.
        antithetic: Whether models come in pairs, mirrored at the parameters.
        rank: Draw noise of this rank for matrices. Models are then not made where the closure is a function of the model,
            `mo.closure(lambda net: ...)`: products serve all of them, as in `Population.around`. None for full noise.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(net, m.SNES(population=16))
        >>> for _ in range(60):
        ...     loss = opt.step(mo.closure(lambda f: (f(x) - y).square().mean()))
        >>> bool((net(x) - y).abs().max() < 0.3)
        True

    References:
        T. Schaul, T. Glasmachers, J. Schmidhuber, "High dimensions and heavy tails for natural evolution strategies", GECCO
        2011, algorithm 2.
    """

    left_out = ()
    search_class = evolve.SNES


class XNES(ModelLink):
    r"""Moves the parameters along the natural gradient of the expected loss under a Gaussian with any covariance (P x P).

    Args:
        population: How many models are tried; None for 4 + 3 ln P.
        sigma: The first standard deviation.
        lr_mean: Learning rate of the parameters.
        lr_sigma: Learning rate of the step size; None for the paper's.
        lr_shape: Learning rate of the shape; None for the paper's.
        seed: Decides every random number.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 1)
        >>> x, y = torch.ones(1, 2), torch.full((1, 1), 3.0)
        >>> opt = mo.Optimizer(net, m.XNES(population=16))
        >>> for _ in range(60):
        ...     loss = opt.step(mo.closure(lambda f: (f(x) - y).square().mean()))
        >>> bool((net(x) - y).abs().max() < 0.3)
        True

    References:
        T. Glasmachers, T. Schaul, Y. Sun, D. Wierstra, J. Schmidhuber, "Exponential natural evolution strategies", GECCO 2010,
        algorithm 1.
    """

    search_class = evolve.XNES
