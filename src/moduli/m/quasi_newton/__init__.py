"""Quasi-Newton links: curvature learnt from steps and changes of the gradient.

* `LBFGS`, `LSR1` keep the last pairs; `QuasiNewton` and its rules (`BFGS`, `DFP`, `SR1`, ...) a matrix over all parameters;
  `DiagonalQuasiNewton` and its rules a vector.
* Each gives a direction, to be followed by a line search, and a Hessian (`get_H`), for a trust region.
"""

from ._dense import QuasiNewton
from ._diagonal import (
    DNRTR,
    DiagonalBFGS,
    DiagonalQuasiCauchi,
    DiagonalQuasiNewton,
    DiagonalSR1,
    DiagonalWeightedQuasiCauchi,
    NewDQN,
)
from ._lbfgs import LBFGS
from ._pairs import LSR1, SG2, GradientCorrection
from ._projected import ProjectedGradientMethod, ProjectedNewtonRaphson, ShorR, ThomasOptimalMethod
from ._updates import (
    BFGS,
    DFP,
    ICUM,
    PSB,
    SR1,
    SSVM,
    BroydenBad,
    BroydenGood,
    FletcherVMM,
    Greenstadt1,
    Greenstadt2,
    Horisho,
    McCormick,
    Pearson,
)

__all__ = [
    "BFGS",
    "BroydenBad",
    "BroydenGood",
    "DFP",
    "DNRTR",
    "DiagonalBFGS",
    "DiagonalQuasiCauchi",
    "DiagonalQuasiNewton",
    "DiagonalSR1",
    "DiagonalWeightedQuasiCauchi",
    "FletcherVMM",
    "GradientCorrection",
    "Greenstadt1",
    "Greenstadt2",
    "Horisho",
    "ICUM",
    "LBFGS",
    "LSR1",
    "McCormick",
    "NewDQN",
    "PSB",
    "Pearson",
    "ProjectedGradientMethod",
    "ProjectedNewtonRaphson",
    "QuasiNewton",
    "SG2",
    "SR1",
    "SSVM",
    "ShorR",
    "ThomasOptimalMethod",
]
