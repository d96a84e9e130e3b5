"""Links that try many models around the parameters of one."""

from ._ars import ARS
from ._cmaes import CMAES
from ._guided_es import GuidedES
from ._open_es import OpenES
from ._pgpe import PGPE
from ._snes import SNES
from ._xnes import XNES

__all__ = ["ARS", "CMAES", "GuidedES", "OpenES", "PGPE", "SNES", "XNES"]
