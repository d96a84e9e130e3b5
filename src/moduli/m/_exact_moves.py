"""Arriving exactly where a link wants to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..optim import Objective


def land(objective: Objective, goal: Sequence[Tensor]) -> None:
    """Leave the parameters at a goal bit for bit, where the links that follow let the update lead there.

    The update is a difference, and x - (x - goal) is the goal up to rounding only; a search that is asked again has to
    find its members where it left them, and a member that is infinite or NaN would stay so.
    """
    params, updates = list(objective.params), objective.get_updates()
    expected = [param.detach() - update.to(param.dtype) for param, update in zip(params, updates, strict=True)]

    def settle(last: Objective, links: Sequence[Any]) -> None:
        with torch.no_grad():
            for param, there, place in zip(params, expected, goal, strict=True):
                if torch.allclose(param, there, rtol=0.0, atol=0.0, equal_nan=True):
                    param.copy_(place)

    objective.post_step_hooks.append(settle)
