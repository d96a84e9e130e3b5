"""Smoothing."""

import torch

from laws.registry import Row, formula
from moduli import m

__all__ = ["ROWS"]


def _laplacian(x, g, memory, t):
    n = g.numel()
    shift = torch.roll(torch.eye(n, dtype=g.dtype), 1, 0)
    matrix = torch.eye(n, dtype=g.dtype) * 3 - shift - shift.mT
    return 0.1 * torch.linalg.solve(matrix, g.reshape(-1)).reshape(g.shape)


ROWS = [
    Row("LaplacianSmoothing", lambda: [m.LaplacianSmoothing(), m.LR(0.1)], reference=formula(_laplacian), pieces=False),
    Row(
        "LaplacianSmoothing, all",
        lambda: [m.LaplacianSmoothing(layerwise=False), m.LR(0.1)],
        skip={"frozen": "an unused parameter lies between the others in the vector, as zeros"},
    ),
    Row(
        "GradientSampling",
        lambda: [m.GradientSampling(sigma=0.01, n=4, seed=0), m.LR(0.1)],
        closure=True,
        random=True,
        pieces=False,
    ),
    Row(
        "GradientSampling, hull",
        lambda: [m.GradientSampling(m.LR(0.1), sigma=0.01, n=4, aggregate="hull", seed=0)],
        closure=True,
        random=True,
        pieces=False,
    ),
]
