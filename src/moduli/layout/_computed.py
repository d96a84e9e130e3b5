"""Weights that pruning and old normalisations compute from parameters before every call, and copies of models that have them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ._pieces import is_expanded

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_KINDS = {BasePruningMethod: "_tensor_name", WeightNorm: "name", SpectralNorm: "name"}


def find_computed(hooks: Mapping[int, Any]) -> dict[str, Any]:
    """Return the hooks of pruning and old normalisations, by the attribute that each computes before every call.

    Args:
        hooks: The hooks that run before the forward of a module.

    Example:
        >>> import torch
        >>> from moduli.layout import find_computed
        >>> pruned = torch.nn.utils.prune.identity(torch.nn.Linear(2, 1), "weight")
        >>> list(find_computed(pruned._forward_pre_hooks))
        ['weight']
    """
    return {getattr(hook, n): hook for hook in hooks.values() for kind, n in _KINDS.items() if isinstance(hook, kind)}


def compute_weight(module: nn.Module, name: str, hook: Any) -> None:
    """Set the attribute that a hook computes, without changing the state that the hook has.

    Args:
        module: The module.
        name: The attribute.
        hook: The hook, as `find_computed` returns it.
    """
    if isinstance(hook, SpectralNorm):
        setattr(module, name, hook.compute_weight(module, do_power_iteration=False))
    else:
        hook(module, None)


def recompute_weights(net: nn.Module) -> None:
    """Compute the weights of a model that hooks compute, after its parameters were written; with a graph where they had one.

    Args:
        net: The model.
    """
    for module in net.modules():
        for name, hook in find_computed(module._forward_pre_hooks).items():
            before = module.__dict__.get(name)
            with torch.set_grad_enabled(isinstance(before, Tensor) and before.requires_grad):
                compute_weight(module, name, hook)


def copy_module(net: ModuleT) -> ModuleT:
    """Return a deep copy of a model that can be written to.

    Weights that hooks compute are computed from the parameters of the copy: `copy.deepcopy` raises for a pruned model that was
    called with gradients, because such a weight is no leaf. Expanded buffers get memory for every element.

    Args:
        net: The model.

    Example:
        >>> import copy, torch
        >>> from moduli.layout import copy_module
        >>> pruned = torch.nn.utils.prune.identity(torch.nn.Linear(2, 1), "weight")
        >>> twin = copy_module(pruned)
        >>> twin.weight.equal(pruned.weight), twin.weight_orig is pruned.weight_orig
        (True, False)
    """
    memo: dict[int, Any] = {}
    for module in net.modules():
        for name in find_computed(module._forward_pre_hooks):
            value = module.__dict__.get(name)
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().requires_grad_()
    twin = copy.deepcopy(net, memo)
    for tensor in (*twin.parameters(), *twin.buffers()):
        if is_expanded(tensor):
            tensor.data = tensor.data.contiguous()
    recompute_weights(twin)
    return twin
