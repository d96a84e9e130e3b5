"""The catalogue of links, a folder per family.

* `momentum`: running means and sums of updates, and caution;
* `adaptive`: steps scaled by what updates were like so far;
* `step_size`: given, scheduled, or found from what the steps do;
* `clipping`: the size of updates; `weight_decay`: regularisation;
* `ops`: pointwise functions and sources.
"""

from .adaptive import (
    ASAM,
    GGT,
    SAM,
    SOAP,
    Adagrad,
    Adam,
    Adan,
    FullMatrixAdagrad,
    Lion,
    Orthogonalize,
    OrthoGrad,
    PSGDKronWhiten,
    RMSprop,
    Rprop,
    ScaleLRBySignChange,
    Shampoo,
    SignConsistencyLRs,
)
from .clipping import Centralize, ClipNorm, ClipValue, Normalize
from .momentum import EMA, NAG, Cautious, HeavyBall
from .ops import Clip, Grad, Identity, Noop, Sign
from .step_size import (
    LR,
    AdGD,
    BarzilaiBorwein,
    BBStab,
    BoldDriver,
    PolyakStepSize,
    RandomStepSize,
    StepSize,
    Warmup,
    WarmupNormClip,
)
from .weight_decay import CautiousWeightDecay, WeightDecay

__all__ = [
    "ASAM",
    "AdGD",
    "Adagrad",
    "Adam",
    "Adan",
    "BBStab",
    "BarzilaiBorwein",
    "BoldDriver",
    "Cautious",
    "CautiousWeightDecay",
    "Centralize",
    "Clip",
    "ClipNorm",
    "ClipValue",
    "EMA",
    "FullMatrixAdagrad",
    "GGT",
    "Grad",
    "HeavyBall",
    "Identity",
    "LR",
    "Lion",
    "NAG",
    "Noop",
    "Normalize",
    "OrthoGrad",
    "Orthogonalize",
    "PSGDKronWhiten",
    "PolyakStepSize",
    "RMSprop",
    "RandomStepSize",
    "Rprop",
    "SAM",
    "SOAP",
    "ScaleLRBySignChange",
    "Shampoo",
    "Sign",
    "SignConsistencyLRs",
    "StepSize",
    "Warmup",
    "WarmupNormClip",
    "WeightDecay",
]
