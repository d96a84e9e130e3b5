"""Whether a module or a population has the parameters that it had."""

from __future__ import annotations

from operator import is_not
from typing import TYPE_CHECKING

import torch

from ..layout import ParameterWatch

if TYPE_CHECKING:
    from ..population import Population


class PopulationWatch:
    """The parameters of a population by identity, to be compared with those that it has later.

    Args:
        population: The population.
    """

    __slots__ = ("_leaves", "_population")

    def __init__(self, population: Population) -> None:
        self._population, self._leaves = population, list(population.parameters())

    def has_changed(self) -> bool:
        """Whether the population has other parameters now."""
        leaves = list(self._population.parameters())
        return len(leaves) != len(self._leaves) or any(map(is_not, leaves, self._leaves))


def watch(model: torch.nn.Module | Population) -> ParameterWatch | PopulationWatch:
    """Return what notices that a model has other parameters."""
    return ParameterWatch(model) if isinstance(model, torch.nn.Module) else PopulationWatch(model)
