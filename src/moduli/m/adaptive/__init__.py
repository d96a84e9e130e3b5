"""Adaptive first-order links: steps scaled by what updates were like so far."""

from ._adafactor import *
from ._adagrad import *
from ._adam import *
from ._adan import *
from ._full_matrix import *
from ._orthogonalize import *
from ._prodigy import *
from ._psgd import *
from ._rprop import *
from ._sam import *
from ._shampoo import *

__all__ = [
    "ADOPT",
    "AEGD",
    "ASAM",
    "AdEMAMix",
    "AdaBelief",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "AdagradNorm",
    "Adam",
    "AdamMini",
    "Adamax",
    "Adan",
    "AdaptiveHeavyBall",
    "BacktrackOnSignChange",
    "CAME",
    "DAdaptAdam",
    "Dion",
    "DualNormCorrection",
    "FullMatrixAdagrad",
    "GGT",
    "KLShampoo",
    "LMO",
    "Lion",
    "MSAM",
    "MSAMMomentum",
    "MuonAdjustLR",
    "NAdam",
    "NeuronNormalize",
    "OrthoGrad",
    "Orthogonalize",
    "PSGDKronWhiten",
    "PSGDLRAWhiten",
    "Prodigy",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SAM",
    "SOAP",
    "SPlus",
    "ScaleLRBySignChange",
    "Shampoo",
    "SignConsistencyLRs",
    "SignConsistencyMask",
]
