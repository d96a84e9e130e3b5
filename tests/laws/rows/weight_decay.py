"""Weight decay and regularisation."""

import torch

from laws.registry import Row, formula
from moduli import m

__all__ = ["ROWS"]


def _relative_decay(params, grads, memory, t):
    count = sum(g.numel() for g in grads)
    size = sum(g.abs().sum() for g in grads) / count
    for param, grad in zip(params, grads, strict=True):
        param.data.sub_(0.05 * (grad + 0.1 * size * param.data))


ROWS = [
    Row("Dropout", lambda: [m.Dropout(0.5, seed=0), m.LR(0.1)], random=True, pieces=False),
    Row("Dropout, grafted", lambda: [m.Dropout(0.5, graft=True, seed=0), m.LR(0.05)], random=True, pieces=False),
    Row(
        "WeightDropout",
        lambda: [m.WeightDropout(0.1, seed=0), m.LR(0.01)],
        target="",
        random=True,
        pieces=False,
        closure=True,
        population=False,
    ),
    Row(
        "PerturbWeights",
        lambda: [m.PerturbWeights(alpha=0.01, seed=0), m.LR(0.05)],
        tolerance=0.1,
        random=True,
        pieces=False,
        closure=True,
        population=False,
    ),
    Row("RandomReinitialize", lambda: [m.LR(0.1), m.RandomReinitialize(seed=0)], target="", random=True, pieces=False),
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
    Row("RelativeWeightDecay", lambda: [m.RelativeWeightDecay(0.1), m.LR(0.05)], target="", reference=_relative_decay),
]
