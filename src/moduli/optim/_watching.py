"""Detection of changes to the parameters of a module or a population."""

from __future__ import annotations

from operator import is_not
from typing import TYPE_CHECKING

import torch

from ..layout import ParameterWatch

if TYPE_CHECKING:
    from ..population import Population


class PopulationWatch:
    """A snapshot of a population's parameters (by identity) and layout, to detect changes.

    `Population.to` leaves the parameters the same objects, with another dtype or device: the layout is then another one.

    Args:
        population: The population.
    """

    __slots__ = ("_layout", "_leaves", "_population")

    def __init__(self, population: Population) -> None:
        self._population, self._leaves = population, list(population.parameters())
        self._layout = population.layout

    def has_changed(self) -> bool:
        """Return whether the population has other parameters now, or another dtype or device."""
        if self._population.layout is not self._layout:
            return True
        leaves = list(self._population.parameters())
        return len(leaves) != len(self._leaves) or any(map(is_not, leaves, self._leaves))


def watch(model: torch.nn.Module | Population) -> ParameterWatch | PopulationWatch:
    """Return an object that detects when a model has other parameters."""
    return ParameterWatch(model) if isinstance(model, torch.nn.Module) else PopulationWatch(model)
