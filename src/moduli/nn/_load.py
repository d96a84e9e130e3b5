"""Loading state dicts: all or nothing, with tied names, and what becomes of labels that a state dict has lost."""

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


def load_all_or_nothing(
    module: nn.Module, state_dict: Mapping[str, Any], load: Callable[[], Any], labels: str = "warn"
) -> Any:
    """Run a load of a state dict into a module, and undo it if it fails.

    Args:
        module: The module.
        state_dict: The state dict.
        load: Loads it.
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
    """Whether nothing can go wrong, so that the copy which a failed load is undone from need not be made.

    That is: exactly the module's names, each with a tensor of the same shape and device, the same labels, and no code of
    others that could fail half way.
    """
    metadata = getattr(state_dict, "_metadata", {})
    transient: set[str] = set()
    for prefix, each in module.named_modules():
        if each._load_state_dict_pre_hooks or each._load_state_dict_post_hooks:
            return False
        saved = metadata.get(prefix, {}).get("labels", {})
        for name, (_, axes) in each.__dict__.get("_labelled", {}).items():
            same = saved[name] == encode(axes, f"{prefix}.{name}") if name in saved else labels == "ignore"
            if not same:
                return False
        transient.update(f"{prefix}.{name}" if prefix else name for name in each._non_persistent_buffers_set)
    held = {name: registry[key] for name, (registry, key) in places(module).items() if name not in transient}
    return held.keys() == state_dict.keys() and all(
        isinstance(value, torch.Tensor)
        and not is_lazy(value)
        and not is_lazy(held[name])
        and value.shape == held[name].shape
        and value.device == held[name].device
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


def _protect(module: nn.Module, guard: Guard) -> None:
    """Register what a module tree holds with a guard."""
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
    """Make a parameter uninitialised again, which loading has given a shape."""
    if not is_lazy(tensor):
        tensor.data = tensor.data.new_empty(0)
        tensor.__class__ = kind


# -- state dicts without labels ---------------------------------------------------------------------------------------

_POLICIES: Final = ("warn", "ignore", "require")
_unlabelled: ContextVar[list[str] | None] = ContextVar("unlabelled", default=None)


def check_policy(labels: str) -> None:
    """Raise ValueError if `labels=` is none of the words that it may be."""
    if labels not in _POLICIES:
        raise ValueError(f"labels={labels!r}; give {', '.join(map(repr, _POLICIES))}")


def note_unlabelled(names: list[str]) -> None:
    """Report tensors that are loaded by position: to the load that is under way, or else by a warning."""
    noted = _unlabelled.get()
    if noted is not None:
        noted += names
    else:
        report_unlabelled(names, "warn")


def report_unlabelled(names: list[str], labels: str) -> None:
    """Warn of tensors whose labels the state dict does not tell, or raise, or do nothing, as `labels` says.

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
    """Return a state dict with the labelled tensors of a module tree in the order that they have there.

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
