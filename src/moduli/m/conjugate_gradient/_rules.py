"""The formulas for beta, in terms of gradients g, the last ones, y = g - g_last, and the last direction D (uphill).

They are functions of tensors without a decision of the host, so that `torch.vmap` takes them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, dot


def _divide(above: Tensor, below: Tensor) -> Tensor:
    return torch.where(below != 0, above / below, 0.0)


def _fletcher_reeves(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    return _divide(dot(g, g), dot(last, last))


def _polak_ribiere(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    return _divide(dot(g, y), dot(last, last))


def _hestenes_stiefel(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    return _divide(-dot(g, y), dot(D, y))


def _dai_yuan(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    return _divide(-dot(g, g), dot(D, y))


def _hager_zhang(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    # In terms of the downhill direction d = -D; the lower bound keeps it globally convergent.
    dy = -dot(D, y)
    beta = _divide(dot(y, g) + 2 * _divide(dot(D, g) * dot(y, y), dy), dy)
    size = torch.linalg.vector_norm(D) * torch.linalg.vector_norm(last).clamp(max=0.01)
    return torch.where((dy != 0) & (size > 0), torch.maximum(beta, -1 / size), beta)


def _liu_storey(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    return _divide(dot(g, y), dot(last, D))


def _conjugate_descent(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    return _divide(dot(g, g), dot(last, D))


def _hybrid(g: Tensor, last: Tensor, y: Tensor, D: Tensor) -> Tensor:
    return torch.minimum(_dai_yuan(g, last, y, D), _hestenes_stiefel(g, last, y, D)).clamp(min=0.0)


RULES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "fletcher-reeves": _fletcher_reeves,
    "polak-ribiere": _polak_ribiere,
    "hestenes-stiefel": _hestenes_stiefel,
    "dai-yuan": _dai_yuan,
    "hager-zhang": _hager_zhang,
    "liu-storey": _liu_storey,
    "conjugate-descent": _conjugate_descent,
    "dai-yuan-hestenes-stiefel": _hybrid,
}
