"""State dicts of modules: labels as plain data, and the alignment of loaded tensors.

Only numbers, strings, None, lists and dicts are used, so that a state dict still loads with `weights_only=True`. One
axis is a dict with its `name` and, if it is labelled, its `labels`:

* strings, numbers, truth values and None are stored unmodified; integers at equal steps are stored
  as a `range` of start, stop and step;
* `["tuple", [...]]` and `["frozenset", [...]]` hold encoded labels;
* `["enum", class, member]` is a member of an enumeration;
* `["date", text]` is a date, and `["duration", count, unit]` a duration;
* `[class, text]` is any other label with an unambiguous `repr`, such as a frozen dataclass.

Labels are never decoded: those of the module being loaded are encoded the same way and compared.
"""

import datetime
import enum
import re
from collections.abc import Hashable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from moduli.labels import Axes, Space, Tensor
from moduli.layout import Axis, Reorder, align_tensor, find_labelled_name, list_bases, public_name, read_axes

T = TypeVar("T")


def encode(axes: Axes, where: str) -> list[dict[str, Any]]:
    """Return the axes of a labelled tensor as plain data; see `encode_axes`."""
    return encode_axes(read_axes(axes), where)


def encode_axes(axes: Sequence[Axis], where: str) -> list[dict[str, Any]]:
    """Return the axes of a tensor as plain data, as `align_saved` compares them.

    Args:
        axes: The axes.
        where: The name of the tensor in errors.

    Raises:
        TypeError: If a label has no `repr` that identifies it in another process.

    Example:
        >>> from moduli.layout import Axis
        >>> from moduli.nn import encode_axes
        >>> encode_axes([Axis("c", ("r", "g")), Axis(None, None)], "w")
        [{'name': 'c', 'labels': ['r', 'g']}, {'name': None}]
    """
    encoded = []
    for name, labels in axes:
        axis: dict[str, Any] = {"name": name}
        if isinstance(labels, range):
            axis["range"] = [labels.start, labels.stop, labels.step]
        elif labels is not None:
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
    if isinstance(label, np.datetime64):
        return ["date", str(label)]
    if isinstance(label, np.timedelta64):
        return ["duration", int(label.astype(np.int64)), np.datetime_data(label.dtype)[0]]
    if type(label).__repr__ is object.__repr__:
        raise TypeError(
            f"the label {label!r} of {where} cannot be saved: nothing in its text tells it from other objects of "
            f"{_class_name(label)}. Give that class a __repr__, or use strings, numbers or tuples as labels"
        )
    return [_class_name(label), repr(label)]


def _class_name(label: object) -> str:
    return f"{type(label).__module__}.{type(label).__qualname__}"


def align_state(
    labelled: Mapping[str, tuple[str, Axes]],
    state_dict: MutableMapping[str, Any],
    prefix: str,
    saved: Mapping[str, Any],
    lead: int = 0,
) -> tuple[list[str], list[str]]:
    """Give the owned tensors of a state dict their registered names and the module's order of labels.

    Args:
        labelled: The registered name and axes of each tensor that the module owns, by public name.
        state_dict: The state dict; changed in place, the tensors in it are not.
        prefix: The path of the module in the state dict.
        saved: The labels that were saved with it, by public name.
        lead: The number of axes before those of a module, such as the members of a population.

    Returns:
        The mismatches, as sentences; and the names of tensors for which the state dict has no labels.
    """
    errors, unlabelled = [], []
    for name, (key, _) in labelled.items():
        if prefix + key not in state_dict and prefix + name in state_dict:
            state_dict[prefix + key] = state_dict.pop(prefix + name)
    owned = {prefix + key: (name, axes) for name, (key, axes) in labelled.items()}
    for full in list(state_dict) if owned else ():
        base = find_labelled_name(full, owned)
        if base is None:
            continue
        name, axes = owned[base]
        value, axes_saved = state_dict[full], saved.get(name)
        if isinstance(value, Tensor):
            axes_saved = encode(value._axes, prefix + name)
            state_dict[full] = value = value.data
        if not isinstance(value, torch.Tensor):
            continue
        if axes_saved is None:
            if _has_order(axes) and prefix + name not in unlabelled:
                unlabelled.append(prefix + name)
            continue
        try:
            reorder = align_saved(full, encode(axes, prefix + name), axes_saved, value.shape[lead:])
        except ValueError as error:
            errors.append(f"labels of {prefix}{name}: {error}")
            continue
        if reorder is not None:
            state_dict[full] = reorder(value, lead)
    return errors, unlabelled


