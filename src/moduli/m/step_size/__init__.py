"""Step sizes: given, scheduled, or found from what the steps do."""

from ._adaptive import AdGD, BarzilaiBorwein, BBStab, BoldDriver, PolyakStepSize
from ._lr import LR, RandomStepSize, StepSize, TrustRatio, Warmup, WarmupNormClip

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
