"""A new model from merged values: the only place that knows how results are built."""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import is_fake
from ..layout import any_sharded, is_sharded
from ..particles import copy_unwrapped
from ._checks import is_elsewhere
from ._views import View, is_extra

# How many entries wait to be written to a device at once.
_PACK = 1 << 26


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
    """A copy of a module with other values: deep, but for models in pieces; on a device by one launch for all of them."""
    if any_sharded(first.parameters()):
        blank: dict[int, Any] = {}
        result: nn.Module = copy_unwrapped(first)
    else:
        plain = [each for each in first.parameters() if type(each) is nn.Parameter or is_fake(each)]
        blank = {
            id(each): nn.Parameter(torch.empty_like(each), requires_grad=each.requires_grad)
            for each in plain
            if is_elsewhere(each)
        }
        result = copy.deepcopy(first, dict(blank))
    sources = {id(blank[id(each)]): each for each in first.parameters() if id(each) in blank}
    tensors = {
        **dict(result.named_parameters(remove_duplicate=False)),
        **dict(result.named_buffers(remove_duplicate=False)),
    }
    waiting: list[tuple[Tensor, Tensor]] = []

    def write() -> None:
        if waiting:
            torch._foreach_copy_([kept for kept, _ in waiting], [value for _, value in waiting])
            waiting.clear()

    entries = 0
    for names, value in values:
        kept = tensors[names[0]]
        value = sources.get(id(kept)) if value is None else value
        if value is not None and is_elsewhere(kept) and not is_sharded(kept):
            waiting.append((kept, value))
            entries += kept.numel()
            if entries >= _PACK:
                write()
                entries = 0
        elif value is not None:
            kept.copy_(value)
        for name in names[1:]:
            # Copying keeps a Parameter with two names one Parameter, but not two Parameters on one storage.
            if tensors[name] is not kept:
                tensors[name].data = kept.data
    write()
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
