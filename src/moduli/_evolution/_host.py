"""A few numbers, looked at with NumPy.

What concerns some hundred members (their order, weights, extremes) or the vectors of a covariance's paths takes NumPy a
microsecond where torch takes five, and has to reach Python anyway to decide something.
"""

from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = ["Numbers", "host", "tensor"]

Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def host(values: Tensor) -> Numbers:
    """The numbers of a tensor; on the CPU the same memory."""
    if values.device.type != "cpu" or values.requires_grad or values.dtype is torch.bfloat16:
        values = values.detach().cpu()
        values = values.float() if values.dtype is torch.bfloat16 else values
    return values.numpy()


def tensor(numbers: Numbers, like: Tensor) -> Tensor:
    """Numbers as a tensor with the dtype and device of another; where these fit, the same memory."""
    made = torch.from_numpy(numbers)
    return made if made.dtype is like.dtype and like.device.type == "cpu" else made.to(like)
