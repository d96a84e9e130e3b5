"""The catalogue of links."""

from ._adam import Adam
from ._lr import LR
from .line_search import (
    AdaptiveBacktracking,
    Backtracking,
    LineSearchBase,
    StrongWolfe,
)
from .quasi_newton import (
    BFGS,
    DFP,
    ICUM,
    LBFGS,
    PSB,
    SR1,
    SSVM,
    BroydenBad,
    BroydenGood,
    Greenstadt1,
    Greenstadt2,
    Horisho,
    McCormick,
    Pearson,
    ProjectedGradientMethod,
    QuasiNewton,
    ShorR,
)
from .second_order import (
    Newton,
)
from .trust_region import (
    CubicRegularization,
    Dogleg,
    LevenbergMarquardt,
    TrustCG,
    TrustExact,
    TrustRegionBase,
)

__all__ = [
    "Adam",
    "LR",
    "AdaptiveBacktracking",
    "Backtracking",
    "LineSearchBase",
    "StrongWolfe",
    "BFGS",
    "DFP",
    "ICUM",
    "LBFGS",
    "PSB",
    "SR1",
    "SSVM",
    "BroydenBad",
    "BroydenGood",
    "Greenstadt1",
    "Greenstadt2",
    "Horisho",
    "McCormick",
    "Pearson",
    "ProjectedGradientMethod",
    "QuasiNewton",
    "ShorR",
    "Newton",
    "CubicRegularization",
    "Dogleg",
    "LevenbergMarquardt",
    "TrustCG",
    "TrustExact",
    "TrustRegionBase",
]
