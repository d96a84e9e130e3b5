"""Quasi-Newton links: curvature learnt from steps and changes of the gradient.

* `LBFGS`, `LSR1` keep the last pairs; `QuasiNewton` and its rules (`BFGS`, `DFP`, `SR1`, ...) a matrix over all parameters;
  `DiagonalQuasiNewton` and its rules a vector.
* Each gives a direction, to be followed by a line search, and a Hessian (`get_H`), for a trust region.
"""

from ._dense import *
from ._diagonal import *
from ._lbfgs import *
from ._pairs import *
from ._projected import *
from ._updates import *

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
