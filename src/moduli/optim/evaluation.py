"""Evaluation at an average of the trained parameters: `opt.eval()` and `opt.train()`.

Links that maintain such an average have a method `averages(params)` (`m.ScheduleFree`, `m.PolyakAveraging`). Trainers call `eval`
and `train` of an optimizer around an evaluation; checkpoints between the two store both sets of values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import Guard

if TYPE_CHECKING:
    from . import Module, Optimizer

# The key of trained parameters in the state of the averaging link.
_TRAINED = "trained"


def find_averaging(optimizer: Optimizer) -> Module | None:
    """Return the last link that maintains averages of the parameters; None if there is none."""
    return next((link for _, link in reversed(optimizer._links) if hasattr(link, "averages")), None)


def show_averages(optimizer: Optimizer) -> None:
    """Replace the parameters by their averages, and store the trained ones in the state of the link."""
    link: Any = find_averaging(optimizer)
    params = _list_averaged(optimizer, link)
    with Guard(deferred=True, grad=False) as guard, torch.no_grad():
        guard.tensors(params)
        averages = [] if link is None else link.averages(params)
        for i, (param, average) in enumerate(zip(params, averages, strict=True)):
            row, key = _find_entry(optimizer, link, param, i)
            row[key] = param.detach().clone()
            param.copy_(average)
    optimizer.evaluating = link is not None


def show_trained(optimizer: Optimizer) -> None:
    """Restore the trained parameters."""
    link = find_averaging(optimizer)
    params = _list_averaged(optimizer, link)
    with Guard(deferred=True, grad=False) as guard, torch.no_grad():
        guard.tensors(params)
        for i, param in enumerate(params):
            row, key = _find_entry(optimizer, link, param, i)
            trained = row.pop(key, None)
            if trained is not None:
                param.copy_(trained)
    optimizer.evaluating = False


def _list_averaged(optimizer: Optimizer, link: Module | None) -> list[Tensor]:
    """Return the parameters that a link has averages of."""
    return [] if link is None else [param for param in optimizer.list_params() if link.state.get(param)]


def _find_entry(optimizer: Optimizer, link: Any, param: Tensor, i: int) -> tuple[dict[str, Any], str]:
    """Return the part of a link's state, and the key in it, under which the trained values of the i-th parameter are stored."""
    if optimizer.population is None:
        return link.state[param], _TRAINED
    return (
        link.global_state,
        f"{_TRAINED} {i}",
    )  # rows of a population are views of one matrix, and take no further entries
