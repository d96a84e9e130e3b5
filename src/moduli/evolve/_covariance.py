"""Covariance matrices and their roots, as tensors or as NumPy arrays, whose calls cost less where matrices are small."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor


def add_product(C: Any, left: Any, right: Any, decay: float, scale: float) -> None:
    """Compute C ← decay C + scale left · right in place.

    Args:
        C: An array or a tensor.
        left: The left factor, of the same kind.
        right: The right factor.
        decay: The factor on C.
        scale: The factor on the product.
    """
    if isinstance(C, Tensor):
        C.addmm_(left, right, beta=decay, alpha=scale)
    else:
        C *= decay
        C += scale * left @ right


def symmetric_root(C: Any) -> tuple[Any, float, float]:
    """Return C^(1/2) of a tensor or an array, and the smallest and largest standard deviation.

    Eigenvalues below the largest times eps are raised to that value.
    """
    xp: Any = torch if isinstance(C, Tensor) else np
    values, B = xp.linalg.eigh(C)
    least, most = float(values[0]), max(float(values[-1]), 0.0)
    rounding = most * float(xp.finfo(C.dtype).eps)
    d = (values if least >= rounding else values.clip(rounding)) ** 0.5
    return (B * d) @ B.T, math.sqrt(max(least, rounding)), math.sqrt(most)


def cholesky_root(C: Any) -> tuple[Any, float, float]:
    """Return the lower triangular root of a tensor or an array, and bounds of the standard deviations from its diagonal.

    Rounding can make C lose its definiteness; then the smallest shift (in powers of ten of eps) that restores it is added.
    """
    tensor, shift = torch.as_tensor(C), 0.0
    eps, tiny = torch.finfo(tensor.dtype).eps, torch.finfo(tensor.dtype).tiny
    while True:
        A, info = torch.linalg.cholesky_ex(tensor)
        if not int(info):
            diagonal = A.diagonal()
            return A if isinstance(C, Tensor) else A.numpy(), float(diagonal.min()), float(diagonal.max())
        mean = float(tensor.diagonal().abs().mean())
        if not math.isfinite(mean) or shift > 1:
            raise ArithmeticError("the covariance matrix is not finite; the fitness or the step size overflowed")
        shift = 10 * shift if shift else eps
        tensor = tensor.clone()
        tensor.diagonal().add_(shift * max(mean, tiny))
