"""Links that drive other links."""

from ._multistep import (
    Alternate,
    GradientAccumulation,
    Multistep,
    NegateOnLossIncrease,
    Online,
    SaveBest,
    Sequential,
    Switch,
)
from ._quantized import Quantized
from ._split import Split
from ._wrap import Wrap

__all__ = [
    "Alternate",
    "GradientAccumulation",
    "Multistep",
    "NegateOnLossIncrease",
    "Online",
    "Quantized",
    "SaveBest",
    "Sequential",
    "Split",
    "Switch",
    "Wrap",
]
