"""Links over the members of a population."""

from ._links import CEM, DE, GA
from ._pbt import PBT
from ._pso import PSO

__all__ = ["CEM", "DE", "GA", "PBT", "PSO"]
