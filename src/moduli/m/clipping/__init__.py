"""Clipping and normalisation: the size of updates."""

from ._clip_norm import Centralize, ClipNorm, ClipValue, Normalize, QKClip
from ._growth import ClipNormByEMA, ClipNormGrowth, ClipValueByEMA, ClipValueGrowth, NormalizeByEMA

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
