"""Smoothing the update over its elements."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._checks import check_at_least_one, non_negative
from .._transforms import UpdateTransform
from ..adaptive._axes import work


class LaplacianSmoothing(UpdateTransform):
    r"""Solves $(I - \sigma\Delta)\,v = u$ with the periodic second difference $\Delta$ over the elements of each tensor.

    In Fourier space it is a division by $1 + 2\sigma(1 - \cos(2\pi k/n))$. The sum of the elements stays, noise between
    neighbours shrinks.

    Args:
        sigma: How much is smoothed; 0 changes nothing.
        layerwise: Each tensor by itself, in the order of its elements; False: all parameters as one vector.
        min_numel: Tensors with fewer elements stay as they are.

    Example:
        >>> import torch
        >>> from moduli import m, optim
        >>> optim.step_tensors(m.LaplacianSmoothing(), [torch.tensor([1.0, -1.0, 1.0, -1.0])])
        [tensor([ 0.2000, -0.2000,  0.2000, -0.2000])]

    References:
        S. Osher et al., "Laplacian smoothing gradient descent", Research in the Mathematical Sciences 9 (2022).
    """

    members = "batched"
    differentiable = True

    def __init__(self, sigma: Any = 1.0, *, layerwise: bool = True, min_numel: int = 4) -> None:
        non_negative("LaplacianSmoothing", sigma=sigma)
        check_at_least_one("LaplacianSmoothing", min_numel=min_numel)
        super().__init__({"sigma": sigma}, concat_params=not layerwise)
        self.min_numel = min_numel

    def transform(self, tensor: Tensor, state: Any, setting: Any) -> Tensor:
        n = tensor.numel()
        if n < self.min_numel:
            return tensor
        x = work(tensor).reshape(-1)
        real = not x.is_complex()
        found = torch.fft.rfft(x) if real else torch.fft.fft(x)
        angle = torch.arange(len(found), device=tensor.device, dtype=found.real.dtype) * (2 * math.pi / n)
        found = found / (1 + 2 * setting["sigma"] * (1 - torch.cos(angle)))
        smooth = torch.fft.irfft(found, n) if real else torch.fft.ifft(found)
        return smooth.reshape(tensor.shape).to(tensor.dtype)
