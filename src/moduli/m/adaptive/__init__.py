"""Adaptive first-order links: steps scaled by what updates were like so far."""

from ._adagrad import Adagrad
from ._adagrad_norm import AdagradNorm
from ._adam import Adam
from ._adan import Adan
from ._adaptive_heavy_ball import AdaptiveHeavyBall
from ._aegd import AEGD
from ._dadapt import DAdaptAdam
from ._full_matrix import FullMatrixAdagrad
from ._ggt import GGT
from ._lion import Lion
from ._msam import MSAM, MSAMMomentum
from ._orthogonalize import DualNormCorrection, MuonAdjustLR, Orthogonalize
from ._orthograd import OrthoGrad
from ._prodigy import Prodigy
from ._psgd import PSGDKronWhiten
from ._psgd_lra import PSGDLRAWhiten
from ._rmsprop import RMSprop
from ._rprop import Rprop, ScaleLRBySignChange, SignConsistencyLRs
from ._sam import ASAM, SAM
from ._shampoo import Shampoo
from ._sign_changes import BacktrackOnSignChange, SignConsistencyMask
from ._soap import SOAP

__all__ = [
    "AEGD",
    "ASAM",
    "Adagrad",
    "AdagradNorm",
    "Adam",
    "Adan",
    "AdaptiveHeavyBall",
    "BacktrackOnSignChange",
    "DAdaptAdam",
    "DualNormCorrection",
    "FullMatrixAdagrad",
    "GGT",
    "Lion",
    "MSAM",
    "MSAMMomentum",
    "MuonAdjustLR",
    "OrthoGrad",
    "Orthogonalize",
    "PSGDKronWhiten",
    "PSGDLRAWhiten",
    "Prodigy",
    "RMSprop",
    "Rprop",
    "SAM",
    "SOAP",
    "ScaleLRBySignChange",
    "Shampoo",
    "SignConsistencyLRs",
    "SignConsistencyMask",
]
