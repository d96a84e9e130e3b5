"""Populations around a starting point."""

from __future__ import annotations

import torch
from torch import nn

from ..population import Population


def scatter(model: nn.Module, *, size: int, spread: float, seed: int) -> Population:
    """A population of which the first member is the model, and the others lie around it.

    Args:
        model: Where it starts; the population has copies.
        size: How many members.
        spread: The standard deviation of the others, in every parameter.
        seed: Added to torch's seed, so that runs from other seeds start with other clouds.
    """
    generator = torch.Generator().manual_seed((torch.initial_seed() + seed + 1) % 2**63)
    population = Population.of(model, size, init=spread, generator=generator)
    with torch.no_grad():
        for (_, stacked), start in zip(population.named_parameters(), model.parameters(), strict=True):
            stacked[0] = start
    return population
