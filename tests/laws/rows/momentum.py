"""Momentum and averaging."""

import torch

from laws.registry import Row, formula
from moduli import m

__all__ = ["ROWS"]


def _ema(x, g, memory, t):
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    return 0.1 * memory["m"]


def _cautious(x, g, memory, t):
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * g
    return 0.1 * memory["m"] * (memory["m"] * g > 0)


ROWS = [
    Row("EMA", lambda: [m.EMA(0.9), m.LR(0.1)], reference=formula(_ema)),
    Row(
        "HeavyBall",
        lambda: [m.HeavyBall(0.9), m.LR(0.02)],
        reference=lambda params: torch.optim.SGD(params, 0.02, momentum=0.9),
    ),
    Row(
        "NAG",
        lambda: [m.NAG(0.9), m.LR(0.02)],
        reference=lambda params: torch.optim.SGD(params, 0.02, momentum=0.9, nesterov=True),
    ),
    Row("Cautious", lambda: [m.EMA(0.9), m.Cautious(), m.LR(0.1)], reference=formula(_cautious)),
    Row("Cautious, normalised", lambda: [m.EMA(0.9), m.Cautious(normalize=True), m.LR(0.05)]),
]
