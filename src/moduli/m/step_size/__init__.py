"""Step sizes: given, scheduled, or found from what the steps do."""

from ._adaptive import *
from ._lr import *

__all__ = [
    "AdGD",
    "BBStab",
    "BarzilaiBorwein",
    "BoldDriver",
    "LR",
    "PolyakStepSize",
    "RandomStepSize",
    "StepSize",
    "TrustRatio",
    "Warmup",
    "WarmupNormClip",
]
