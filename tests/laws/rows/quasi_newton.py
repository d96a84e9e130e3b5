"""Quasi-Newton links, each with a line search."""

from laws.registry import Row
from moduli import m

__all__ = ["ROWS"]


def _row(name, *, steps=120, tolerance=1e-6, after=m.StrongWolfe, **settings):
    return Row(
        name,
        lambda: [getattr(m, name)(**settings), after()],
        steps=steps,
        tolerance=tolerance,
        closure=True,
        population=False,
    )


ROWS = [
    _row("LBFGS"),
    _row("LSR1"),
    _row("BFGS"),
    _row("FletcherVMM"),
    _row("DFP"),
    _row("ProjectedNewtonRaphson", steps=300, tolerance=1e-3),
    _row("ThomasOptimalMethod", steps=300, tolerance=1e-3),
    Row(
        "GradientCorrection",
        lambda: [m.DFP(inner=m.GradientCorrection()), m.StrongWolfe()],
        steps=200,
        tolerance=1e-3,
        closure=True,
        population=False,
    ),
    Row(
        "LSR1, restarting",
        lambda: [m.LSR1(ptol_restart=True, gtol_restart=True, scale_first=True), m.StrongWolfe()],
        steps=120,
        tolerance=1e-6,
        closure=True,
        population=False,
    ),
    _row("SR1"),
    _row("PSB"),
    _row("SSVM"),
    _row("Horisho"),
    _row("ShorR", tolerance=1e-3),
    _row("ProjectedGradientMethod"),
    _row("BroydenGood", steps=300, tolerance=1e-3),
    _row("BroydenBad", steps=300, tolerance=1e-3),
    _row("McCormick", steps=300, tolerance=1e-3),
    _row("Pearson", steps=300, tolerance=1e-3),
    _row("Greenstadt1", steps=300, tolerance=1e-3),
    _row("Greenstadt2", steps=300, tolerance=1e-3),
    _row("ICUM", steps=300, tolerance=1e-3),
    _row("DiagonalBFGS", steps=500, tolerance=1e-3),
    _row("DiagonalSR1", steps=500, tolerance=1e-3),
    _row("DiagonalQuasiCauchi", steps=500, tolerance=1e-3),
    _row("DiagonalWeightedQuasiCauchi", steps=500, tolerance=1e-3),
    _row("DNRTR", steps=500, tolerance=1e-3),
    _row("NewDQN", steps=500, tolerance=1e-3),
    Row(
        "SG2",
        lambda: [m.SG2(seed=0), m.Backtracking()],
        closure=True,
        random=True,
        pieces=False,
        population=False,
        complex=False,
        half=False,
    ),
]
