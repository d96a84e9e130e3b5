"""The numbers of a population: one N x P matrix for each group of its layout.

`Values` owns the matrices. Those of a result may be a `PendingSum` that is not computed yet (see `_deferred`): it is computed
when the matrices are asked for, and before what it reads changes. The last few matrices that nothing refers to any more are used
again: a fresh one costs a page fault for every 4 KiB of it.
"""

from __future__ import annotations

import weakref
from collections import deque

import torch
from torch import Tensor

from moduli.layout import Layout

from ._deferred import PendingSum, compute, is_alone

# Matrices to use again: those of so many bytes, below which the C library does as well, and above which memory is dear.
_spare: deque[Tensor] = deque(maxlen=3)
_LEAST, _MOST = 1 << 18, 1 << 26


class Values:
    """The matrices of a population.

    Attributes:
        held: The matrices as they are, for those that know that nothing waits.
        recipe: How to compute the matrix, if it is not computed yet.
    """

    __slots__ = ("__weakref__", "_waiting", "held", "recipe")

    def __init__(self, matrices: list[Tensor], recipe: PendingSum | None = None) -> None:
        self.held = matrices
        self.recipe = recipe
        # Results that are to be computed from these matrices before anything happens to them.
        self._waiting: list[weakref.ref[Values]] = []

    def __del__(self) -> None:
        if len(self.held) == 1 and _LEAST <= self.held[0].nbytes <= _MOST and is_alone(self.held):
            _spare.append(self.held.pop())

    @property
    def matrices(self) -> list[Tensor]:
        """One (N, P) matrix per group of the layout. Nothing waits for them any more: they may be changed."""
        if self.recipe is not None:
            self.compute()
        if self._waiting:
            self.serve()
        return self.held

    def compute(self, onto: Tensor | None = None, sign: float = 1.0) -> None:
        """Carry out the recipe, and add the result to a matrix if one is given."""
        recipe = self.recipe
        if recipe is not None:
            with torch.no_grad(), torch.inference_mode(False):
                made = allocate(recipe.layout, recipe.members)
                compute(recipe, made.held[0], onto, sign)
            self.held, made.held, self.recipe = made.held, [], None

    def serve(self, besides: Values | None = None) -> None:
        """Compute what waits for these matrices, besides one result that the caller computes."""
        waiting, self._waiting = self._waiting, []
        for place, reference in enumerate(waiting):
            values = reference()
            if values is not None and values is not besides:
                try:
                    values.compute()
                except BaseException:
                    self._waiting = waiting[place:]
                    raise

    def await_(self, values: Values) -> None:
        """Remember a result that is to be computed before the matrices change."""
        if len(self._waiting) > 16:
            self._waiting = [known for known in self._waiting if (held := known()) is not None and held.recipe]
        self._waiting.append(weakref.ref(values))


def make_deferred(recipe: PendingSum) -> Values:
    """Values that are computed when they are asked for."""
    made = Values([], recipe)
    for term in recipe.terms:
        for operand in (term.plus, term.minus):
            if isinstance(operand, Values):
                operand.await_(made)
    return made


def allocate(layout: Layout, count: int) -> Values:
    """Uninitialised matrices for `count` members of a layout."""
    groups = layout.groups
    kind = (groups[0].dtype, groups[0].device) if groups else None
    for _ in range(len(_spare) if len(groups) == 1 else 0):
        try:
            matrix = _spare.popleft()
        except IndexError:
            break  # another thread took it
        if matrix.shape == (count, groups[0].numel) and (matrix.dtype, matrix.device) == kind:
            return Values([matrix])
        _spare.append(matrix)
    with torch.inference_mode(False):
        return Values([torch.empty(count, g.numel, dtype=g.dtype, device=g.device) for g in groups])
