"""Links over the members of a population."""

from ._pso import PSO

__all__ = ["PSO"]
