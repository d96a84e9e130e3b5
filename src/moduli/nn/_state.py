"""Loading all or nothing, and tensors that several names share."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from ._labels import same_labels

Place: TypeAlias = tuple[dict[str, Any], str]
"""A registry of a module and the name of a tensor in it."""


def places(module: nn.Module) -> dict[str, Place]:
    """Where every parameter and buffer of a module tree is registered, by dotted name."""
    found: dict[str, Place] = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        for registry in (each._parameters, each._buffers):
            for key, tensor in registry.items():
                if tensor is not None:
                    found[f"{prefix}.{key}" if prefix else key] = (registry, key)
    return found


def find_tied_entries(module: nn.Module) -> list[dict[str, Place]]:
    """The groups of names under which one and the same tensor is registered."""
    groups: dict[int, dict[str, Place]] = {}
    for name, (registry, key) in places(module).items():
        groups.setdefault(id(registry[key]), {})[name] = (registry, key)
    return [group for group in groups.values() if len(group) > 1]


def reunite(groups: list[dict[str, Place]]) -> None:
    """Make the names of each group share one tensor again: that of the first name."""
    for group in groups:
        (registry, key), *others = group.values()
        tensor = registry.get(key)
        for other, other_key in others:
            if other.get(other_key) is not tensor:
                other[other_key] = tensor


def load_all_or_nothing(module: nn.Module, state_dict: Mapping[str, Any], load: Callable[[], Any]) -> Any:
    """Run a load of a state dict into a module, and undo it if it fails.

    Raises:
        RuntimeError: If names that are tied in the module have different values in the state dict.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict is a mapping from names to tensors, not a {type(state_dict).__name__}")
    groups = find_tied_entries(module)
    _check_ties(module, groups, state_dict)
    undo = None if _is_certain(module, state_dict) else _Snapshot(module)
    try:
        result = load()
    except BaseException:
        if undo is not None:
            undo.restore()
        raise
    reunite(groups)
    return result


def _is_certain(module: nn.Module, state_dict: Mapping[str, Any]) -> bool:
    """Whether nothing can go wrong, so that the copy which a failed load is undone from need not be made.

    That is: exactly the module's names, each with a tensor of the same shape and device, the same labels, and no code of
    others that could fail half way.
    """
    metadata = getattr(state_dict, "_metadata", {})
    transient: set[str] = set()
    for prefix, each in module.named_modules():
        if each._load_state_dict_pre_hooks or each._load_state_dict_post_hooks:
            return False
        if not same_labels(each.__dict__.get("_labelled", {}), metadata.get(prefix, {}).get("labels", {}), prefix):
            return False
        transient.update(f"{prefix}.{name}" if prefix else name for name in each._non_persistent_buffers_set)
    held = {name: registry[key] for name, (registry, key) in places(module).items() if name not in transient}
    return held.keys() == state_dict.keys() and all(
        isinstance(value, torch.Tensor) and value.shape == held[name].shape and value.device == held[name].device
        for name, value in state_dict.items()
    )


def _check_ties(module: nn.Module, groups: list[dict[str, Place]], state_dict: Mapping[str, Any]) -> None:
    for group in groups:
        given = {name: state_dict[name] for name in group if isinstance(state_dict.get(name), torch.Tensor)}
        first = next(iter(given), "")
        for name, value in given.items():
            if value is not given[first] and not torch.equal(value, given[first]):
                raise RuntimeError(
                    f"{type(module).__name__} has one tensor for {first!r} and {name!r}, but the state dict has "
                    "different values for them; untie them by assigning one of them, or remove one from the state dict"
                )


class _Snapshot:
    """What a module tree holds, to put it back."""

    def __init__(self, module: nn.Module) -> None:
        self._registries: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (registry, dict(registry)) for each in module.modules() for registry in (each._parameters, each._buffers)
        ]
        tensors = {id(t): t for _, entries in self._registries for t in entries.values() if t is not None}
        self._tensors = [(tensor, tensor.detach(), tensor.detach().clone()) for tensor in tensors.values()]
        self._extra = [
            (each, each.get_extra_state())
            for each in module.modules()
            if type(each).get_extra_state is not nn.Module.get_extra_state
        ]

    def restore(self) -> None:
        for registry, entries in self._registries:
            registry.clear()
            registry.update(entries)
        with torch.no_grad():
            for tensor, alias, values in self._tensors:
                if tensor.data_ptr() != alias.data_ptr() or tensor.dtype != alias.dtype or tensor.shape != alias.shape:
                    # It was exchanged for another tensor under the same object.
                    tensor.data = alias
                if not values.is_meta:
                    tensor.copy_(values)
        for module, extra in self._extra:
            module.set_extra_state(extra)
