"""Constraints that are inactive at the optimum, and so do not move it."""

import torch

from laws.registry import Row
from moduli import m

__all__ = ["ROWS"]


def slack():
    return torch.ones(2, dtype=torch.float64)


ROWS = [
    Row("AugmentedLagrangian", lambda: [m.AugmentedLagrangian(slack, inequality=True), m.LR(0.1)], closure=True),
]
