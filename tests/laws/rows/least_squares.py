"""Least squares."""

from laws.registry import Row
from moduli import m

__all__ = ["ROWS"]


ROWS = [
    Row(
        "SumOfSquares",
        lambda: [m.SumOfSquares(), m.LBFGS(), m.StrongWolfe()],
        target="least squares",
        closure=True,
        population=False,
        complex=False,
        half=False,
    ),
    Row(
        "GaussNewton",
        lambda: [m.GaussNewton()],
        steps=20,
        target="least squares",
        tolerance=1e-8,
        closure=True,
        population=False,
        complex=False,
        half=False,
    ),
]
