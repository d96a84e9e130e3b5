"""Simultaneous perturbation."""

from __future__ import annotations

from ._randomized import RandomizedFDM


class SPSA(RandomizedFDM):
    r"""Simultaneous perturbation: $g = \Delta\,(f(x + h\Delta) - f(x - h\Delta)) / 2h$ with random signs $\Delta$.

    Args:
        h: The length of the differences.
        n_samples: How many directions.
        formula: As for `FDM`.
        distribution: "rademacher", "normal", "uniform" or "sphere".
        pre_generate: Draw the directions once per step, so that a line search sees one function.
        seed: Draws from a generator of its own, which is saved; None for torch's.
        modules: Links that see this gradient; all that follow by default.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> _ = torch.manual_seed(0)
        >>> opt = mo.Optimizer([w], m.SPSA(), m.LR(0.1))
        >>> for _ in range(150):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 0.1)
        True

    References:
        J. C. Spall, "Multivariate stochastic approximation using a simultaneous perturbation gradient approximation", IEEE
        Trans. Automatic Control 37 (1992).
    """
