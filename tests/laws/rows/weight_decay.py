"""Weight decay and regularisation."""

import torch

from laws.registry import Row, formula
from moduli import m

__all__ = ["ROWS"]

ROWS = [
    Row(
        "WeightDecay",
        lambda: [m.Adam(), m.WeightDecay(0.1), m.LR(0.05)],
        target="",
        reference=lambda params: torch.optim.AdamW(params, 0.05, weight_decay=0.1),
    ),
    Row(
        "CautiousWeightDecay",
        lambda: [m.CautiousWeightDecay(0.1), m.LR(0.05)],
        target="",
        reference=formula(lambda x, g, memory, t: 0.05 * (g + 0.1 * x * (g * x > 0))),
    ),
    Row("RelativeWeightDecay", lambda: [m.RelativeWeightDecay(0.1), m.LR(0.05)], target=""),
]
