"""Clipping and normalisation: the size of updates."""

from ._clip_norm import *
from ._growth import *

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
