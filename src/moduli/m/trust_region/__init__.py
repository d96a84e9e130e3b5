"""Trust regions: a quadratic model of any link's Hessian, followed as far as it proves true.

A trust region takes a link that gives a Hessian, `m.TrustCG(m.LBFGS())`, and is an optimizer by itself.
"""

from ._base import TrustRegionBase
from ._cubic import CubicRegularization
from ._dogleg import Dogleg
from ._levenberg_marquardt import LevenbergMarquardt
from ._trust_cg import TrustCG
from ._trust_exact import TrustExact

__all__ = ["CubicRegularization", "Dogleg", "LevenbergMarquardt", "TrustCG", "TrustExact", "TrustRegionBase"]
