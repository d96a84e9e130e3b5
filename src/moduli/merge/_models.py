"""`View`: modules and state dicts as tensors by name, with their structure known without reading values."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from .._texts import shorten
from ..layout import AxesError, Reorder, align, layout_of, memory_of, public_name, show_pieces
from ..nn import align_saved, find_saved_axes, read_saved_axes


class MergeError(ValueError):
    """Models that cannot be merged, or a coefficient that does not fit them. No model was changed.

    Example:
        >>> import torch
        >>> from moduli import merge
        >>> merge.linear([torch.nn.Linear(3, 2), torch.nn.Linear(4, 2)])
        Traceback (most recent call last):
        ...
        moduli.merge._models.MergeError: 'weight' is torch.float32 of shape (2, 3) in models[0] and ...
    """


def check_choice(what: str, given: object, *choices: str) -> None:
    """Raise if an option is none of the choices.

    Args:
        what: The option, for the error.
        given: Its value.
        *choices: The valid values.

    Raises:
        MergeError: If it is none.
    """
    if given not in choices:
        raise MergeError(f"{what} is {shorten(given)}; it must be {' or '.join(map(repr, choices))}")


Model: TypeAlias = nn.Module | Mapping[str, Tensor]
"""A model that can be merged: a module, or a mapping from names to tensors, such as the result of `state_dict()`.

A mapping may read its tensors when they are indexed: names are merged one after the other, and no tensor is stored. If it
has a method `meta(name)` that returns a tensor on device "meta", structures are compared before anything is read.
"""

COUNTER = "num_batches_tracked"
STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True, slots=True)
class View:
    """One model.

    Attributes:
        model: The model itself.
        label: Its name in errors.
        tensors: Every tensor by every one of its names, in order.
        keys: The names, since `in` on a mapping of a file may read the tensor.
        buffers: The names that are known to be buffers.
        reorders: The reorderings of tensors whose labels are in another order than in the first model.
    """

    model: Model
    label: str
    tensors: Mapping[str, Any]
    keys: frozenset[str]
    buffers: frozenset[str]
    reorders: dict[str, Reorder] = field(default_factory=dict)

    @property
    def held(self) -> bool:
        """Whether all tensors are in memory."""
        return isinstance(self.model, nn.Module | dict)

    @property
    def known(self) -> bool:
        """Whether the shapes of tensors are available without reading them."""
        return self.held or hasattr(self.model, "meta")

    def look(self, name: str) -> Tensor:
        """Return a tensor with the shape and dtype of a name, possibly without values."""
        meta: Any = None if self.held else getattr(self.model, "meta", None)
        return self.read(name) if meta is None else cast(Tensor, meta(name))

    def read(self, name: str) -> Tensor:
        """Return the tensor of a name.

        Raises:
            MergeError: If it is no tensor, or has no dense data.
        """
        tensor = self.tensors[name]
        if not isinstance(tensor, Tensor):
            raise MergeError(f"{shorten(name)} of {self.label} is {type(tensor).__name__}, not a tensor; leave it out")
        if tensor.is_meta or tensor.layout is not torch.strided:
            what = "has no data (device 'meta')" if tensor.is_meta else f"has layout {tensor.layout}"
            raise MergeError(f"{shorten(name)} of {self.label} {what}; only dense tensors with data are merged")
        reorder = self.reorders.get(name)
        return tensor.detach() if reorder is None else reorder(tensor.detach())

    def names(self) -> Iterator[str]:
        """Iterate over the names of tensors: all except the extra state of modules."""
        return (name for name in self.tensors if not is_extra(name))


def is_extra(name: str) -> bool:
    """Whether a key of a state dict is that of a module's extra state, which may be any object."""
    return name.rpartition(".")[2] == "_extra_state"


def view(model: Model, label: str) -> View:
    """Return the view of a model.

    Raises:
        TypeError: If it is neither a module nor a mapping.
        LayoutError: If a parameter is lazy, or a module contains itself.
    """
    if isinstance(model, nn.Module):
        layout_of(model)  # raises for a module without a layout
        show_pieces(model.modules())
        buffers = dict(model.named_buffers(remove_duplicate=False))
        tensors = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
        return View(model, label, tensors, frozenset(tensors), frozenset(buffers))
    if not isinstance(model, Mapping):
        raise TypeError(f"{label} is {type(model).__name__}; a model is a torch.nn.Module or a state dict")
    # A state dict does not distinguish buffers. Statistics of batch normalisation are recognised by the counter next to them.
    keys = frozenset(model)
    prefixes = [name[: -len(COUNTER)] for name in keys if name.rpartition(".")[2] == COUNTER]
    names = frozenset(prefix + statistic for prefix in prefixes for statistic in STATISTICS)
    return View(model, label, model, keys, names & keys)


def describe_tensor(tensor: Tensor) -> str:
    """Return the dtype and shape of a tensor as text, for an error."""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def check(first: View, other: View, needed: Sequence[str]) -> None:
    """Raise if the structures of two models differ, at the first name where they do.

    Args:
        first: The model that decides the structure.
        other: Another one.
        needed: The names that will be read.

    Raises:
        MergeError: If they differ.
    """
    _align(first, other)
    # A module may have buffers that the other lacks, such as growing caches; every parameter must be in both.
    more = (name for name in other.names() if name not in first.keys and name not in other.buffers)
    for name in chain(needed, more):
        here, there = (first, other) if name in first.keys else (other, first)
        if name not in there.keys:
            shape = f" ({describe_tensor(here.look(name))} in {here.label})" if here.known else ""
            raise MergeError(f"{shorten(name)}{shape} is missing in {there.label}; merge models of one structure")
        if first.known and other.known:
            compare(name, first, first.look(name), other, other.look(name))
    if isinstance(first.model, nn.Module) and isinstance(other.model, nn.Module):
        for name in sorted((first.buffers ^ other.buffers) & first.keys & other.keys):
            kinds = ("buffer", "parameter") if name in first.buffers else ("parameter", "buffer")
            difference = f"a {kinds[0]} of {first.label} and a {kinds[1]} of {other.label}"
            raise MergeError(f"{shorten(name)} is {difference}; merge models of one structure")
        theirs = layout_of(other.model)
        for entry in layout_of(first.model):
            apart = sorted(set(theirs[entry.name].names) ^ set(entry.names))
            if apart:
                difference = f"are tied in one of {first.label} and {other.label} only; tie them in both, or in neither"
                raise MergeError(f"{shorten(apart[0])} and {shorten(entry.name)} {difference}")


