"""Tensors inside of lists, tuples, deques and dictionaries, as links of an optimizer keep them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_tensors(value: Any, act: Callable[[Tensor], Any], other: Callable[[Any], Any] | None = None) -> Any:
    """A nested value with every tensor in it replaced; its containers are new, of the same kinds.

    Args:
        value: A tensor, or lists, tuples, deques and dictionaries of values.
        act: What becomes of a tensor.
        other: What becomes of anything else; None keeps it.

    Example:
        >>> import torch
        >>> from moduli.layout import map_tensors
        >>> map_tensors({"history": [torch.ones(2), 3]}, torch.neg)
        {'history': [tensor([-1., -1.]), 3]}
    """
    if isinstance(value, Tensor):
        return act(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, act, other) for key, item in value.items()}
    if isinstance(value, deque):
        return deque((map_tensors(item, act, other) for item in value), value.maxlen)
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(item, act, other) for item in value)
    return value if other is None else other(value)
