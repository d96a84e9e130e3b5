"""Calling a module with other tensors in the place of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._computed import find_computed


def call_with_tensors(
    net: nn.Module, tensors: Mapping[str, Tensor], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Call a module with other tensors in the place of its parameters and buffers, which are put back, and return the result.

    It is `torch.func.functional_call`, which does not put back the tensors of a module that is registered under several names:
    there each slot is replaced once for each name, and the second time the replacement is taken for the original. Here each slot
    is replaced once. A weight that a hook computes before the call, as pruning does, is put back as well.

    Args:
        net: The module.
        tensors: The tensors by name. One of the names of a tied tensor is enough.
        args: The arguments of the call.
        kwargs: Its keyword arguments.

    Example:
        >>> import torch
        >>> from moduli.layout import call_with_tensors
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> net = torch.nn.Sequential(layer, layer)
        >>> call_with_tensors(net, {"0.weight": torch.tensor([[3.0]])}, (torch.ones(1),)).item(), net[0].weight is layer.weight
        (9.0, True)
    """
    slots: dict[tuple[int, str], tuple[str, Tensor]] = {}
    values: dict[int, Tensor] = {}
    unknown = dict(tensors)
    for path, module in net.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None:
                continue
            full = f"{path}.{name}" if path else name
            slots.setdefault((id(module), name), (full, tensor))
            if full in tensors:
                values.setdefault(id(tensor), unknown.pop(full))
    replaced = {full: values[id(tensor)] for full, tensor in slots.values() if id(tensor) in values}
    hooked = [(each, find_computed(each._forward_pre_hooks)) for each in net.modules() if each._forward_pre_hooks]
    computed = [
        (each.__dict__, name, each.__dict__[name]) for each, names in hooked for name in names if name in each.__dict__
    ]
    try:
        return torch.func.functional_call(
            net, {**replaced, **unknown}, tuple(args), dict(kwargs or {}), tie_weights=False
        )
    finally:
        for attributes, name, value in computed:
            attributes[name] = value
