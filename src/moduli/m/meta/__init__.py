"""Links that drive other links."""

from ._multistep import *
from ._quantized import *
from ._split import *
from ._wrap import *

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
