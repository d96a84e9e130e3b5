"""What a module holds, read from torch's registries at the moment of asking."""

import warnings
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

TENSOR_PARAM_PREFIX: Final = "tensor:"
"""Prefix of the names under which owned tensors are registered as parameters."""

TENSOR_BUFFER_PREFIX: Final = "buffer:"
"""Prefix of the names under which owned tensors declared by `nograd_tensors` are registered as buffers."""


def is_stored(module: nn.Module, key: str) -> bool:
    """Whether a registered name has a storage of its own, rather than being computed or gone."""
    return key in module._parameters or key in module._buffers


def list_owned_names(module: nn.Module) -> list[str]:
    """Public names of the owned tensors that can be read."""
    labelled = module.__dict__.get("_labelled", {})
    return [name for name, (key, _) in labelled.items() if is_stored(module, key) or hasattr(module, key)]


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Every parameter and buffer of a module tree."""
    for each in module.modules():
        for registry in (each._parameters, each._buffers):
            for tensor in registry.values():
                if tensor is not None:
                    yield tensor


def device_of(module: nn.Module) -> torch.device:
    """Where the tensors of a module are, or where it was last moved to if it has none."""
    for registry in (module._parameters, module._buffers):
        for tensor in registry.values():
            if tensor is not None:
                return tensor.device
    for tensor in tensors_of(module):
        return tensor.device
    return module.__dict__["_device"].torch_device()  # type: ignore[no-any-return]


def find_registered_target(module: nn.Module, target: str) -> str:
    """The registered name behind a dotted name that may end in the public name of an owned tensor."""
    path, _, name = target.rpartition(".")
    labelled = module.get_submodule(path).__dict__.get("_labelled", {})
    if name not in labelled:
        return target
    key: str = labelled[name][0]
    return f"{path}.{key}" if path else key


def describe(module: nn.Module, name: str) -> str:
    """An owned tensor in one line: its axes, and what it is to the module."""
    # Not by getattr: the key of a container may be the name of one of its methods.
    tensor: Any = module.__getattr__(name)
    axes = ", ".join(f"{'_' if space.name is None else space.name}={len(space)}" for space in tensor.dims)
    if module.__dict__["_labelled"][name][0].startswith(TENSOR_BUFFER_PREFIX):
        kind = "buffer"
    else:
        kind = "parameter" if tensor.requires_grad else "parameter without gradient"
    return f"Tensor({axes}), {str(tensor.dtype).removeprefix('torch.')} {kind}"


def warn_unassigned(module: Any) -> None:
    """Warn, once per class, of names declared by `nograd_tensors` that nothing was assigned to."""
    cls = type(module)
    names = cls.__nograd_tensors__
    if not names:
        return
    known = {*module._labelled, *module._modules, *module._parameters, *module._buffers, *module.__dict__}
    unassigned = sorted(name for name in names - known - cls._assigned_nograd if not hasattr(cls, name))
    if unassigned:
        cls._assigned_nograd.update(unassigned)
        warnings.warn(
            f"{cls.__name__} declares {', '.join(map(repr, unassigned))} with nograd_tensors but never assigned it; "
            "is the name misspelt?",
            stacklevel=3,
        )
