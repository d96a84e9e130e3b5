"""Links over the members of a population."""

from ._pbt import PBT
from ._pso import CEM, DE, GA, PSO

__all__ = ["CEM", "DE", "GA", "PBT", "PSO"]
