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
    Row("StepSize", lambda: [m.StepSize(0.1)], reference=lambda params: torch.optim.SGD(params, 0.1)),
    Row("WarmupNormClip", lambda: [m.WarmupNormClip(10, start_norm=0.1), m.LR(0.1)]),
    Row("RandomStepSize", lambda: [m.RandomStepSize(low=0.5, seed=0), m.LR(0.1)], random=True),
    Row("PolyakStepSize", lambda: [m.PolyakStepSize()], tolerance=1e-2, closure=True),
    Row("BarzilaiBorwein", lambda: [m.BarzilaiBorwein(alpha_0=0.01)]),
    Row("BBStab", lambda: [m.BBStab(alpha_0=0.01)], tolerance=1e-2),
    Row("AdGD", lambda: [m.AdGD(alpha_0=1e-3)]),
    Row("AdGD, variant 1", lambda: [m.AdGD(variant=1, alpha_0=1e-3)]),
    Row("BoldDriver", lambda: [m.BoldDriver(a_init=0.05, nminus=0.5)], tolerance=1e-2, closure=True),
]
