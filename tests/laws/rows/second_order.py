"""Second-order links."""

import torch

from laws.registry import Row
from moduli import m

__all__ = ["ROWS"]


def _row(name, make, **more):
    settings = {"closure": True, "population": False, "complex": False, "half": False} | more
    return Row(name, make, **settings)


ROWS = [
    _row("Newton", lambda: [m.Newton()], steps=5, tolerance=1e-10),
    # Where the curvature is negative, steps are long, and rounding grows with them unless a line search follows.
    _row("NewtonCG", lambda: [m.NewtonCG(), m.Backtracking()], steps=10, tolerance=1e-8),
    _row("NewtonCGSteihaug", lambda: [m.NewtonCGSteihaug()], steps=60, tolerance=1e-8),
    _row("NystromSketchAndSolve", lambda: [m.NystromSketchAndSolve(seed=0)], steps=60, random=True, pieces=False),
    _row("NystromPCG", lambda: [m.NystromPCG(seed=0)], steps=20, random=True, pieces=False),
    _row("SubspaceNewton", lambda: [m.SubspaceNewton(), m.Backtracking()], steps=200),
    _row("AdaHessian", lambda: [m.AdaHessian(seed=0), m.LR(0.1)], steps=500, random=True, pieces=False),
    _row("SophiaH", lambda: [m.SophiaH(seed=0), m.LR(0.02)], steps=1000, tolerance=0.05, random=True, pieces=False),
    _row("ESGD", lambda: [m.ESGD(seed=0, update_freq=1), m.LR(0.1)], steps=800, random=True, pieces=False),
    _row(
        "AdaHessian, its moments through links",
        lambda: [m.AdaHessian(seed=0, exp_avg_tfm=m.ClipValue(1.0), D_exp_avg_sq_tfm=m.Mul(2.0)), m.LR(0.1)],
        random=True,
        pieces=False,
    ),
    _row(
        "SophiaH, its moments through links",
        lambda: [m.SophiaH(seed=0, exp_avg_tfm=m.Mul(0.5), D_exp_avg_tfm=m.Abs()), m.LR(0.02)],
        steps=1000,
        tolerance=0.05,
        random=True,
        pieces=False,
    ),
    _row(
        "ESGD, its squares through links",
        lambda: [m.ESGD(seed=0, update_freq=1, Hz_sq_acc_tfm=m.Mul(1.5)), m.LR(0.1)],
        steps=800,
        random=True,
        pieces=False,
    ),
    _row("TwoPointNewton", lambda: [m.TwoPointNewton(), m.Backtracking()], steps=5, tolerance=1e-10),
    _row("SixthOrder3P", lambda: [m.SixthOrder3P(), m.Backtracking()], steps=5, tolerance=1e-10),
    _row("SixthOrder3PM2", lambda: [m.SixthOrder3PM2(), m.Backtracking(maxiter=40)], steps=5, tolerance=1e-10),
    _row("SixthOrder5P", lambda: [m.SixthOrder5P(), m.Backtracking()], steps=5, tolerance=1e-10),
    _row("InverseFreeNewton", lambda: [m.InverseFreeNewton()], steps=80, tolerance=1e-6),
    _row("MatrixMomentum", lambda: [m.MatrixMomentum(0.02, mu=0.05)], steps=800, tolerance=1e-2),
    _row(
        "MatrixMomentum, adaptive",
        lambda: [m.MatrixMomentum(0.02, mu=0.5, adaptive=True, adapt_freq=2)],
        steps=800,
        tolerance=1e-2,
    ),
    _row(
        "SubspaceNewton, by eigenvalues",
        lambda: [m.SubspaceNewton(eigval_fn=torch.abs, eigv_tol=1e-6, truncate=50), m.Backtracking()],
        steps=200,
    ),
    _row(
        "NystromSketchAndSolve, damped",
        lambda: [m.NystromSketchAndSolve(seed=0, truncate=50, damping=1e-3, rdamping=1e-3, eigv_tol=1e-8)],
        steps=60,
        random=True,
        pieces=False,
    ),
    _row("PSGDDenseNewton", lambda: [m.PSGDDenseNewton(seed=0), m.LR(0.2)], random=True, pieces=False),
    _row("PSGDKronNewton", lambda: [m.PSGDKronNewton(seed=0), m.LR(0.2)], random=True, pieces=False),
    _row("PSGDLRANewton", lambda: [m.PSGDLRANewton(rank=2, seed=0), m.LR(0.2)], random=True, pieces=False),
    _row(
        "NaturalGradient",
        lambda: [m.NaturalGradient(), m.LR(0.1)],
        target="least squares",
        skip={"optimum": "it descends the sum of the samples' losses, not the sum of their squares"},
    ),
]
