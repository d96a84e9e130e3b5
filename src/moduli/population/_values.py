"""The numbers of a population: one N x P matrix for each group of its layout.

`Values` owns the matrices. Those of a result are *unseen* until somebody asks for storage: nobody can have a view of
them yet, so a factor may wait (`pending`) to be folded into the next operation, and an operation on a result that exists
only inside an expression may write over it. Storage that nobody holds any more is used again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moduli.layout import Group, Layout
from moduli.particles._pool import Slab, take

__all__ = ["Values", "fresh", "wrap"]


class Values:
    """The matrices of a population.

    Attributes:
        matrices: One (N, P) matrix per group of the layout.
        pending: What every matrix is still to be multiplied with: a number, or a tensor of shape (N, 1).
        seen: Whether views of the matrices may exist, so that they are live storage from now on.
    """

    __slots__ = ("_slab", "matrices", "pending", "seen")

    def __init__(self, matrices: list[Tensor], slab: Slab | None = None, seen: bool = False) -> None:
        self.matrices = matrices
        self.pending: Any = None
        self.seen = seen
        self._slab = slab
        if slab is not None:
            slab.users += 1

    def __del__(self) -> None:
        # Views go first, so that nobody holds the storage when it is given back.
        self.matrices = []
        slab, self._slab = self._slab, None
        if slab is not None:
            slab.release()

    @property
    def count(self) -> int:
        """How many members there are, as far as the matrices tell."""
        return self.matrices[0].shape[0] if self.matrices else 0

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


def fresh(layout: Layout, count: int) -> Values:
    """Uninitialised matrices for `count` members of a layout."""
    with torch.inference_mode(False):
        vectors = [take(Group(g.dtype, g.device, g.numel * count, ())) for g in layout.groups]
    matrices = [v.view(count, g.numel) for v, g in zip(vectors, layout.groups, strict=True)]
    return Values(matrices, Slab(vectors))


def wrap(matrices: list[Tensor], seen: bool = False) -> Values:
    """Matrices that exist."""
    return Values(matrices, seen=seen)
