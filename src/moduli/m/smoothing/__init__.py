"""Smoothing: of the update over its elements, or of the loss over its neighbourhood."""

from ._gradient_sampling import GradientSampling
from ._laplacian import LaplacianSmoothing

__all__ = ["GradientSampling", "LaplacianSmoothing"]
