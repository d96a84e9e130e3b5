"""Step sizes: given, scheduled, or found from what the steps do."""

from ._adgd import AdGD
from ._barzilai_borwein import BarzilaiBorwein, BBStab
from ._bold_driver import BoldDriver
from ._lr import LR, StepSize
from ._polyak import PolyakStepSize
from ._random import RandomStepSize
from ._trust_ratio import TrustRatio
from ._warmup import Warmup, WarmupNormClip

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
