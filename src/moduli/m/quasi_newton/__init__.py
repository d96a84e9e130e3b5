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
from ._gradient_correction import GradientCorrection
from ._lbfgs import LBFGS
from ._lsr1 import LSR1
from ._projected import ProjectedGradientMethod, ProjectedNewtonRaphson, ShorR, ThomasOptimalMethod
from ._rank_one import ICUM, BroydenBad, BroydenGood, Greenstadt1, Greenstadt2, McCormick, Pearson
from ._sg2 import SG2
from ._symmetric import BFGS, DFP, PSB, SR1, SSVM, FletcherVMM, Horisho

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
