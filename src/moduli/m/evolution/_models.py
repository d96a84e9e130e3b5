"""Copies of one model that are kept from step to step, as long as the model is built as it was."""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from ...population import Population

_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type,
    torch.dtype,
    torch.device,
    FunctionType,
    BuiltinFunctionType,
)
_VALUES = ("_parameters", "_buffers", "_modules")


class Models:
    """Populations of copies of a model, by their size.

    To copy a small model takes about as long as to evaluate it. What copies depend on besides parameters and buffers, which
    are brought up to date every time, is compared: classes, modes, attributes. A model with attributes that can change
    without being replaced (a list, a hook, an object) is copied anew each time.
    """

    def __init__(self) -> None:
        self._built: list[Any] | None = None
        self._kept: dict[int, Population] = {}

    def of(self, net: nn.Module, count: int) -> Population:
        """`count` copies of the model as it is now."""
        built = _describe_build(net)
        if built is None or built != self._built:
            self._built, self._kept = built, {}
        pop = self._kept.get(count)
        if pop is None:
            pop = Population.of(net, count)
            if built is not None:
                # All blocks of a generation but the last have one size.
                self._kept = {**dict(list(self._kept.items())[-1:]), count: pop}
            return pop
        with torch.no_grad():
            for mine, theirs in (
                (pop.named_parameters(), net.named_parameters()),
                (pop.named_buffers(), net.named_buffers()),
            ):
                values = dict(theirs)
                for name, stacked in mine:
                    stacked.copy_(values[name])
        return pop


def _describe_build(net: nn.Module) -> list[Any] | None:
    """What a copy of the model depends on besides values, to be compared; None where it can't be."""
    found: list[Any] = [
        (name, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
        for named in (net.named_parameters(), net.named_buffers())
        for name, tensor in named
    ]
    for path, module in net.named_modules():
        found.append((path, type(module)))
        for name, value in module.__dict__.items():
            if name in _VALUES:
                continue
            if not _is_plain(value):
                if value or not isinstance(value, dict | set | list):
                    return None
                value = None
            found.append((name, type(value), value))
    return found


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else isinstance(value, _PLAIN)
