"""Links that accumulate small updates of half-precision parameters; in other dtypes they change nothing."""

import torch

from laws.registry import Row
from moduli import m

__all__ = ["ROWS"]


def _adam(params):
    return torch.optim.Adam(params, 0.05)


ROWS = [
    Row("StochasticRounding", lambda: [m.Adam(), m.LR(0.05), m.StochasticRounding()], reference=_adam),
    Row("Kahan", lambda: [m.Adam(), m.LR(0.05), m.Kahan()], reference=_adam),
    Row("MasterWeights", lambda: [m.Adam(), m.LR(0.05), m.MasterWeights()], reference=_adam),
]
