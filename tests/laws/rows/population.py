"""Links over the members of a population: those that decide for each member, and those that move members relative to others.

The first kind equals N separate optimizers; the second is given a population by every law.
"""

from laws.registry import Row
from moduli import m

__all__ = ["ROWS"]

_LEAKS = {"leaks": "a thousand generations take long; what is kept is in the class that all share: see DE"}
_PBEST = {"strategy": "current-to-pbest/1"}


def _row(name, make, **options):
    return Row(name, make, **{"closure": True, "random": True, "members": 12, "steps": 400, **options})


ROWS = [
    Row("Backtracking, of members too", lambda: [m.Backtracking(init=2.0)], closure=True),
    Row("BFGS, StrongWolfe, of members too", lambda: [m.BFGS(), m.StrongWolfe()], closure=True),
    Row("LBFGS, Backtracking, of members too", lambda: [m.LBFGS(history_size=5), m.Backtracking()], closure=True),
    _row("PSO", lambda: [m.PSO(seed=1)], pieces=False, tolerance=1e-8),
    _row("PSO, ring", lambda: [m.PSO(topology="ring", seed=1)], pieces=False, tolerance=1e-6, skip=_LEAKS),
    _row("PSO, informed", lambda: [m.PSO(topology="informed", seed=1)], pieces=False, tolerance=1e-8, skip=_LEAKS),
    _row("DE", lambda: [m.DE(seed=1)], tolerance=0.1),
    _row("JADE", lambda: [m.DE(**_PBEST, adapt="jade", seed=1)], tolerance=1e-8, skip=_LEAKS),
    _row("SHADE", lambda: [m.DE(**_PBEST, adapt="shade", seed=1)], tolerance=1e-8, skip=_LEAKS),
    _row("GA", lambda: [m.GA(seed=1)], members=64, tolerance=1e-4, skip=_LEAKS),
    _row("CEM", lambda: [m.CEM(sigma=2.0, smoothing=0.4, seed=1)], members=32, tolerance=1e-3, skip=_LEAKS),
    _row("Adam, LR, PSO", lambda: [m.Adam(), m.LR(0.05), m.PSO(seed=1)], pieces=False, tolerance=0.01, skip=_LEAKS),
    _row("Adam, LR, DE", lambda: [m.Adam(), m.LR(0.05), m.DE(seed=1)], tolerance=0.01, skip=_LEAKS),
    _row(
        "PBT",
        lambda: [m.Adam(), m.LR(0.05), m.PBT({"lr.lr": (1e-3, 0.3)}, every=3, seed=1)],
        tolerance=0.01,
    ),
]
