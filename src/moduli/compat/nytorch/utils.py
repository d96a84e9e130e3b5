"""Small tools: copies of parameters and modules, and putting modules together by identifier."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from ...particles.edits import clone_param as clone_param
from .mtype import MetaDict, ModuleDict, ModuleID, ParamDict


def clone_params(params: ParamDict) -> ParamDict:
    """Return copies of parameters, by identifier.

    Example:
        >>> import torch
        >>> clone_params(OrderedDict([(0, nn.Parameter(torch.ones(1)))]))[0].item()
        1.0
    """
    return OrderedDict((key, clone_param(param)) for key, param in params.items())


def copy_module(module: nn.Module) -> nn.Module:
    """Return a module of the same class with the same attributes, parameters, buffers and children, but registries of its own.

    Parts that are registered with the copy, hooks included, are not registered with the original.

    Example:
        >>> a = nn.Linear(2, 1)
        >>> b = copy_module(a)
        >>> b.weight is a.weight, b._parameters is a._parameters
        (True, False)
    """
    # The access to an attribute builds a result that was not read before.
    _ = module._parameters
    twin: nn.Module = object.__new__(type(module))
    own = {key for key, value in vars(nn.Module()).items() if isinstance(value, dict | set)} | {"_labelled"}
    state = {key: value.copy() if key in own else value for key, value in module.__dict__.items() if key != "_particle"}
    twin.__dict__.update(state)
    return twin


def copy_modules(modules: ModuleDict) -> ModuleDict:
    """Return copies of modules, by identifier, as `copy_module` makes them.

    Example:
        >>> copy_modules(OrderedDict([(0, nn.Identity())]))[0]
        Identity()
    """
    return OrderedDict((key, copy_module(module)) for key, module in modules.items())


def make_modules_ref(
    modules: ModuleDict, params: ParamDict, metas: MetaDict, targets: set[ModuleID] | None = None
) -> None:
    """Set the references of modules to each other and to parameters, by metadata.

    Args:
        modules: The modules by identifier.
        params: The parameters by identifier.
        metas: What each module refers to under which name.
        targets: Which modules to change; all by default.

    Example:
        >>> import torch
        >>> from moduli.compat.nytorch import ModuleMeta
        >>> net, head, w = nn.Module(), nn.Module(), nn.Parameter(torch.zeros(1))
        >>> metas = OrderedDict([
        ...     (0, ModuleMeta(OrderedDict(head=1), OrderedDict(w=0))), (1, ModuleMeta(OrderedDict(), OrderedDict()))
        ... ])
        >>> make_modules_ref(OrderedDict([(0, net), (1, head)]), OrderedDict([(0, w)]), metas)
        >>> net.head is head, net.w is w
        (True, True)
    """
    for key in modules if targets is None else targets:
        state, meta = modules[key].__dict__, metas[key]
        state["_modules"] = {n: None if m is None else modules[m] for n, m in meta.sub_modules.items()}
        state["_parameters"] = {n: None if p is None else params[p] for n, p in meta.sub_params.items()}
