"""Residuals as a loss for links that know nothing of residuals."""

from __future__ import annotations

from ...optim import Module, Need, Objective


class SumOfSquares(Module):
    r"""Lets the closure return a vector of residuals, whose loss is $\frac12 \sum_i r_i^2$ for all links of the chain.

    So that any optimizer can be compared with `GaussNewton` on the same closure, with the same gradient $J^Tr$.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0]))
        >>> _ = mo.Optimizer([w], m.SumOfSquares(), m.LR(0.5)).step(mo.closure(lambda: w * 1.0))
        >>> w.data
        tensor([1.5000, 0.5000])
    """

    needs = frozenset({Need.GRADIENT, Need.RESIDUALS})

    def __init__(self) -> None:
        super().__init__()

    def apply(self, objective: Objective) -> Objective:
        """Nothing: that the link is there says what the closure returns."""
        return objective
