"""A new model from merged values: the only place that knows how results are built."""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..layout import any_sharded
from ..particles import copy_unwrapped
from ._views import View, is_extra

__all__ = ["rebuild"]


def rebuild(first: View, values: Iterable[tuple[tuple[str, ...], Tensor | None]]) -> nn.Module | dict[str, Any]:
    """A model like the first with other values.

    Args:
        first: The model that decides the form, the order of names and everything that is not merged.
        values: For each group of tied names the value, or None to take the first's. They are taken one at a time;
            if that raises, nothing has happened.
    """
    if isinstance(first.model, nn.Module):
        return _rebuild(first.model, values)
    return _restate(first.model, values)


def _rebuild(first: nn.Module, values: Iterable[tuple[tuple[str, ...], Tensor | None]]) -> nn.Module:
    """A copy of a module with other values in its parameters and buffers: deep, but for models in pieces."""
    result = copy_unwrapped(first) if any_sharded(first.parameters()) else copy.deepcopy(first)
    tensors = {
        **dict(result.named_parameters(remove_duplicate=False)),
        **dict(result.named_buffers(remove_duplicate=False)),
    }
    for names, value in values:
        kept = tensors[names[0]]
        if value is not None:
            kept.copy_(value)
        for name in names[1:]:
            # Copying keeps a Parameter with two names one Parameter, but not two Parameters on one storage.
            if tensors[name] is not kept:
                tensors[name].data = kept.data
    return result


def _restate(first: Mapping[str, Tensor], values: Iterable[tuple[tuple[str, ...], Tensor | None]]) -> dict[str, Any]:
    """A state dict with the keys of another, in their order."""
    merged: dict[str, Tensor] = {}
    for names, value in values:
        # What is tied stays one tensor; what is taken from the first is still a value of its own.
        tensor = first[names[0]].detach().clone() if value is None else value
        merged.update(dict.fromkeys(names, tensor))
    metadata = getattr(first, "_metadata", None)
    result: dict[str, Any] = {} if metadata is None else OrderedDict()
    for name in first:
        result[name] = copy.deepcopy(first[name]) if is_extra(name) else merged[name]
    if metadata is not None:
        result._metadata = copy.deepcopy(metadata)  # type: ignore[attr-defined]
    return result
