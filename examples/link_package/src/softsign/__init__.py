"""A package that adds to moduli: a link, a chain, a problem and a merge recipe."""

from ._link import SoftSign, soft_descent
from ._problem import ripples
from ._recipe import median

__all__ = ["SoftSign", "median", "ripples", "soft_descent"]
