"""Finite differences: their formulas, and the gradient coordinate by coordinate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...optim import Chainable
from ._base import GradApproximator

Formula = tuple[tuple[int, ...], tuple[float, ...]]
"""Points in units of h, and weights; the derivative is the weighted sum over h."""

FORMULAS: dict[str, Formula] = {
    "forward": ((0, 1), (-1.0, 1.0)),
    "forward2": ((0, 1), (-1.0, 1.0)),
    "backward": ((-1, 0), (-1.0, 1.0)),
    "backward2": ((-1, 0), (-1.0, 1.0)),
    "central": ((-1, 1), (-0.5, 0.5)),
    "central2": ((-1, 1), (-0.5, 0.5)),
    "forward3": ((0, 1, 2), (-1.5, 2.0, -0.5)),
    "backward3": ((-2, -1, 0), (0.5, -2.0, 1.5)),
    "central4": ((-2, -1, 1, 2), (1 / 12, -2 / 3, 2 / 3, -1 / 12)),
    "forward4": ((0, 1, 2, 3), (-11 / 6, 3.0, -1.5, 1 / 3)),
    "forward5": ((0, 1, 2, 3, 4), (-25 / 12, 4.0, -3.0, 4 / 3, -1 / 4)),
}


def check_formula(name: str, formula: str) -> None:
    """Refuse an unknown formula."""
    if formula not in FORMULAS:
        raise ValueError(f"{name}: formula is {formula!r}; it can be {', '.join(FORMULAS)}")


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
        h, formula = float(setting["h"]), FORMULAS[setting["formula"]]
        if 0 in formula[0] and loss is None:
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

                    flat_out[i] = derivative(evaluate_at, formula, h, loss)
        return grads, loss


def derivative(at: Callable[[int], Tensor], formula: Formula, h: float, centre: Any) -> Tensor:
    """The derivative of a function of a number.

    Args:
        at: The value at a multiple of h.
        formula: The points and their weights.
        h: The length of the differences.
        centre: The value at zero, if that is one of the points.
    """
    total: Any = 0.0
    for point, weight in zip(*formula, strict=True):
        total = total + weight * (at(point) if point else centre)
    slope: Tensor = total / h
    return slope
