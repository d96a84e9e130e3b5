"""Gradients from values."""

import torch

from laws.registry import Row, formula_of_closure
from moduli import m, optim

__all__ = ["ROWS"]


def _row(name, make, **more):
    settings = {"closure": True, "population": False, "random": True, "pieces": False, "half": False} | more
    return Row(name, make, **settings)


def _one_measurement(params, evaluate, memory):
    generator = memory.setdefault("generator", torch.Generator().manual_seed(0))
    start, total = [param.clone() for param in params], [torch.zeros_like(param) for param in params]
    for _ in range(8):
        z = optim.sample_like(params, "rademacher", generator=generator)
        for param, x, v in zip(params, start, z, strict=True):
            param.copy_(x + 1e-3 * v)
        value = evaluate()
        for sum_, v in zip(total, z, strict=True):
            sum_ += v * value / 1e-3 / 8
    for param, x, g in zip(params, start, total, strict=True):
        param.copy_(x - 1e-6 * g)


_ONE = {
    "thawed": "one number moves at each step, and it is not its turn",
    "grown": "one number moves at each step, and it is not its turn",
    "reordered": "numbers take turns in the order of the parameters",
}

ROWS = [
    _row("FDM", lambda: [m.FDM(), m.LR(0.05)], random=False, pieces=True),
    _row("RandomizedFDM", lambda: [m.RandomizedFDM(seed=0, n_samples=8), m.LR(0.02)], steps=800),
    _row("SPSA", lambda: [m.SPSA(seed=0, n_samples=8), m.LR(0.02)], steps=800),
    _row(
        "SPSA1",
        lambda: [m.SPSA1(seed=0, n_samples=8), m.LR(1e-6)],
        target="",
        reference=formula_of_closure(_one_measurement),
    ),
    _row(
        "CD",
        lambda: [m.CD(), m.AdaptiveBisection()],
        random=False,
        steps=2000,
        tolerance=1e-2,
        complex=False,
        skip=_ONE,
    ),
    _row("RDSA", lambda: [m.RDSA(seed=0, n_samples=8), m.LR(0.02)], steps=800),
    _row("GaussianSmoothing", lambda: [m.GaussianSmoothing(seed=0, n_samples=20), m.LR(0.02)], steps=600),
    _row("MeZO", lambda: [m.MeZO(seed=0, n_samples=8), m.LR(0.02)], steps=800),
    _row("ForwardGradient", lambda: [m.ForwardGradient(seed=0, n_samples=8), m.LR(0.02)], steps=800),
]
