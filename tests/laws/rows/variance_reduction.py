"""Variance reduction."""

from laws.registry import Row
from moduli import m

__all__ = ["ROWS"]

ROWS = [
    Row("MARSCorrection", lambda: [m.MARSCorrection(), m.LR(0.1)]),
    Row(
        "SVRG",
        lambda: [m.SVRG(3, accum_steps=1), m.LR(0.1)],
        steps=800,
        closure=True,
        population=False,
        skip={"split_groups": "its first step only gathers the full gradient"},
    ),
]
