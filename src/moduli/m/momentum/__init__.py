"""Momentum and averaging: updates of several steps as one."""

from ._averaging import Averaging, MedianAveraging, WeightedAveraging
from ._cautious import Cautious, IntermoduleCautious, UpdateGradientSignConsistency
from ._cosine import ScaleByGradCosineSimilarity, ScaleModulesByCosineSimilarity
from ._ema import EMA, NAG, HeavyBall
from ._grokfast import GrokFast
from ._lookahead import Lookahead
from ._schedule_free import ScheduleFree

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