def find_reorders(model: Model, other: Model, labels: tuple[str, str]) -> dict[str, Reorder]:
    """Return the reorderings that give the labelled tensors of a model the order of labels of another one, by name.

    Args:
        model: The model that decides the order.
        other: The model whose tensors are reordered.
        labels: Their names in errors.

    Raises:
        MergeError: If they have other labels.
    """
    first, second = (view(each, label) for each, label in zip((model, other), labels, strict=True))
    _align(first, second)
    return second.reorders


def _align(first: View, other: View) -> None:
    """Set the reorderings that give a model's labelled tensors the order of labels of the first model.

    Raises:
        MergeError: If they have other labels.
    """
    if isinstance(first.model, nn.Module) and isinstance(other.model, nn.Module):
        layout = layout_of(other.model)
        try:
            alignment = align(layout_of(first.model), layout)
        except AxesError as error:
            raise MergeError(f"{first.label} (left) and {other.label} (right): {error}") from error
        if alignment is not None:
            entries: list[Any] = [*layout.entries, *layout.buffers]
            for entry, reorder in zip(entries, (*alignment.parameters, *alignment.buffers), strict=True):
                if reorder is not None:
                    other.reorders.update(dict.fromkeys((entry.name, *entry.ties), reorder))
        return
    ours, theirs = _read_axes(first.model), _read_axes(other.model)
    unlabelled: list[tuple[str, View]] = []
    for name in other.names() if ours or theirs else ():
        here, there = find_saved_axes(name, ours), find_saved_axes(name, theirs)
        if here is None or there is None:
            unlabelled += _find_unlabelled(name, (here, first), (there, other))
            continue
        if here == there:
            continue
        try:
            reorder = align_saved(name, here, there, other.look(name).shape)
        except AxesError as error:
            sides = f"{here} in {first.label} (the module) and {there} in {other.label} (the checkpoint)"
            raise MergeError(f"the labels of {shorten(public_name(name))} are {sides}: {error}") from error
        if reorder is not None:
            other.reorders[name] = reorder
    _warn_of_positions(unlabelled)


def _find_unlabelled(name: str, *sides: tuple[Any, View]) -> list[tuple[str, View]]:
    """Return the name of a tensor with the model that has no axes for it, if those of the other one have labels."""
    labels = [axis.get("labels") or axis.get("range") for axes, _ in sides for axis in axes or ()]
    return [(name, view) for axes, view in sides if axes is None and any(labels)]


def _warn_of_positions(unlabelled: Sequence[tuple[str, View]]) -> None:
    """Warn of tensors that are merged by position, because one of two models has no labels for them."""
    if not unlabelled:
        return
    name, view = unlabelled[0]
    more = f" and {len(unlabelled) - 1} more" if len(unlabelled) > 1 else ""
    fact = f"{view.label} has no labels for {shorten(public_name(name))}{more}, which is merged by position"
    hint = "copies of a state dict (dict(sd), safetensors' load_file) lose them"
    warnings.warn(f"{fact}: {hint}. Give what state_dict() returned or mo.save wrote", UserWarning, stacklevel=3)


def _read_axes(model: Model) -> dict[str, Any]:
    """Return the axes of labelled tensors in the form of a state dict, by dotted public name."""
    if isinstance(model, nn.Module):
        model = model.state_dict() if layout_of(model).labelled else {}
    return read_saved_axes(model)


def compare(name: str, first: View, left: Tensor, other: View, right: Tensor) -> None:
    """Raise if two tensors have different shapes, or are not both real, both complex, or of one integer dtype.

    Args:
        name: Their name, for the error.
        first: The model of the first tensor.
        left: The first tensor.
        other: The model of the second tensor.
        right: The second tensor.

    Raises:
        MergeError: If they differ.
    """
    if left.shape != right.shape or _kind(left) != _kind(right):
        difference = f"{describe_tensor(left)} in {first.label} and {describe_tensor(right)} in {other.label}"
        raise MergeError(f"{shorten(name)} is {difference}; merge models of one structure")


def has_averages(tensor: Tensor) -> bool:
    """Whether a tensor is of floating or complex dtype."""
    return isinstance(_kind(tensor), str)


def _kind(tensor: Tensor) -> object:
    return "real" if tensor.is_floating_point() else "complex" if tensor.is_complex() else tensor.dtype


def ties(views: Sequence[View]) -> list[tuple[str, ...]]:
    """Return the names of the first model in order, grouped if they are tied in every model.

    Names are tied if they are the same view of the same memory. In a mapping that reads its tensors when they are indexed,
    ties are unknown.
    """
    first = views[0]
    if not all(each.held for each in views):
        return [(name,) for name in first.names()]
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in first.names():
        key = tuple(_identity(each.tensors.get(name), name) for each in views)
        groups.setdefault(key, []).append(name)
    return [tuple(names) for names in groups.values()]


def _identity(tensor: object, name: str) -> object:
    if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return name  # no memory to compare
    return memory_of(tensor)
