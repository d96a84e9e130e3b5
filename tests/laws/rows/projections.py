"""Links that pass tensors to inner links in another form."""

import torch

from laws.registry import Row
from moduli import m

__all__ = ["ROWS"]

ROWS = [
    Row(
        "VectorProjection",
        lambda: [m.VectorProjection([m.Adam(), m.LR(0.05)])],
        reference=lambda params: torch.optim.Adam(params, 0.05),
    ),
    Row("VectorProjection, line search", lambda: [m.VectorProjection([m.LBFGS(), m.StrongWolfe()])], closure=True),
    Row(
        "ScalarProjection",
        lambda: [m.ScalarProjection([m.Adam(), m.LR(0.05)])],
        reference=lambda params: torch.optim.Adam(params, 0.05),
    ),
    Row(
        "ViewAsReal",
        lambda: [m.ViewAsReal([m.Adam(), m.LR(0.05)])],
        reference=lambda params: torch.optim.Adam(params, 0.05),
    ),
    Row(
        "To",
        lambda: [m.To([m.Adam(), m.LR(0.05)], dtype=torch.float64)],
        reference=lambda params: torch.optim.Adam(params, 0.05),
    ),
    Row("To, line search", lambda: [m.To([m.LBFGS(), m.StrongWolfe()], dtype=torch.float64)], closure=True),
    Row("SOAPBasis", lambda: [m.SOAPBasis(m.Adam(), precond_freq=2), m.LR(0.05)], pieces=False),
    Row("SOAPBasis, other links", lambda: [m.SOAPBasis([m.HeavyBall(0.5), m.LR(0.05)], precond_freq=2)], pieces=False),
    Row("GGTBasis", lambda: [m.GGTBasis(m.RMSprop(), history_size=5), m.LR(0.02)], tolerance=1e-2),
]
