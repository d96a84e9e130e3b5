"""Weight decay and regularisation."""

from ._random import Dropout, PerturbWeights, RandomReinitialize, WeightDropout
from ._relative import RelativeWeightDecay
from ._weight_decay import CautiousWeightDecay, WeightDecay

__all__ = [
    "CautiousWeightDecay",
    "Dropout",
    "PerturbWeights",
    "RandomReinitialize",
    "RelativeWeightDecay",
    "WeightDecay",
    "WeightDropout",
]
