"""Small links that fit nowhere else."""

from ._curvature import EscapeAnnealing, HpuEstimate, PrintLoss, PrintParams, PrintShape, PrintUpdate, RandomHvp
from ._previous import LastAbsoluteRatio, LastDifference, LastGradDifference, LastProduct, LastRatio, Previous
from ._scaling import (
    DivByLoss,
    ExpHomotopy,
    FillLoss,
    GradSign,
    LambdaHomotopy,
    LogHomotopy,
    MulByLoss,
    NoiseSign,
    Relative,
    SqrtHomotopy,
    SquareHomotopy,
    UpdateSign,
)

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
