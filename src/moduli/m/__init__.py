"""The catalogue of links."""

from ._adam import Adam
from ._lr import LR
from .line_search import AdaptiveBacktracking, Backtracking, LineSearchBase, StrongWolfe
from .quasi_newton import LBFGS

__all__ = ["LBFGS", "LR", "Adam", "AdaptiveBacktracking", "Backtracking", "LineSearchBase", "StrongWolfe"]
