"""Variance reduction: less noise in gradients of batches."""

from ._mars import MARSCorrection
from ._svrg import SVRG

__all__ = ["SVRG", "MARSCorrection"]
