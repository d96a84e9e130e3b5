"""Clipping and normalisation: the size of updates."""

from ._centralize import Centralize
from ._clip_norm import ClipNorm
from ._clip_value import ClipValue
from ._normalize import Normalize

__all__ = ["Centralize", "ClipNorm", "ClipValue", "Normalize"]
