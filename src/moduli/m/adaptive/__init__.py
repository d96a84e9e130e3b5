"""Adaptive first-order links: steps scaled by what updates were like so far."""

from ._adagrad import Adagrad
from ._adagrad_norm import AdagradNorm
from ._adam import Adam
from ._adan import Adan
from ._dadapt import DAdaptAdam
from ._full_matrix import FullMatrixAdagrad
from ._ggt import GGT
from ._lion import Lion
from ._orthogonalize import Orthogonalize
from ._orthograd import OrthoGrad
from ._prodigy import Prodigy
from ._psgd import PSGDKronWhiten
from ._psgd_lra import PSGDLRAWhiten
from ._rmsprop import RMSprop
from ._rprop import Rprop, ScaleLRBySignChange, SignConsistencyLRs
from ._sam import ASAM, SAM
from ._shampoo import Shampoo
from ._soap import SOAP

__all__ = [
    "ASAM",
    "Adagrad",
    "AdagradNorm",
    "Adam",
    "Adan",
    "DAdaptAdam",
    "FullMatrixAdagrad",
    "GGT",
    "Lion",
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
]
