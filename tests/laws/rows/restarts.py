"""Links that reset the state of others."""

import torch

from laws.registry import Row, formula
from moduli import m

__all__ = ["ROWS"]


def _every(n):
    """Heavy ball, forgotten every n steps."""

    def update(x, g, memory, t):
        if (t - 1) % n == 0:
            memory.clear()
        memory["m"] = 0.9 * memory.get("m", 0) + g
        return 0.02 * memory["m"]

    return update


ROWS = [
    Row(
        "RestartOnStuck",
        lambda: [m.RestartOnStuck(m.HeavyBall(0.9), n_tol=3), m.LR(0.02)],
        reference=lambda params: torch.optim.SGD(params, 0.02, momentum=0.9),
    ),
    Row(
        "RestartEvery",
        lambda: [m.RestartEvery(m.HeavyBall(0.9), steps=5), m.LR(0.02)],
        reference=formula(_every(5)),
    ),
    Row(
        "RestartEvery, all others",
        lambda: [m.RestartEvery(steps=5), m.HeavyBall(0.9), m.LR(0.02)],
        reference=formula(_every(5)),
        skip={"no_rebuild": "the first step after a reset has a kernel of its own, made once"},
    ),
    Row("PowellRestart", lambda: [m.PowellRestart(m.HeavyBall(0.9)), m.LR(0.05)]),
    Row("BirginMartinezRestart", lambda: [m.BirginMartinezRestart(m.HeavyBall(0.9)), m.LR(0.02)]),
]
