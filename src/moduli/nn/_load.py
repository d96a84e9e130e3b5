"""Loading state dicts: all or nothing, with tied names, and the policies for state dicts without labels."""

import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from moduli.layout import Guard

from ._state import align_state, encode

Place: TypeAlias = tuple[dict[str, Any], str]
"""A registry of a module and the name of a tensor in it."""


def places(module: nn.Module) -> dict[str, Place]:
    """Return the registry and key of every parameter and buffer of a module tree, by dotted name."""
    registered: dict[str, Place] = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        for registry in (each._parameters, each._buffers):
            for key, tensor in registry.items():
                if tensor is not None:
                    registered[f"{prefix}.{key}" if prefix else key] = (registry, key)
    return registered


def find_tied_entries(module: nn.Module) -> list[dict[str, Place]]:
    """Return the groups of names that share one tensor."""
    groups: dict[int, dict[str, Place]] = {}
    for name, (registry, key) in places(module).items():
        groups.setdefault(id(registry[key]), {})[name] = (registry, key)
    return [group for group in groups.values() if len(group) > 1]


def reunite(groups: list[dict[str, Place]]) -> None:
    """Register the tensor of the first name of each group under its other names again."""
    for group in groups:
        (registry, key), *others = group.values()
        tensor = registry.get(key)
        for other, other_key in others:
            if other.get(other_key) is not tensor:
                other[other_key] = tensor


def load_all_or_nothing(
    module: nn.Module, state_dict: Mapping[str, Any], load: Callable[[], Any], labels: str = "warn"
) -> Any:
    """Run a load of a state dict into a module, and undo it if it fails.

    Args:
        module: The module.
        state_dict: The state dict.
        load: Loads the state dict; its result is returned.
        labels: As of `Module.load_state_dict`.

    Raises:
        RuntimeError: If names that are tied in the module have different values in the state dict.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict is a mapping from names to tensors, not a {type(state_dict).__name__}")
    check_policy(labels)
    groups = find_tied_entries(module)
    _check_ties(module, groups, state_dict)
    unlabelled: list[str] = []
    token = _unlabelled.set(unlabelled)
    try:
        with Guard(deferred=True) as guard:
            if not _is_certain(module, state_dict, labels):
                _protect(module, guard)
            result = load()
            reunite(groups)
            report_unlabelled(unlabelled, labels)
            return result
    finally:
        _unlabelled.reset(token)


def _is_certain(module: nn.Module, state_dict: Mapping[str, Any], labels: str) -> bool:
    """Whether the load cannot fail, so that no copy for undoing it is needed.

    That requires exactly the module's names, each with a tensor of the same shape and device, the same labels, and no user
    hooks that could fail half way.
    """
    metadata = getattr(state_dict, "_metadata", {})
    transient: set[str] = set()
    for prefix, each in module.named_modules():
        if each._load_state_dict_pre_hooks or each._load_state_dict_post_hooks:
            return False
        if not _has_labels(each, prefix, metadata.get(prefix, {}).get("labels", {}), labels):
            return False
        transient.update(f"{prefix}.{name}" if prefix else name for name in each._non_persistent_buffers_set)
    tensors = {name: registry[key] for name, (registry, key) in places(module).items() if name not in transient}
    return tensors.keys() == state_dict.keys() and all(
        isinstance(value, torch.Tensor)
        and not is_lazy(value)
        and not is_lazy(tensors[name])
        and value.shape == tensors[name].shape
        and value.device == tensors[name].device
        for name, value in state_dict.items()
    )


def _has_labels(module: nn.Module, prefix: str, saved: Mapping[str, Any], labels: str) -> bool:
    """Whether the saved labels are those of the module's own tensors; tensors without saved labels need the policy "ignore"."""
    return all(
        saved[name] == encode(axes, f"{prefix}.{name}") if name in saved else labels == "ignore"
        for name, (_, axes) in module.__dict__.get("_labelled", {}).items()
    )


