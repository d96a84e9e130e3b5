"""Links around searches, for one model."""

from laws.registry import Row
from moduli import m

__all__ = ["ROWS"]


_LEAKS = {
    "leaks": "a thousand generations take long; what is kept is in the class that all share: see OpenES and CMAES"
}


def _row(name, make, **options):
    skip = None if name in ("OpenES", "CMAES") else _LEAKS
    return Row(name, make, closure=True, random=True, population=False, skip=skip, **options)


ROWS = [
    _row("OpenES", lambda: [m.OpenES(population=16), m.Adam(), m.LR(0.1)], steps=200, tolerance=0.01),
    _row("PGPE", lambda: [m.PGPE(population=16), m.Adam(), m.LR(0.1)], steps=200, tolerance=0.03),
    _row("ARS", lambda: [m.ARS(population=16), m.LR(0.1)], steps=200, tolerance=0.05),
    _row("GuidedES", lambda: [m.GuidedES(population=16), m.Adam(), m.LR(0.1)], steps=200, tolerance=0.03),
    _row("SNES", lambda: [m.SNES(population=16, sigma=0.5)], steps=200, tolerance=1e-8),
    _row("XNES", lambda: [m.XNES(population=16, sigma=0.5)], steps=200),
    _row("CMAES", lambda: [m.CMAES(sigma=0.5)], steps=200, tolerance=1e-8),
    _row("CMAES, separable", lambda: [m.CMAES(sigma=0.5, covariance="separable")], steps=200),
]
