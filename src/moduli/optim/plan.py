"""What a step needs and how it is known to be as it was: one plan, one question.

A plan is made by ordinary code without shortcuts, and replaced when it does not match any more. Changes to a group, to the
defaults of a link or to one of its declarations are counted (`Writes`), so that a step compares one number; which parameters
there are and which of them are trained is read from the groups, since torch lets programs write into those lists. A number that
replaces a number (a learning rate that a scheduler writes) is read again and changes no plan.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ._groups import apply_groups
from ._writes import CountedDict, Writes

if TYPE_CHECKING:
    from .optimizer import Optimizer

_requires_grad = operator.attrgetter("requires_grad")


class StepPlan:
    """The parameters of a step.

    Attributes:
        active: The parameters that require a gradient, in the order of the groups.
        matrices: The positions of those that are no vectors.
        numbers: The count of all writes when the settings were last read.
    """

    __slots__ = ("_count", "_flags", "_groups", "_lists", "_params", "_writes", "active", "matrices", "numbers")

    def __init__(self, optimizer: Optimizer, active: list[Tensor]) -> None:
        groups = optimizer.param_groups
        self._writes: Writes = optimizer.binding.writes
        self._count, self.numbers = self._writes.count, self._writes.numbers
        # Groups that the optimizer did not make do not count what is written into them.
        counted = all(isinstance(group, CountedDict) and group.writes is self._writes for group in groups)
        self._groups: list[Mapping[str, Any]] = list(groups) if counted else []
        self._lists = [group["params"] for group in groups]
        self._params = list(itertools.chain.from_iterable(self._lists))
        self._flags = list(map(_requires_grad, self._params))
        self.active = active
        self.matrices = [i for i, param in enumerate(active) if param.dim() > 1]

    def matches(self, optimizer: Optimizer) -> bool:
        """Whether nothing has changed that the plan was made of."""
        return self.has_groups(optimizer) and list(map(_requires_grad, self._params)) == self._flags

    def has_groups(self, optimizer: Optimizer) -> bool:
        """Whether links, groups and their parameters are those that the plan was made of."""
        groups = optimizer.param_groups
        if self._count != self._writes.count or len(groups) != len(self._groups):
            return False
        if not all(map(operator.is_, groups, self._groups)):
            return False
        # Every step looks at every parameter, so this is written to run in C.
        every = list(itertools.chain.from_iterable(self._lists))
        return len(every) == len(self._params) and all(map(operator.is_, every, self._params))


def find_plan(optimizer: Optimizer) -> StepPlan:
    """Return the plan of the next step: the one that there is, with the numbers of now, or a new one."""
    plan, writes = optimizer._plan, optimizer.binding.writes
    if plan is not None and plan.matches(optimizer):
        if plan.numbers != writes.numbers:
            apply_groups(optimizer)
            plan.numbers = writes.numbers
        return plan
    if plan is None or not plan.has_groups(optimizer) or plan.numbers != writes.numbers:
        optimizer.binding.slots.name_params(optimizer.param_groups)
        apply_groups(optimizer)
    active = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    before = None if plan is None else plan.active
    # The same list while it holds the same parameters: forms of them are made for a list.
    if before is not None and len(before) == len(active) and all(map(operator.is_, before, active)):
        active = before
    plan = optimizer._plan = StepPlan(optimizer, active)
    return plan
