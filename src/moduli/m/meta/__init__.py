"""Links that drive other links."""

from ._accumulation import GradientAccumulation
from ._alternate import Alternate, Switch
from ._multistep import Multistep, NegateOnLossIncrease, Sequential
from ._online import Online
from ._quantized import Quantized
from ._save_best import SaveBest
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
