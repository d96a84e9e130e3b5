"""Sign, Clip, Identity and Grad."""

import torch

from laws.registry import Row, formula
from moduli import m

__all__ = ["ROWS"]

ROWS = [
    Row(
        "Sign",
        lambda: [m.Sign(), m.LR(0.01)],
        tolerance=1e-2,
        reference=formula(lambda x, g, memory, t: 0.01 * g.sign()),
    ),
    Row(
        "Clip",
        lambda: [m.Clip(min=-0.5, max=1.0), m.LR(0.1)],
        reference=formula(lambda x, g, memory, t: 0.1 * g.clamp(-0.5, 1.0)),
    ),
    Row("Identity", lambda: [m.Identity(), m.LR(0.1)], reference=lambda params: torch.optim.SGD(params, 0.1)),
    Row("Grad", lambda: [m.Sign(), m.Grad(), m.LR(0.1)], reference=lambda params: torch.optim.SGD(params, 0.1)),
]
