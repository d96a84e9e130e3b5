"""Labelled tensors where torch looks for tensors: in the results of wrapped modules, and in the samples of a batch.

DistributedDataParallel and both kinds of FSDP look for tensors in lists, dictionaries and dataclasses, to be told when a
backward pass begins. A labelled tensor shows itself to them as a dataclass of its `data` and its `dims`, which are what it
is made of: ``Tensor(data, dims)``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .._torch import register_collate
from ._concat import stack
from ._tensor import Tensor


@dataclasses.dataclass(init=False, repr=False, eq=False)
class _Parts:
    data: Any
    dims: Any


for _name in ("__dataclass_fields__", "__dataclass_params__"):
    setattr(Tensor, _name, getattr(_Parts, _name))


def collate(batch: list[Tensor], *, collate_fn_map: Any = None) -> Tensor:
    """The samples of a batch side by side, with a new axis in front, as `default_collate` does with plain tensors."""
    return stack(batch)


register_collate(Tensor, collate)
