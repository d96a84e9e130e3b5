"""Adaptive first-order links."""

import torch

from laws.registry import Row, formula
from moduli import m

__all__ = ["ROWS"]


def _lion(x, g, memory, t):
    before = memory.get("m", torch.zeros_like(g))
    memory["m"] = 0.99 * before + 0.01 * g
    return 0.01 * (0.9 * before + 0.1 * g).sign()


ROWS = [
    Row("Adam", lambda: [m.Adam(), m.LR(0.05)], reference=lambda params: torch.optim.Adam(params, 0.05)),
    Row(
        "Adam, amsgrad",
        lambda: [m.Adam(amsgrad=True), m.LR(0.05)],
        reference=lambda params: torch.optim.Adam(params, 0.05, amsgrad=True),
    ),
    Row(
        "RMSprop",
        lambda: [m.RMSprop(), m.LR(0.01)],
        steps=800,
        tolerance=1e-2,
        reference=lambda params: torch.optim.RMSprop(params, 0.01),
    ),
    Row(
        "Adagrad",
        lambda: [m.Adagrad(), m.LR(0.5)],
        reference=lambda params: torch.optim.Adagrad(params, 0.5),
    ),
    Row("Lion", lambda: [m.Lion(), m.LR(0.01)], steps=1000, tolerance=0.05, reference=formula(_lion)),
]
