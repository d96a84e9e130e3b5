"""Momentum and averaging: updates of several steps as one."""

from ._agreement import ScaleByGradCosineSimilarity, UpdateGradientSignConsistency
from ._averaging import Averaging, MedianAveraging, WeightedAveraging
from ._cautious import Cautious
from ._ema import EMA
from ._grokfast import GrokFast
from ._heavy_ball import HeavyBall
from ._intermodule import IntermoduleCautious, ScaleModulesByCosineSimilarity
from ._lookahead import Lookahead
from ._nag import NAG
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
