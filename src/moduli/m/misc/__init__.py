"""Small links that fit nowhere else."""

from ._curvature import *
from ._previous import *
from ._scaling import *

__all__ = [
    "DivByLoss",
    "EscapeAnnealing",
    "ExpHomotopy",
    "FillLoss",
    "GradSign",
    "HpuEstimate",
    "LambdaHomotopy",
    "LastAbsoluteRatio",
    "LastDifference",
    "LastGradDifference",
    "LastProduct",
    "LastRatio",
    "LogHomotopy",
    "MulByLoss",
    "NoiseSign",
    "Previous",
    "PrintLoss",
    "PrintParams",
    "PrintShape",
    "PrintUpdate",
    "RandomHvp",
    "Relative",
    "SqrtHomotopy",
    "SquareHomotopy",
    "UpdateSign",
]
