"""Clipping and normalisation: the size of updates."""

from ._by_ema import ClipNormByEMA, ClipValueByEMA, NormalizeByEMA
from ._centralize import Centralize
from ._clip_norm import ClipNorm, ClipValue, Normalize
from ._growth import ClipNormGrowth, ClipValueGrowth
from ._qk_clip import QKClip

__all__ = [
    "Centralize",
    "ClipNorm",
    "ClipNormByEMA",
    "ClipNormGrowth",
    "ClipValue",
    "ClipValueByEMA",
    "ClipValueGrowth",
    "Normalize",
    "NormalizeByEMA",
    "QKClip",
]
