"""Finite-difference formulas for a directional derivative."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# name: (points in units of h, weights); the derivative is the weighted sum over h.
FORMULAS: dict[str, tuple[tuple[int, ...], tuple[float, ...]]] = {
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


def derivative(
    at: Callable[[int], Tensor], formula: str, h: float, centre: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The derivative, and the value in the middle where it is known then.

    Args:
        at: The value at a multiple of h.
        formula: One of `FORMULAS`.
        h: The length of a step.
        centre: The value at 0, if known.
    """
    points, weights = FORMULAS[formula]
    total: Tensor | None = None
    for point, weight in zip(points, weights, strict=True):
        if point == 0:
            centre = at(0) if centre is None else centre
            value = centre
        else:
            value = at(point)
        total = weight * value if total is None else total + weight * value
    if total is None:
        raise ValueError(f"the formula {formula!r} has no points")
    return total / h, centre
