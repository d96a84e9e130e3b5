"""Nonlinear conjugate gradients: `ConjugateGradient` with a rule, and each rule under its own name."""

from ._base import ConjugateGradient
from ._names import (
    DYHS,
    ConjugateDescent,
    DaiYuan,
    FletcherReeves,
    HagerZhang,
    HestenesStiefel,
    LiuStorey,
    PolakRibiere,
)

__all__ = [
    "DYHS",
    "ConjugateDescent",
    "ConjugateGradient",
    "DaiYuan",
    "FletcherReeves",
    "HagerZhang",
    "HestenesStiefel",
    "LiuStorey",
    "PolakRibiere",
]
