"""The numbers of a population: one N x P matrix for each group of its layout.

`Values` owns the matrices. Those of a result are *unseen* until storage is asked for: no view exists of
them yet, so a factor may wait (`pending`) to be folded into the next operation, and an operation on a result that exists
only inside an expression may write over it. A result may also be a `PendingSum` that is not computed yet (see
`_deferred`). Storage without references is used again.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from moduli.layout import Group, Layout

from ._deferred import PendingSum, compute
from ._pool import Slab, take

__all__ = ["Values", "deferred", "fresh", "wrap"]


class Values:
    """The matrices of a population.

    Attributes:
        held: The matrices as they are, for those that know that nothing waits.
        pending: What every matrix is still to be multiplied with: a number, or a tensor of shape (N, 1).
        recipe: How to compute the matrix, if it is not computed yet.
        seen: Whether views of the matrices may exist, so that they are live storage from now on.
        slab: The recycled storage of the matrices, if it is that.
    """

    __slots__ = ("__weakref__", "_waiting", "held", "pending", "recipe", "seen", "slab")

    def __init__(self, matrices: list[Tensor], slab: Slab | None = None, seen: bool = False) -> None:
        self.held = matrices
        self.pending: Any = None
        self.recipe: PendingSum | None = None
        self.seen = seen
        self.slab = slab
        # Results that are to be computed from these matrices before anything happens to them.
        self._waiting: list[weakref.ref[Values]] = []
        if slab is not None:
            slab.users += 1

    def __del__(self) -> None:
        # Views go first, so that nothing refers to the storage when it is given back.
        self.held = []
        slab, self.slab = self.slab, None
        if slab is not None:
            slab.release()

    @property
    def matrices(self) -> list[Tensor]:
        """One (N, P) matrix per group of the layout. Nothing waits for them any more: they may be changed."""
        if self.recipe is not None:
            self.compute()
        if self._waiting:
            self.serve()
        return self.held

    @property
    def count(self) -> int:
        """How many members there are, as far as the matrices tell."""
        return self.recipe.members if self.recipe is not None else self.held[0].shape[0] if self.held else 0

    def compute(self, onto: Tensor | None = None, sign: float = 1.0) -> None:
        """Carry out the recipe, and add the result to a matrix if one is given."""
        recipe = self.recipe
        if recipe is not None:
            with torch.no_grad(), torch.inference_mode(False):
                made = fresh(recipe.layout, recipe.members)
                compute(recipe, made.held[0], onto, sign)
            self.held, self.slab = made.held, made.slab
            made.held, made.slab = [], None
            self.recipe = None

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

    def settle(self) -> list[Tensor]:
        """Multiply in what is pending; the matrices then hold the values."""
        if self.pending is not None:
            with torch.no_grad():
                for matrix in self.matrices:
                    matrix.mul_(self.pending if not isinstance(self.pending, Tensor) else self.pending.to(matrix.dtype))
            self.pending = None
        return self.matrices

    def live(self) -> list[Tensor]:
        """The matrices as storage that others may look into and write to."""
        self.settle()
        self.seen = True
        return self.matrices


def deferred(recipe: PendingSum) -> Values:
    """Values that are computed when they are asked for."""
    made = Values([])
    made.recipe = recipe
    for term in recipe.terms:
        for operand in (term.plus, term.minus):
            if isinstance(operand, Values):
                operand.await_(made)
    return made


def fresh(layout: Layout, count: int) -> Values:
    """Uninitialised matrices for `count` members of a layout."""
    with torch.inference_mode(False):
        vectors = [take(Group(g.dtype, g.device, g.numel * count, ())) for g in layout.groups]
    matrices = [v.view(count, g.numel) for v, g in zip(vectors, layout.groups, strict=True)]
    return Values(matrices, Slab(vectors))


def wrap(matrices: list[Tensor], seen: bool = False) -> Values:
    """Matrices that exist."""
    return Values(matrices, seen=seen)
