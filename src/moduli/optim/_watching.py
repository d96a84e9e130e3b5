"""Whether a module or a population has the parameters that it had."""

from __future__ import annotations

from operator import is_not
from typing import TYPE_CHECKING

import torch

from ..layout import ParameterWatch

if TYPE_CHECKING:
    from ..population import Population


class PopulationWatch:
    """The parameters of a population by identity, and their layout, to be compared with those that it has later.

    `Population.to` leaves the parameters the same objects, with another dtype or device: the layout is then another one.

    Args:
        population: The population.
    """

    __slots__ = ("_layout", "_leaves", "_population")

    def __init__(self, population: Population) -> None:
        self._population, self._leaves = population, list(population.parameters())
        self._layout = population.layout

    def has_changed(self) -> bool:
        """Whether the population has other parameters now, or those of another dtype or device."""
        if self._population.layout is not self._layout:
            return True
        leaves = list(self._population.parameters())
        return len(leaves) != len(self._leaves) or any(map(is_not, leaves, self._leaves))


def watch(model: torch.nn.Module | Population) -> ParameterWatch | PopulationWatch:
    """Return what notices that a model has other parameters."""
    return ParameterWatch(model) if isinstance(model, torch.nn.Module) else PopulationWatch(model)
