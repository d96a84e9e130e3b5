"""Gradients from values."""

from laws.registry import Row
from moduli import m

__all__ = ["ROWS"]


def _row(name, make, **more):
    settings = {"closure": True, "population": False, "random": True, "pieces": False, "half": False} | more
    return Row(name, make, **settings)


_ONE = {
    "thawed": "one number moves at each step, and it is not its turn",
    "grown": "one number moves at each step, and it is not its turn",
    "reordered": "numbers take turns in the order of the parameters",
}

ROWS = [
    _row("FDM", lambda: [m.FDM(), m.LR(0.05)], random=False, pieces=True),
    _row("RandomizedFDM", lambda: [m.RandomizedFDM(seed=0, n_samples=8), m.LR(0.02)], steps=800),
    _row("SPSA", lambda: [m.SPSA(seed=0, n_samples=8), m.LR(0.02)], steps=800),
    _row("SPSA1", lambda: [m.SPSA1(seed=0, n_samples=8), m.LR(1e-6)], target=""),
    _row(
        "CD",
        lambda: [m.CD(), m.AdaptiveBisection()],
        random=False,
        steps=2000,
        tolerance=1e-2,
        complex=False,
        skip=_ONE,
    ),
    _row("RDSA", lambda: [m.RDSA(seed=0, n_samples=8), m.LR(0.02)], steps=800),
    _row("GaussianSmoothing", lambda: [m.GaussianSmoothing(seed=0, n_samples=20), m.LR(0.02)], steps=600),
    _row("MeZO", lambda: [m.MeZO(seed=0, n_samples=8), m.LR(0.02)], steps=800),
    _row("ForwardGradient", lambda: [m.ForwardGradient(seed=0, n_samples=8), m.LR(0.02)], steps=800),
]
