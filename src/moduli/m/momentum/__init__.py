"""Momentum and averaging: updates of several steps as one."""

from ._averaging import Averaging, Lookahead, MedianAveraging, ScheduleFree, WeightedAveraging
from ._cautious import (
    Cautious,
    IntermoduleCautious,
    ScaleByGradCosineSimilarity,
    ScaleModulesByCosineSimilarity,
    UpdateGradientSignConsistency,
)
from ._ema import EMA, NAG, GrokFast, HeavyBall

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
