"""A tree of tensors and its fitness, in a module that other processes find by name.

A name below `tests` would not do: packages exist that install a top-level package of this name.
"""

from typing import NamedTuple

import torch


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


def bowl(x):
    return ((x - torch.tensor([1.0, -2.0])) ** 2).sum()


def bowl_of_pair(pair):
    return bowl(pair.a) + (pair.b**2).sum()
