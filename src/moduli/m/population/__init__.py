"""Links over the members of a population."""

from ._cem import CEM
from ._de import DE
from ._ga import GA
from ._pbt import PBT
from ._pso import PSO

__all__ = ["CEM", "DE", "GA", "PBT", "PSO"]
