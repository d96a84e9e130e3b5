"""The numbers of a population: one N x P matrix for each group of its layout.

`Values` owns the matrices. The last few that nothing refers to any more are used again: a fresh one costs a page fault for
every 4 KiB of it. For the same reason the result of an operator is written over an operand that exists only inside the
expression, so `0.7*v + 1.5*r1*(best - x)` makes the passes over memory that code with `out=` would make.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from moduli._torch import UNKNOWN, count_references, count_storage_uses, is_wrapped
from moduli.layout import Layout

# Matrices to use again: those of so many bytes, below which the C library does as well, and above which memory is dear.
_spare: deque[Tensor] = deque(maxlen=3)
_LEAST, _MOST = 1 << 18, 1 << 26
_probe = torch.empty(1, device="cpu")
# How often a storage is counted that one tensor holds; where that is not known, nothing counts as held by one.
_ALONE = -1 if count_storage_uses(_probe) == UNKNOWN else count_storage_uses(_probe)


class Values:
    """The matrices of a population.

    Attributes:
        matrices: One (N, P) matrix per group of the layout.
    """

    __slots__ = ("matrices",)

    def __init__(self, matrices: list[Tensor]) -> None:
        self.matrices = matrices

    def __del__(self) -> None:
        if self.is_spare() and self.matrices[0].nbytes <= _MOST:
            _spare.append(self.matrices.pop())

    def is_spare(self) -> bool:
        """Whether there is one matrix, large enough to be used again, that nothing else refers to."""
        return len(self.matrices) == 1 and self.matrices[0].nbytes >= _LEAST and is_alone(self.matrices)


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


def is_alone(held: list[Tensor]) -> bool:
    """Whether a list has the only reference to its one matrix and every part of it."""
    matrix = held[0]
    if (
        type(matrix) is not Tensor
        or matrix.device.type != "cpu"
        or matrix.requires_grad
        or matrix.is_inference()
        or is_wrapped(matrix)
        or matrix.untyped_storage().is_shared()
    ):
        return False
    del matrix
    # What the count is for something that one list holds is seen on an object made here.
    alone = [object()]
    return count_references(held[0]) <= count_references(alone[0]) and count_storage_uses(held[0]) <= _ALONE
