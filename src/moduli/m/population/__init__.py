"""Links over the members of a population."""

from ._pbt import *
from ._pso import *

__all__ = ["CEM", "DE", "GA", "PBT", "PSO"]
