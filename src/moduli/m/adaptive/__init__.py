"""Adaptive first-order links: steps scaled by what updates were like so far."""

from ._adabelief import AdaBelief
from ._adadelta import Adadelta
from ._adafactor import Adafactor
from ._adagrad import Adagrad
from ._adagrad_norm import AdagradNorm
from ._adam import Adam
from ._adam_mini import AdamMini
from ._adamax import Adamax
from ._adan import Adan
from ._adaptive_heavy_ball import AdaptiveHeavyBall
from ._ademamix import AdEMAMix
from ._adopt import ADOPT
from ._aegd import AEGD
from ._came import CAME
from ._dadapt import DAdaptAdam
from ._dion import Dion
from ._full_matrix import FullMatrixAdagrad
from ._ggt import GGT
from ._kl_shampoo import KLShampoo
from ._lion import Lion
from ._lmo import LMO
from ._msam import MSAM, MSAMMomentum
from ._nadam import NAdam
from ._neuron_normalize import NeuronNormalize
from ._orthogonalize import DualNormCorrection, MuonAdjustLR, Orthogonalize
from ._orthograd import OrthoGrad
from ._prodigy import Prodigy
from ._psgd import PSGDKronWhiten
from ._psgd_lra import PSGDLRAWhiten
from ._radam import RAdam
from ._rmsprop import RMSprop
from ._rprop import BacktrackOnSignChange, Rprop, ScaleLRBySignChange, SignConsistencyLRs, SignConsistencyMask
from ._sam import ASAM, SAM
from ._shampoo import Shampoo
from ._soap import SOAP
from ._splus import SPlus

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
