"""Second-order links: Newton's method and its relatives, with the Hessian or products with it."""

from ._newton import Newton
from ._newton_cg import NewtonCG, NewtonCGSteihaug

__all__ = ["Newton", "NewtonCG", "NewtonCGSteihaug"]
