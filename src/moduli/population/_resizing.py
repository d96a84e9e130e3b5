"""Resizing of all members at once: more or fewer units of an axis of their model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from moduli.layout import REMOVED, RESIZED, Guard, UnitMap
from moduli.particles import StructureError, independent

from ._core import Core, allocate
from ._evaluator import PopulationEvaluator
from ._members import Members, copy_model


class Resizing(Core):
    """The methods of a population that `particles.grow` and `particles.shrink` use."""

    def copy_model(self) -> nn.Module:
        """Return an independent model with the values of the first member.

        Raises:
            StructureError: If the members can't be resized: they are a part of another population, other processes hold some of
                them, or the program references one.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear(3, 2), 5, init=0.1)
            >>> torch.equal(pop.copy_model().weight, pop[0].weight)
            True
        """
        if self._parent is not None:
            raise StructureError(
                "these members are a part of another population, whose structure they have; resize that one"
            )
        self._refuse_shard("the structure")
        index = next((index for index, _ in (*self._members.items(), *self._members.leaves)), None)
        if index is not None:
            raise StructureError(
                f"the program holds member {index} or its parameters, which can't follow; drop them first, or take a copy "
                "(`copy.deepcopy(pop[i])`)"
            )
        model = independent(copy_model(self.template))
        with torch.no_grad():
            leaves = self._read_leaves() if self._count else []
            for param, leaf in zip(PopulationEvaluator(model).entries, leaves, strict=False):
                param.copy_(leaf[0])
            for name, buffer in model.named_buffers() if self._count else ():
                buffer.copy_(self._buffers[name][0])
        return model

    def resize_members(self, model: nn.Module, maps: Mapping[str, UnitMap]) -> None:
        """Give all members the structure of a resized model; if this raises, nothing is changed.

        The values of each member are resized in the same way. Slices of the population that exist already (`pop[2:5]`) keep
        the old structure.

        Args:
            model: The model, which becomes the template.
            maps: How its parameters and buffers were resized, by name; others are unchanged.

        Example:
            >>> from moduli.population import Population
            >>> import moduli as mo
            >>> pop = Population.of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), 5, init=0.1)
            >>> x = torch.randn(7, 3)
            >>> before = pop(x)
            >>> mo.particles.grow(pop, {"0.out": 6}, example=x)
            Population(5 x Sequential, 38 parameters each)
            >>> torch.allclose(pop(x), before, atol=1e-5)
            True
        """
        evaluator, leaves = PopulationEvaluator(model), dict(zip(self.layout.names, self._read_leaves(), strict=True))
        flags = dict(zip(self.layout.names, self._flags, strict=True))
        with torch.no_grad(), torch.inference_mode(False):
            values = allocate(evaluator.layout, self._count)
            for name, view in zip(evaluator.layout.names, evaluator.layout.views(values.matrices), strict=True):
                view.copy_(_resize(leaves[name].detach(), maps.get(name)))
            buffers = {name: _resize(buffer, maps.get(name)) for name, buffer in self._buffers.items()}
        with Guard(deferred=True) as guard:
            guard.mappings(self.__dict__)
            fixed, shard = self._fixed, self._shard
            self._begin(evaluator)
            self._members, self._fixed, self._shard = Members(), fixed, shard
            self._flags = tuple(flags[name] for name in evaluator.layout.names)
            self._values, self._buffers = values, buffers
            for name, leaf in zip(evaluator.layout.names, self._read_leaves(), strict=True):
                if name in maps:
                    RESIZED.record(leaves[name], leaf, [maps[name]])
        REMOVED.mark(leaves.items(), model)  # for optimizers over single leaves


def _resize(stacked: Tensor, unit_map: UnitMap | None) -> Tensor:
    return stacked if unit_map is None else unit_map.resize(stacked, lead=1)
