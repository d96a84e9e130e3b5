"""Links with a weight decay that may apply to matrices only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from ..optim import Module, Optimizer

Decays = Literal["all", "matrices"]
"""Which parameters decay: all, or without biases and scales of normalisations."""


class DecayingLink(Module):
    """A link with the setting `weight_decay`, which is zero for vectors if its attribute `only` is "matrices"."""

    reads_axes = True

    if TYPE_CHECKING:
        only: Decays

    def attached(self, optimizer: Optimizer) -> None:
        """Set the decay of vectors to zero, if only matrices decay."""
        super().attached(optimizer)
        if self.only == "matrices":
            vectors = [param for param in optimizer.list_params() if _is_vector(param, optimizer)]
            self.set_param_groups([{"params": vectors, "weight_decay": 0.0}])


def _is_vector(param: Tensor, optimizer: Optimizer) -> bool:
    axes, name = optimizer.binding.axes, optimizer.binding.slots.find_name(param)
    if axes is not None and name is not None:
        return axes.of(name).role == "vector"
    return sum(size != 1 for size in (param.shape if optimizer.population is None else param.shape[1:])) < 2
