"""Labels in checkpoints: axes as plain data, and the alignment of what is loaded.

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
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

import torch

from moduli.labels import Axes, Tensor

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


def same_labels(labelled: Mapping[str, tuple[str, Axes]], saved: Mapping[str, Any], prefix: str) -> bool:
    """Whether the labels saved for a module, where there are any, are those it has, in the same order."""
    return all(saved[name] == encode(axes, f"{prefix}.{name}") for name, (_, axes) in labelled.items() if name in saved)


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
    extra = set(labels) - set(others)
    shown = [_text(label) for label in labels if label in extra]
    more = len(shown) - _MOST_SHOWN
    return "[" + ", ".join(shown[:_MOST_SHOWN]) + (f", and {more} more" if more > 0 else "") + "]"


def _text(label: Any) -> str:
    if not isinstance(label, tuple):
        return repr(label)
    kind, *rest = label
    if kind == "tuple":
        return "(" + ", ".join(map(_text, rest[0])) + ")"
    if kind == "frozenset":
        return "{" + ", ".join(map(_text, rest[0])) + "}"
    return f"{rest[0].rpartition('.')[2]}.{rest[1]}" if kind == "enum" else str(rest[0])
