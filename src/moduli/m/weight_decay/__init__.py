"""Weight decay and regularisation."""

from ._relative import RelativeWeightDecay
from ._weight_decay import CautiousWeightDecay, WeightDecay

__all__ = ["CautiousWeightDecay", "RelativeWeightDecay", "WeightDecay"]
