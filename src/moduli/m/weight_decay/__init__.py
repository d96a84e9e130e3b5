"""Weight decay and regularisation."""

from ._weight_decay import CautiousWeightDecay, WeightDecay

__all__ = ["CautiousWeightDecay", "WeightDecay"]
