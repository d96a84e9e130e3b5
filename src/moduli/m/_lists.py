"""Inner products and norms of lists of tensors: numbers, which stay 0-d tensors where the tensors are on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from .._torch import in_transform
from ..optim import Module, Objective
from ._scalars import read


def _view_real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]


def dot(first: Sequence[Tensor], second: Sequence[Tensor], members: int | None = None) -> Any:
    """The real inner product, accumulated in double; a tensor where it is differentiated or vectorised.

    One for each member of a population, where tensors are stacked over them.
    """
    if members is not None:
        pairs = zip(_view_real(first), _view_real(second), strict=True)
        return torch.stack([(a.double() * b).reshape(members, -1).sum(1) for a, b in pairs]).sum(0)
    if torch.is_grad_enabled() or in_transform():
        products = [(a.double() * b.double()).sum() for a, b in zip(_view_real(first), _view_real(second), strict=True)]
        return torch.stack(products).sum()
    return read(kernels.dot(_view_real(first), _view_real(second)))


def norm(tensors: Sequence[Tensor], order: float = 2) -> Any:
    """The norm of all elements, accumulated in double; a tensor where it is differentiated or vectorised."""
    if torch.is_grad_enabled() or in_transform():
        parts = _view_real(tensors) if order == 2 else [t.abs() for t in tensors]
        sizes = [torch.linalg.vector_norm(t, order, dtype=torch.float64) for t in parts]
        return torch.linalg.vector_norm(torch.stack(sizes), order)
    return read(kernels.norm(tensors, order))


def measure_move(link: Module, params: Sequence[Tensor], order: float) -> float | None:
    """The norm of what the parameters moved by since the link asked last; None where there is one that it did not know."""
    fresh = any("previous" not in link.state[param] for param in params)
    before = link.get_state(params, "previous", init="param")
    size = float(kernels.norm([param.detach() - value for param, value in zip(params, before, strict=True)], order))
    for param, value in zip(params, before, strict=True):
        value.copy_(param.detach())
    return None if fresh else size


def reset_others(link: Module, objective: Objective, modules: Sequence[Module]) -> None:
    """Reset the links of an optimizer that this one is not part of; a hook for the end of a step, but for the first argument."""
    for module in modules:
        if all(part is not link for _, part in module.links()):
            module.reset()
