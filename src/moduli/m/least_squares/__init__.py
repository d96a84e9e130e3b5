"""Least squares: links for closures that return a vector of residuals r, whose loss is half of |r|^2."""

from ._gauss_newton import GaussNewton
from ._sum_of_squares import SumOfSquares

__all__ = [
    "GaussNewton",
    "SumOfSquares",
]