def align_saved(
    name: str, here: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], shape: Sequence[int]
) -> Reorder | None:
    """Return the reordering that gives a saved tensor a module's order of labels; None if it has that order.

    Args:
        name: The tensor, for errors.
        here: Its axes in the module, as `state_dict()._metadata` has them.
        saved: Its axes in the checkpoint.
        shape: The shape of the saved tensor.

    Raises:
        AxesError: If the axes or labels are not the same ones.

    Example:
        >>> from moduli.nn import align_saved
        >>> axes = [{"name": "c", "labels": ["r", "g"]}], [{"name": "c", "labels": ["g", "r"]}]
        >>> align_saved("w", *axes, (2,)).index
        ((1, 0),)
    """
    if here == saved:
        return None
    return align_tensor(name, decode_axes(here), decode_axes(saved), shape, ("the module", "the checkpoint"))


def read_saved_axes(state_dict: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the axes of labelled tensors from the metadata of a state dict, by dotted public name.

    Example:
        >>> import moduli as mo
        >>> net = mo.Module()
        >>> net.w = mo.tensor([1.0, 2.0], c=["r", "g"])
        >>> mo.nn.read_saved_axes(net.state_dict())
        {'w': [{'name': 'c', 'labels': ['r', 'g']}]}
    """
    return {
        f"{path}.{name}" if path else name: axes
        for path, entry in getattr(state_dict, "_metadata", {}).items()
        for name, axes in entry.get("labels", {}).items()
    }


def find_saved_axes(name: str, axes: Mapping[str, T]) -> T | None:
    """Return the axes of a labelled tensor in a state dict, or of the one computed from it; None if there are none.

    Args:
        name: The dotted name in the state dict.
        axes: Axes by dotted public name.

    Example:
        >>> from moduli.nn import find_saved_axes
        >>> [find_saved_axes(name, {"a.w": "axes"}) for name in ("a.w", "a.tensor:w", "a.tensor:w_orig", "a.w_orig")]
        ['axes', 'axes', 'axes', None]
    """
    for base in list_bases(name):
        public = public_name(base)
        # Only a registered name can be computed from others; a plain parameter may have any name.
        if public in axes and (base == name or public != base):
            return axes[public]
    return None


def decode_axes(encoded: Sequence[Mapping[str, Any]]) -> tuple[Axis, ...]:
    """Return encoded axes as the gate compares them; their labels stay encoded.

    Example:
        >>> from moduli.nn import decode_axes
        >>> decode_axes([{"name": "c", "labels": ["r", "g"]}])
        (Axis(name='c', labels=('r', 'g')),)
    """
    return tuple(
        Axis(
            axis["name"],
            range(*axis["range"])
            if "range" in axis
            else tuple(map(_hashable, axis["labels"]))
            if "labels" in axis
            else None,
        )
        for axis in encoded
    )


def _hashable(label: Any) -> Any:
    if not isinstance(label, (list, tuple)):
        return label
    if len(label) == 2 and label[0] in ("datetime.date", "datetime.datetime") and isinstance(label[1], str):
        label = _read_old_date(label)
    return tuple(map(_hashable, label))


def _read_old_date(label: Sequence[str]) -> Sequence[Any]:
    """Return the present encoding of a date that moduli 0.2 saved as its `repr`; others, such as with zones, unmodified."""
    match = re.fullmatch(r"datetime\.(date|datetime)\(([\d, ]+)\)", label[1])
    if match is None:
        return label
    date = getattr(datetime, match[1])(*map(int, match[2].split(",")))
    encoded: Sequence[Any] = _encode_label(Space([date])[0], "a file")
    return encoded


def _has_order(axes: Axes) -> bool:
    """Whether a tensor could be saved in another order: some axis has labels, or several axes have names."""
    labelled = any(space is not None and space.labelled and len(space) > 1 for space in axes.spaces)
    return labelled or sum(name is not None for name in axes.names) > 1


def labels_of(module: nn.Module) -> dict[str, Axes]:
    """Return the Spaces of the axes of the labelled tensors that a module owns itself, by name.

    Args:
        module: Any module; one that is not a `moduli.nn.Module` owns none.

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
