"""Trust regions over several Hessians."""

from laws.registry import Row
from moduli import m

__all__ = ["ROWS"]


def _row(name, make, steps=100, **more):
    settings = {"complex": False, "half": False} | more
    return Row(name, make, steps=steps, tolerance=1e-8, closure=True, population=False, **settings)


ROWS = [
    _row("TrustCG", lambda: [m.TrustCG(m.Newton())]),
    _row("TrustCG of LBFGS", lambda: [m.TrustCG(m.LBFGS())], complex=True),
    _row("TrustExact", lambda: [m.TrustExact(m.Newton())]),
    _row("Dogleg", lambda: [m.Dogleg(m.Newton())]),
    _row("CubicRegularization", lambda: [m.CubicRegularization(m.Newton())]),
    _row("LevenbergMarquardt", lambda: [m.LevenbergMarquardt(m.Newton())]),
    _row(
        "LevenbergMarquardt of GaussNewton",
        lambda: [m.LevenbergMarquardt(m.GaussNewton(), y=1.0)],
        target="least squares",
    ),
]
