"""Step sizes: given, scheduled, or found from what the steps do."""

from ._lr import LR
from ._warmup import Warmup

__all__ = ["LR", "Warmup"]
