"""Finite differences, coordinate by coordinate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable
from ._base import GradApproximator
from ._formulas import FORMULAS, check_formula, derivative


class FDM(GradApproximator):
    r"""The gradient by finite differences along every coordinate, $\partial_i f \approx (f(x + h e_i) - f(x - h e_i)) / 2h$.

    Args:
        h: The length of the differences.
        formula: "forward", "backward", "central" (2 points), "forward3", "backward3", "forward4", "forward5", "central4".
        modules: Links that see this gradient; all that follow by default.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
        >>> opt = mo.Optimizer([w], m.FDM(), m.BFGS(), m.StrongWolfe())
        >>> for _ in range(25):
        ...     _ = opt.step(mo.closure(lambda: (w**4).sum() + (w**2).sum()))
        >>> bool(w.abs().max() < 1e-4)
        True

    References:
        J. Nocedal, S. J. Wright, Numerical Optimization, 2nd ed., section 8.1.
    """

    def __init__(self, *, h: Any = 1e-3, formula: str = "central", modules: Chainable | None = None) -> None:
        check_formula("FDM", formula)
        super().__init__({"h": h, "formula": formula}, modules)

    def approximate(
        self, value: Callable[[], Tensor], params: list[Tensor], loss: Tensor | None, setting: Any
    ) -> tuple[list[Tensor], Tensor | None]:
        """Two evaluations per coordinate, or as many as the formula has."""
        grads = [torch.zeros(param.shape, dtype=param.dtype, device=param.device) for param in params]
        h, formula = float(setting["h"]), setting["formula"]
        if 0 in FORMULAS[formula][0] and loss is None:
            loss = value()
        for param, grad in zip(params, grads, strict=True):
            views = [(torch.view_as_real(param), torch.view_as_real(grad))] if param.is_complex() else [(param, grad)]
            for own, out in views:
                flat_out = out.view(-1)
                for i in range(own.numel()):
                    index = torch.unravel_index(torch.tensor(i), own.shape) if own.dim() else ()
                    start = own[index].clone()

                    def evaluate_at(k: int, own: Tensor = own, index: Any = index, start: Tensor = start) -> Tensor:
                        own[index] = start + k * h
                        found = value()
                        own[index] = start
                        return found

                    flat_out[i], loss = derivative(evaluate_at, formula, h, loss)
        return grads, loss
