"""Decisions that processes with pieces of one tensor make together: what one refuses, all refuse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..layout import gather_objects, is_sharded
from ._errors import MergeError


def hold_together(here: bool, tensor: Any) -> bool:
    """Whether something holds in every process that has a piece of a tensor."""
    return all(gather_objects(here, [tensor]))


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
    told = next(
        (text for text in gather_objects(None if failure is None else str(failure), [tensor]) if text is not None), None
    )
    if told is not None:
        raise MergeError(told) from failure


def share_seed(seed: int, first: Any) -> int:
    """A seed that was drawn: that of the first process, where the first model is in pieces."""
    tensors = (
        first.parameters() if isinstance(first, nn.Module) else first.values() if isinstance(first, Mapping) else ()
    )
    held = next((tensor for tensor in tensors if is_sharded(tensor)), None)
    return seed if held is None else int(gather_objects(seed, [held])[0])
