"""Evaluation at an average of the trained parameters: `opt.eval()` and `opt.train()`.

Links that maintain such an average have a method `averages(params)` (`m.ScheduleFree`, `m.PolyakAveraging`). Trainers call `eval`
and `train` of an optimizer around an evaluation; checkpoints between the two store both sets of values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..layout import Guard

if TYPE_CHECKING:
    from . import Module, Optimizer

_TRAINED = "trained"


def find_averaging(optimizer: Optimizer) -> Module | None:
    """Return the last link that maintains averages of the parameters; None if there is none."""
    return next((link for _, link in reversed(optimizer._links) if hasattr(link, "averages")), None)


def show_averages(optimizer: Optimizer) -> None:
    """Replace the parameters by their averages, and store the trained ones in the state of the link."""
    link: Any = find_averaging(optimizer)
    params = [] if link is None else [param for param in optimizer.list_params() if link.state.get(param)]
    with Guard(deferred=True, grad=False) as guard, torch.no_grad():
        guard.tensors(params)
        averages = [] if link is None else link.averages(params)
        for i, (param, average) in enumerate(zip(params, averages, strict=True)):
            # The rows of a population are views of one matrix, to which no entry can be added.
            row = link.state[param] if optimizer.population is None else link.global_state
            row[_TRAINED if optimizer.population is None else f"{_TRAINED} {i}"] = param.detach().clone()
            param.copy_(average)
    optimizer.evaluating = link is not None


def show_trained(optimizer: Optimizer) -> None:
    """Restore the trained parameters."""
    link: Any = find_averaging(optimizer)
    params = [] if link is None else [param for param in optimizer.list_params() if link.state.get(param)]
    with Guard(deferred=True, grad=False) as guard, torch.no_grad():
        guard.tensors(params)
        for i, param in enumerate(params):
            row = link.state[param] if optimizer.population is None else link.global_state
            trained = row.pop(_TRAINED if optimizer.population is None else f"{_TRAINED} {i}", None)
            if trained is not None:
                param.copy_(trained)
    optimizer.evaluating = False
