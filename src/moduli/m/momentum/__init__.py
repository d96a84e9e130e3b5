"""Momentum and averaging: updates of several steps as one."""

from ._averaging import *
from ._cautious import *
from ._ema import *

__all__ = [
    "Averaging",
    "Cautious",
    "EMA",
    "GrokFast",
    "HeavyBall",
    "IntermoduleCautious",
    "Lookahead",
    "MedianAveraging",
    "NAG",
    "ScaleByGradCosineSimilarity",
    "ScaleModulesByCosineSimilarity",
    "ScheduleFree",
    "UpdateGradientSignConsistency",
    "WeightedAveraging",
]
