"""Decisions that processes with pieces of one tensor make together: what one refuses, all refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..layout import find_group, is_sharded
from ._errors import MergeError

__all__ = ["hold_together", "raise_together", "share_seed"]


def _gather(value: Any, tensor: Any) -> list[Any]:
    group = find_group([tensor])
    every: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(every, value, group=group)
    return every


def hold_together(here: bool, tensor: Any) -> bool:
    """Whether something holds in every process that has a piece of a tensor."""
    return all(_gather(here, tensor))


@contextmanager
def raise_together(tensor: Any) -> Iterator[None]:
    """A block that ends with an error in every process that has a piece of a tensor, if it does in one of them.

    Raises:
        MergeError: What the first process found.
    """
    failure: MergeError | None = None
    try:
        yield
    except MergeError as error:
        failure = error
    told = next((text for text in _gather(None if failure is None else str(failure), tensor) if text is not None), None)
    if told is not None:
        raise MergeError(told) from failure


def share_seed(seed: int, first: Any) -> int:
    """A seed that was drawn: that of the first process, where the first model is in pieces."""
    tensors = (
        first.parameters() if isinstance(first, nn.Module) else first.values() if isinstance(first, Mapping) else ()
    )
    held = next((tensor for tensor in tensors if is_sharded(tensor)), None)
    return seed if held is None else int(_gather(seed, held)[0])
