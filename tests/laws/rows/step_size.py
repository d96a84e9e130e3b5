"""Step sizes."""

import torch

from laws.registry import Row, formula
from moduli import m

__all__ = ["ROWS"]

ROWS = [
    Row("LR", lambda: [m.LR(0.1)], reference=lambda params: torch.optim.SGD(params, 0.1)),
    Row(
        "Warmup",
        lambda: [m.Warmup(10, start_lr=0.01), m.LR(0.1)],
        reference=formula(lambda x, g, memory, t: 0.1 * g * (0.01 + 0.99 * min((t - 1) / 10, 1.0))),
    ),
]
