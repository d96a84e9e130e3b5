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


def _schedule_free(params, grads, memory, t):
    for i, (y, g) in enumerate(zip(params, grads, strict=True)):
        mine = memory.setdefault(i, {"z": y.detach().clone(), "x": y.detach().clone()})
        mine["z"] = mine["z"] - 0.1 * g
        mine["x"] = (1 - 1 / t) * mine["x"] + mine["z"] / t
        y.data.copy_(0.1 * mine["z"] + 0.9 * mine["x"])


def _agreement(x, g, memory, t):
    """An update that is the gradient agrees with it wherever it is not zero."""
    return 0.01 * (g != 0).to(g)


ROWS = [
    Row(
        "PolyakAveraging",
        lambda: [m.LR(0.1), m.PolyakAveraging(decay=0.9)],
        reference=lambda params: torch.optim.SGD(params, 0.1),
    ),
    Row(
        "IntermoduleCautious",
        lambda: [m.IntermoduleCautious(m.EMA(0.9), m.Grad()), m.LR(0.1)],
    ),
    Row(
        "IntermoduleCautious, normalised",
        lambda: [m.IntermoduleCautious(m.EMA(0.5), m.Grad(), normalize=True), m.LR(0.05)],
    ),
    Row(
        "ScaleModulesByCosineSimilarity",
        lambda: [m.ScaleModulesByCosineSimilarity(m.EMA(0.5), m.Grad()), m.LR(0.05)],
    ),
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
    Row("ScheduleFree", lambda: [m.LR(0.1), m.ScheduleFree()], tolerance=1e-2, reference=_schedule_free),
    Row("Averaging", lambda: [m.Averaging(3), m.LR(0.05)]),
    Row("WeightedAveraging", lambda: [m.WeightedAveraging([1.0, 2.0, 3.0]), m.LR(0.05)]),
    Row("MedianAveraging", lambda: [m.MedianAveraging(3), m.LR(0.05)]),
    Row("ScaleByGradCosineSimilarity", lambda: [m.EMA(0.5), m.ScaleByGradCosineSimilarity(), m.LR(0.05)]),
    Row(
        "UpdateGradientSignConsistency",
        lambda: [m.UpdateGradientSignConsistency(), m.LR(0.01)],
        target="",
        reference=formula(_agreement),
    ),
]
