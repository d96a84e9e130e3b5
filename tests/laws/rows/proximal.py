"""Proximal gradients with a penalty so small that the optimum moves by less than the tolerance."""

from laws.registry import Row, formula
from moduli import m

__all__ = ["ROWS"]

PENALTY = 1e-4


def soften(v, threshold):
    return v.sgn() * (v.abs() - threshold).clamp(min=0)


def _proximal(param, grad, memory, t):
    return param - soften(param - 0.1 * grad, 0.1 * PENALTY)


def _fista(param, grad, memory, t):
    s, before = memory.get("s", 1.0), memory.get("x", param.clone())
    x = soften(param - 0.1 * grad, 0.1 * PENALTY)
    memory["x"], memory["s"] = x, (1 + (1 + 4 * s * s) ** 0.5) / 2
    return param - x - (s - 1) / memory["s"] * (x - before)


ROWS = [
    Row(
        "ProximalGradient",
        lambda: [m.ProximalGradient(m.prox.L1Penalty(PENALTY), lr=0.1)],
        reference=formula(_proximal),
    ),
    Row("FISTA", lambda: [m.FISTA(m.prox.L1Penalty(PENALTY), lr=0.1)], reference=formula(_fista)),
    Row(
        "ProximalGradient, box",
        lambda: [m.ProximalGradient(m.prox.BoxSet(-100.0, 100.0), lr=0.1)],
        complex=False,
    ),
]
