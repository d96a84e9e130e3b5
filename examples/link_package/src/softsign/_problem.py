"""A valley with ripples; a problem is a function whose defaults are where the search starts."""

import torch
from torch import Tensor

START = torch.tensor([3.0, -2.0])


def ripples(x: Tensor = START) -> Tensor:
    """A bowl with small ripples, whose minimum is 0 at the origin."""
    return (x**2).sum() + 0.1 * (1 - torch.cos(5 * x)).sum()
