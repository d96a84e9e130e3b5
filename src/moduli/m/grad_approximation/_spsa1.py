"""Simultaneous perturbation with one measurement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable
from .._checks import positive
from ._randomized import RandomizedFDM


class SPSA1(RandomizedFDM):
    r"""One evaluation for a gradient: $g = \Delta\, f(x + h\Delta) / h$ with random signs $\Delta$.

    It is unbiased up to an error of order h, with a variance that grows as $f^2 / h^2$: for losses that can't be evaluated
    twice under the same conditions, and near zero.

    Args:
        h: The length of the perturbation.
        n_samples: How many directions.
        pre_generate: Draw the directions once per step, so that a line search sees one function.
        seed: Draws from a generator of its own, which is saved; None for torch's.
        modules: Links that see this gradient; all that follow by default.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([1.0, -1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.SPSA1(h=0.5, n_samples=16, seed=0), m.LR(0.05))
        >>> for _ in range(200):
        ...     _ = opt.step(mo.closure(lambda: (w**2).sum()))
        >>> bool(w.abs().max() < 0.3)
        True

    References:
        J. C. Spall, "A one-measurement form of simultaneous perturbation stochastic approximation", Automatica 33 (1997).
    """

    def __init__(
        self,
        *,
        h: Any = 1e-3,
        n_samples: int = 1,
        pre_generate: bool = False,
        seed: int | None = None,
        modules: Chainable | None = None,
    ) -> None:
        positive("SPSA1", h=h)
        super().__init__(h=h, n_samples=n_samples, pre_generate=pre_generate, seed=seed, modules=modules)

    def approximate(
        self, value: Callable[[], Tensor], params: list[Tensor], loss: Tensor | None, setting: Any
    ) -> tuple[list[Tensor], Tensor | None]:
        """One evaluation per direction."""
        h, count = float(setting["h"]), int(setting["n_samples"])
        start = [param.detach().clone() for param in params]
        grads = [torch.zeros_like(param) for param in params]
        for k in range(count):
            z = self.direction(params, k, setting)
            for param, x, v in zip(params, start, z, strict=True):
                param.copy_(x + h * v)
            slope = value() / (h * count)
            for grad, v in zip(grads, z, strict=True):
                grad.add_(v * slope.to(v.dtype))
        for param, x in zip(params, start, strict=True):
            param.copy_(x)
        return grads, loss
