"""Small links that fit nowhere else."""

from ._curvature import HpuEstimate, RandomHvp
from ._escape import EscapeAnnealing
from ._homotopy import ExpHomotopy, LambdaHomotopy, LogHomotopy, SqrtHomotopy, SquareHomotopy
from ._previous import LastAbsoluteRatio, LastDifference, LastGradDifference, LastProduct, LastRatio, Previous
from ._printing import PrintLoss, PrintParams, PrintShape, PrintUpdate
from ._scaling import DivByLoss, FillLoss, GradSign, MulByLoss, NoiseSign, Relative, UpdateSign

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