def _check_ties(module: nn.Module, groups: list[dict[str, Place]], state_dict: Mapping[str, Any]) -> None:
    for group in groups:
        values = {name: state_dict[name] for name in group if isinstance(state_dict.get(name), torch.Tensor)}
        first = next(iter(values), "")
        for name, value in values.items():
            if value is not values[first] and not torch.equal(value, values[first]):
                raise RuntimeError(
                    f"{type(module).__name__} has one tensor for {first!r} and {name!r}, but the state dict has "
                    "different values for them; untie them by assigning one of them, or remove one from the state dict"
                )


def _protect(module: nn.Module, guard: Guard) -> None:
    """Register the tensors, registries and extra state of a module tree with a guard."""
    for each in module.modules():
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            guard.add(partial(each.set_extra_state, each.get_extra_state()))
    registries = [registry for each in module.modules() for registry in (each._parameters, each._buffers)]
    tensors = [tensor for registry in registries for tensor in registry.values() if tensor is not None]
    for tensor in tensors:
        if is_lazy(tensor):
            guard.add(partial(_make_lazy, tensor, type(tensor)))
    guard.tensors(tensor for tensor in tensors if not is_lazy(tensor))
    guard.mappings(*registries)


def _make_lazy(tensor: Any, kind: type) -> None:
    """Make a parameter uninitialised again after loading has given it a shape."""
    if not is_lazy(tensor):
        tensor.data = tensor.data.new_empty(0)
        tensor.__class__ = kind


# -- state dicts without labels ---------------------------------------------------------------------------------------

_POLICIES: Final = ("warn", "ignore", "require")
_unlabelled: ContextVar[list[str] | None] = ContextVar("unlabelled", default=None)


def check_policy(labels: str) -> None:
    """Raise ValueError if `labels=` is not one of the policies."""
    if labels not in _POLICIES:
        raise ValueError(f"labels={labels!r}; give {', '.join(map(repr, _POLICIES))}")


def note_unlabelled(names: list[str]) -> None:
    """Report tensors that are loaded by position: to the running load, or else by a warning."""
    noted = _unlabelled.get()
    if noted is not None:
        noted += names
    else:
        report_unlabelled(names, "warn")


def report_unlabelled(names: list[str], labels: str) -> None:
    """Warn of tensors whose labels the state dict lacks, or raise, or do nothing, depending on the policy `labels`.

    Raises:
        RuntimeError: If labels are required.
    """
    if not names or labels == "ignore":
        return
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    text = f"the state dict has no labels for {names[0]!r}{more}"
    if labels == "require":
        raise RuntimeError(
            f"{text}; give what state_dict() returned, or what mo.save wrote: copies as a dict lose them"
        )
    warnings.warn(
        f"{text}, which is loaded by position: copies of a state dict (dict(sd), safetensors' load_file) lose them. Give what "
        'state_dict() returned or mo.save wrote, or say labels="ignore" if the order is the same',
        UserWarning,
        stacklevel=4,
    )


def align_state_dict(module: nn.Module, state_dict: Mapping[str, Any], lead: int, labels: str) -> dict[str, Any]:
    """Return a state dict with the labelled tensors of a module tree in the module's order of labels.

    Args:
        module: The module.
        state_dict: A state dict; labels are read from its `_metadata`.
        lead: The number of axes before those of the module, such as the members of a population.
        labels: As of `Module.load_state_dict`.

    Raises:
        ValueError: If labels differ, or there are none where they are required.

    Example:
        >>> from moduli.nn import align_state_dict
        >>> align_state_dict(nn.ReLU(), {}, 0, "warn")
        {}
    """
    check_policy(labels)
    metadata, aligned = getattr(state_dict, "_metadata", {}), dict(state_dict)
    errors: list[str] = []
    unlabelled: list[str] = []
    for path, each in module.named_modules(remove_duplicate=False):
        labelled = each.__dict__.get("_labelled")
        if labelled:
            prefix = f"{path}." if path else ""
            wrong, silent = align_state(labelled, aligned, prefix, metadata.get(path, {}).get("labels", {}), lead)
            errors, unlabelled = errors + wrong, unlabelled + silent
    if errors:
        raise ValueError("; ".join(errors))
    report_unlabelled(unlabelled, labels)
    return aligned
