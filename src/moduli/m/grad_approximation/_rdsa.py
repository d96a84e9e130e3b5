"""Random directions."""

from __future__ import annotations

from typing import Any

from ...optim import Chainable
from ._randomized import RandomizedFDM


class RDSA(RandomizedFDM):
    r"""Random directions: the same as `SPSA` with normal directions.

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
        >>> opt = mo.Optimizer([w], m.RDSA(), m.LR(0.1))
        >>> for _ in range(150):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 0.1)
        True

    References:
        L. A. Prashanth et al., "Adaptive system optimization using random directions stochastic approximation", IEEE Trans.
        Automatic Control 62 (2017).
    """

    def __init__(
        self,
        *,
        h: Any = 1e-3,
        n_samples: int = 1,
        formula: str = "central2",
        distribution: str = "gaussian",
        pre_generate: bool = True,
        seed: int | None = None,
        modules: Chainable | None = None,
    ) -> None:
        super().__init__(
            h=h,
            n_samples=n_samples,
            formula=formula,
            distribution=distribution,
            pre_generate=pre_generate,
            seed=seed,
            modules=modules,
        )
