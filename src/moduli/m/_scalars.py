"""Arithmetic of numbers that a link measures: Python numbers on the host, 0-d tensors where the parameters are elsewhere.

A norm of tensors on an accelerator stays there, because reading it would make the host wait for the device. What a link
would decide by `if` and `max` on a number is decided by these functions for both kinds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import in_transform, is_fake


def read(found: Tensor) -> Any:
    """A 0-d tensor as a number where that costs nothing; on a device, differentiated or vectorised, as it is."""
    if (
        found.device.type != "cpu"
        or is_fake(found)
        or in_transform()
        or (found.requires_grad and torch.is_grad_enabled())
    ):
        return found
    return found.item()


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """`yes if condition else no`."""
    if not isinstance(condition, Tensor):
        return yes if condition else no
    if not isinstance(yes, Tensor) and not isinstance(no, Tensor):
        wide = torch.float32 if condition.device.type == "mps" else torch.float64
        yes = torch.full((), yes, dtype=wide, device=condition.device)
    return torch.where(condition, yes, no)


def larger(a: Any, b: Any) -> Any:
    """The larger of two numbers."""
    return choose(a > b, a, b)


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two numbers."""
    return choose(a < b, a, b)


def divide(a: Any, b: Any, otherwise: Any) -> Any:
    """The quotient where the denominator is positive."""
    if isinstance(b, Tensor):
        return choose(b > 0, a / b, otherwise)
    return a / b if b > 0 else otherwise


def root(a: Any) -> Any:
    """The square root of a number that is not negative."""
    return a**0.5


def rise(t: Any, steps: int) -> Any:
    """min(t / steps, 1), written so that t may be a symbol."""
    rising = (t < steps) * 1.0
    return rising * t / steps + (1 - rising)
