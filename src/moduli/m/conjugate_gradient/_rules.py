"""The formulas for beta, in terms of gradients g, the last ones, y = g - g_last, and the last direction D (uphill)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["RULES"]


def _dot(a: Tensor, b: Tensor) -> float:
    return torch.dot(a, b).item()


def _over(above: float, below: float) -> float:
    return above / below if below != 0.0 else 0.0


def _fletcher_reeves(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> float:
    return _over(_dot(g, g), _dot(last, last))


def _polak_ribiere(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> float:
    return _over(_dot(g, y), _dot(last, last))


def _hestenes_stiefel(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> float:
    return _over(-_dot(g, y), _dot(D, y))


def _dai_yuan(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> float:
    return _over(-_dot(g, g), _dot(D, y))


def _hager_zhang(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> float:
    # In terms of the downhill direction d = -D; the lower bound keeps it globally convergent.
    dy = -_dot(D, y)
    if dy == 0.0:
        return 0.0
    beta = (_dot(y, g) + 2 * _dot(D, g) * _dot(y, y) / dy) / dy
    size = float(torch.linalg.vector_norm(D)) * min(0.01, float(torch.linalg.vector_norm(last)))
    return max(beta, -1 / size) if size > 0 else beta


def _liu_storey(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> float:
    return _over(_dot(g, y), _dot(last, D))


def _conjugate_descent(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> float:
    return _over(_dot(g, g), _dot(last, D))


def _hybrid(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> float:
    return max(0.0, min(_dai_yuan(g, last, y, D), _hestenes_stiefel(g, last, y, D)))


RULES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], float]] = {
    "fletcher-reeves": _fletcher_reeves,
    "polak-ribiere": _polak_ribiere,
    "hestenes-stiefel": _hestenes_stiefel,
    "dai-yuan": _dai_yuan,
    "hager-zhang": _hager_zhang,
    "liu-storey": _liu_storey,
    "conjugate-descent": _conjugate_descent,
    "dai-yuan-hestenes-stiefel": _hybrid,
}
