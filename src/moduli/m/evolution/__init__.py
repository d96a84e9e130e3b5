"""Links that try many models around the parameters of one."""

from ._links import ARS, CMAES, PGPE, SNES, XNES, GuidedES, OpenES

__all__ = ["ARS", "CMAES", "GuidedES", "OpenES", "PGPE", "SNES", "XNES"]
