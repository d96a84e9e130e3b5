"""One loss of several processes, so that links which decide on it decide alike."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["OverProcesses"]


class OverProcesses:
    """The sum or the mean of the losses of all processes."""

    def __init__(self, *, mean: bool) -> None:
        self.mean = mean

    def __call__(self, loss: Tensor) -> Tensor:
        total = loss.clone()
        torch.distributed.all_reduce(total)
        return total / torch.distributed.get_world_size() if self.mean else total
