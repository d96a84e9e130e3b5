"""Line searches."""

from laws.registry import Row
from moduli import m

__all__ = ["ROWS"]


def _row(name, make, **more):
    return Row(name, make, closure=True, population=False, **more)


ROWS = [
    _row("Backtracking", lambda: [m.Backtracking()]),
    _row("AdaptiveBacktracking", lambda: [m.AdaptiveBacktracking()]),
    _row("AdaptiveBisection", lambda: [m.AdaptiveBisection()]),
    _row("ScipyMinimizeScalar", lambda: [m.ScipyMinimizeScalar()]),
    _row("StrongWolfe", lambda: [m.StrongWolfe()]),
]
