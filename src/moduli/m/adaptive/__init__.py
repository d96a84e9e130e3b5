"""Adaptive first-order links: steps scaled by what updates were like so far."""

from ._adafactor import CAME, Adafactor, AdamMini, Dion
from ._adagrad import AEGD, Adadelta, Adagrad, AdagradNorm, RMSprop
from ._adam import AdaBelief, Adam, Adamax, NAdam, RAdam
from ._adan import ADOPT, Adan, AdEMAMix
from ._full_matrix import GGT, FullMatrixAdagrad, KLShampoo, SPlus
from ._orthogonalize import LMO, DualNormCorrection, MuonAdjustLR, NeuronNormalize, Orthogonalize
from ._prodigy import AdaptiveHeavyBall, DAdaptAdam, Prodigy
from ._psgd import PSGDKronWhiten
from ._psgd_lra import PSGDLRAWhiten
from ._rprop import BacktrackOnSignChange, Lion, Rprop, ScaleLRBySignChange, SignConsistencyLRs, SignConsistencyMask
from ._sam import ASAM, MSAM, SAM, MSAMMomentum, OrthoGrad
from ._shampoo import SOAP, Shampoo

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
