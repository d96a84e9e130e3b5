"""Axes and labels: the axes of labelled modules by name, and labelled views of plain modules by the names of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..labels import Tensor, tensor
from ..layout import Axes, Layout, unwrapped_name
from ._atoms import NAMED_UNITS, Atoms, Dim
from ._factors import Factors, Segments, list_names
from ._model_axes import ModelAxes
from ._tracer import Traced


def label(net: nn.Module, axes: ModelAxes) -> LabelledParameters:
    """Return labelled views of a module's parameters and buffers, by the names of a model's axes.

    An axis that is a product has one axis for each factor in the view; a concatenation is one axis, named by its parts with "+"
    between them. The second of two equal axes of one parameter has a prime. Views share memory and gradients with the parameters.

    Args:
        net: The module.
        axes: Its axes.

    Returns:
        A mapping from names of parameters to labelled tensors, each made when it is read.

    Example:
        >>> import torch, moduli as mo
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        >>> view = mo.axes.label(net, mo.axes.trace(net, torch.zeros(1, 4)))
        >>> view["0.weight"].names, view["0.weight"].sum("0.out").names
        (('0.out', '0.in'), ('0.in',))
        >>> mo.dot(view["2.weight"], view["0.weight"]).names  # summed over the units that both have
        ('2.out', '0.in')
    """
    view = LabelledParameters(net, axes)
    for name, stored in view.stored():
        shape = axes.of(name).shape
        if tuple(stored.shape) != shape:
            raise ValueError(f"axes.label: {name!r} has shape {tuple(stored.shape)}, and the axes are of shape {shape}")
    return view


class LabelledParameters(Mapping[str, Tensor]):
    """The parameters and buffers of a module as labelled tensors; see `label`."""

    def __init__(self, net: nn.Module, axes: ModelAxes) -> None:
        self._net, self._axes = net, axes

    def stored(self) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors of the module by name."""
        return [*self._net.named_parameters(), *self._net.named_buffers()]

    def __getitem__(self, name: str) -> Tensor:
        axes = self._axes.of(name)
        stored = dict(self.stored())
        data = stored[name] if name in stored else stored[axes.name]
        names: list[str] = []
        position = 0
        for factors in axes:
            words, sizes = _name_factors(factors, axes.sizes)
            data = data.unflatten(position, sizes) if len(sizes) != 1 else data  # type: ignore[no-untyped-call]
            position += len(sizes)
            for word in words:
                while word in names:
                    word += "'"
                names.append(word)
        return tensor(data, names)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.stored())

    def __len__(self) -> int:
        return len(self.stored())


def _name_factors(factors: Factors, sizes: Mapping[str, int]) -> tuple[list[str], list[int]]:
    """Return the names and sizes of the axes that a view has for one axis of a parameter."""
    words, lengths = [], []
    for factor in factors:
        if isinstance(factor, Segments):
            words.append("+".join("*".join(list_names(part)) for part in factor.parts))
            lengths.append(-1)
        else:
            words.append(factor)
            lengths.append(sizes[factor])
    return (words, lengths) if words else (["1"], [1])


def apply_labels(atoms: Atoms, parameters: Mapping[str, Traced], layout: Layout) -> list[tuple[Dim, str]]:
    """Unify the axes of labelled parameters that have one name: those with equal labels, and those of one module.

    Args:
        atoms: The atoms of the trace, which are changed.
        parameters: The axes of parameters and buffers by name.
        layout: The layout of the model, which has the labels.

    Returns:
        The axes that have names, each with its name.
    """
    seen: dict[Any, Dim] = {}
    named: list[tuple[Dim, str]] = []
    for name, labels in list_labelled(layout):
        traced = parameters[unwrapped_name(name)]
        for axis, size, dim in zip(labels, traced.shape, traced.dims, strict=True):
            if axis.name is None:
                continue
            module = name.rpartition(".")[0]
            key = (axis.name, module, size) if axis.labels is None else (axis.name, tuple(axis.labels))
            atoms.unify(seen.setdefault(key, dim), dim)
            named.append((dim, axis.name))
            if axis.labels is not None:
                atoms.fix(dim, NAMED_UNITS)
    return named


def list_labelled(layout: Layout) -> list[tuple[str, Axes]]:
    """Return the labelled parameters and buffers of a layout, with their axes."""
    parameters = [(entry.name, entry.axes) for entry in layout.entries if entry.axes is not None]
    buffers = [(entry.name, entry.axes) for entry in layout.buffers if entry.axes is not None]
    ranks = {entry.name: len(entry.shape) for entry in (*layout.entries, *layout.buffers)}  # type: ignore[attr-defined]
    # A tensor from which a labelled one is computed may have other axes.
    return [(name, axes) for name, axes in (*parameters, *buffers) if len(axes) == ranks[name]]
