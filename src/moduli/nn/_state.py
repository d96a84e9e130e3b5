"""State dicts of modules: labels as plain data, the alignment of what is loaded, and loading all or nothing.

Only numbers, strings, None, lists and dicts are used, so that a state dict still loads with `weights_only=True`. One
axis is a dict with its `name` and, if it is labelled, its `labels`:

* a string, a number, a truth value and None stand for themselves; integers at equal steps are not listed, but given
  as a `range` of start, stop and step;
* `["tuple", [...]]` and `["frozenset", [...]]` hold encoded labels;
* `["enum", class, member]` is a member of an enumeration;
* `[class, text]` is any other label whose text tells it apart, such as a date or a frozen dataclass.

Labels are never rebuilt from this: those of the module being loaded are encoded the same way and compared.
"""

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from moduli.labels import Axes, Tensor
from moduli.layout import Guard

_MOST_SHOWN: Final = 6


def encode(axes: Axes, where: str) -> list[dict[str, Any]]:
    """The axes of a tensor as plain data.

    Args:
        axes: The axes.
        where: What to call the tensor in an error.

    Raises:
        TypeError: If a label has no text that would tell it apart in another process.
    """
    encoded = []
    for name, space in zip(axes.names, axes.spaces, strict=True):
        axis: dict[str, Any] = {"name": name}
        if space is not None and space.labelled:
            labels = space.labels
            if isinstance(labels, range):
                axis["range"] = [labels.start, labels.stop, labels.step]
            else:
                axis["labels"] = [_encode_label(label, where) for label in labels]
        encoded.append(axis)
    return encoded


def _encode_label(label: Hashable, where: str) -> Any:
    if isinstance(label, enum.Enum):
        return ["enum", _class_name(label), label.name]
    if label is None or type(label) in (str, int, float, bool):
        return label
    if type(label) is tuple:
        return ["tuple", [_encode_label(part, where) for part in label]]
    if type(label) is frozenset:
        # Sets have no order of their own, and their text differs from process to process.
        return ["frozenset", sorted((_encode_label(part, where) for part in label), key=repr)]
    if type(label).__repr__ is object.__repr__:
        raise TypeError(
            f"the label {label!r} of {where} cannot be saved: nothing in its text tells it from other objects of "
            f"{_class_name(label)}. Give that class a __repr__, or use strings, numbers or tuples as labels"
        )
    return [_class_name(label), repr(label)]


def _class_name(label: object) -> str:
    return f"{type(label).__module__}.{type(label).__qualname__}"


def align_state(
    labelled: Mapping[str, tuple[str, Axes]], state_dict: dict[str, Any], prefix: str, saved: Mapping[str, Any]
) -> list[str]:
    """Give the owned tensors of a state dict their registered names and the order of labels that the module has.

    Args:
        labelled: What the module owns: registered name and axes by public name.
        state_dict: The state dict; changed in place, the tensors in it are not.
        prefix: The path of the module in the state dict.
        saved: The labels that were saved with it, by public name.

    Returns:
        What does not fit, as sentences.
    """
    errors = []
    for name, (key, axes) in labelled.items():
        full = prefix + key
        if full not in state_dict:
            if prefix + name not in state_dict:
                continue
            state_dict[full] = state_dict.pop(prefix + name)
        value = state_dict[full]
        if isinstance(value, Tensor):
            given: Any = encode(value._axes, prefix + name)
            value = value.data
        else:
            given = saved.get(name)
        if given is not None and isinstance(value, torch.Tensor):
            try:
                value = align_labels(value, given, encode(axes, prefix + name))
            except ValueError as error:
                errors.append(f"labels of {prefix}{name}: {error}")
                continue
        state_dict[full] = value
    return errors


def align_labels(
    data: torch.Tensor, saved: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]]
) -> torch.Tensor:
    """Data with its axes and labels in the order of another encoding.

    Raises:
        ValueError: If the axes or labels are not the same ones.
    """
    if data.ndim != len(saved) or len(saved) != len(here):
        # Not a matter of labels; torch compares the shapes.
        return data
    names, wanted = [axis["name"] for axis in saved], [axis["name"] for axis in here]
    if None not in names and None not in wanted and names != wanted and sorted(names) == sorted(wanted):
        order = [names.index(name) for name in wanted]
        data, saved = data.permute(order), [saved[at] for at in order]
    for at, (old, new) in enumerate(zip(saved, here, strict=True)):
        axis = f"axis {at}" if new["name"] is None else f"axis {new['name']!r}"
        if old["name"] is not None and new["name"] is not None and old["name"] != new["name"]:
            raise ValueError(f"{axis} of the module is axis {old['name']!r} in the checkpoint; rename one of them")
        before, after = _labels(old), _labels(new)
        if before is None or after is None or before == after:
            continue
        positions = {label: position for position, label in enumerate(before)}
        if positions.keys() != set(after):
            raise ValueError(
                f"{axis} differs: only the checkpoint has {_show(before, after)}, "
                f"only the module has {_show(after, before)}"
            )
        index = torch.tensor([positions[label] for label in after], device=data.device)
        data = data.index_select(at, index)
    return data


def _labels(axis: Mapping[str, Any]) -> Sequence[Hashable] | None:
    if "range" in axis:
        return range(*axis["range"])
    return [_hashable(label) for label in axis["labels"]] if "labels" in axis else None


def _hashable(label: Any) -> Hashable:
    return tuple(map(_hashable, label)) if isinstance(label, (list, tuple)) else label


def _show(labels: Sequence[Hashable], others: Sequence[Hashable]) -> str:
    """The labels, as they are encoded, that only one side has."""
    known = set(others)
    extra = [label for label in labels if label not in known]
    return f"{extra}" if len(extra) <= _MOST_SHOWN else f"{extra[:_MOST_SHOWN]} and {len(extra) - _MOST_SHOWN} more"


def labels_of(module: nn.Module) -> dict[str, Axes]:
    """The Spaces of the axes of the labelled tensors that a module owns itself, by name.

    Args:
        module: Any module; one that is not of ours owns none.

    Example:
        >>> from moduli.labels import Space, Tensor
        >>> from moduli.nn import Module, labels_of
        >>> class Gain(Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gain = Tensor(torch.tensor([1.0, 2.0]), (Space(["r", "g"], name="c"),))
        >>> list(labels_of(Gain())), labels_of(torch.nn.Linear(1, 1))
        (['gain'], {})
    """
    return {name: axes for name, (_, axes) in vars(module).get("_labelled", {}).items()}


# -- loading all or nothing, and tensors that several names share -----------------------------------------------------

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
    with Guard(deferred=True) as guard:
        if not _is_certain(module, state_dict):
            _protect(module, guard)
        result = load()
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
        saved = metadata.get(prefix, {}).get("labels", {})
        for name, (_, axes) in each.__dict__.get("_labelled", {}).items():
            if name in saved and saved[name] != encode(axes, f"{prefix}.{name}"):
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


def _protect(module: nn.Module, guard: Guard) -> None:
    """Register what a module tree holds with a guard."""
    for each in module.modules():
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            guard.add(partial(each.set_extra_state, each.get_extra_state()))
    registries = [registry for each in module.modules() for registry in (each._parameters, each._buffers)]
    guard.tensors(tensor for registry in registries for tensor in registry.values() if tensor is not None)
    guard.mappings(*registries)
