"""Laying out named tensors: one entry for each distinct one, with its place, ties and axes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ._axes import find_labelled_name
from ._layout import Axes, Axis, BufferEntry, Entry, Layout


def lay_out(
    parameters: list[tuple[str, Tensor]], buffers: list[tuple[str, Tensor, bool]], labelled: Mapping[str, Any]
) -> tuple[Layout, list[int], list[int]]:
    """Lay out named tensors.

    Args:
        parameters: Names and parameters.
        buffers: Names and buffers, and whether each is persistent.
        labelled: Objects with the `names` and `spaces` of axes, by the dotted name of the tensor.

    Returns:
        The layout, and the positions in `parameters` and in `buffers` of the tensors that its entries describe.
    """
    names, chosen = _group_names([name for name, _ in parameters], [tensor for _, tensor in parameters])
    entries: list[Entry] = []
    groups: dict[tuple[torch.dtype, torch.device], int] = {}
    filled: list[int] = []
    start = 0
    for position in chosen:
        name, tensor = parameters[position]
        shape, dtype, device, numel = tuple(tensor.shape), tensor.dtype, tensor.device, tensor.numel()
        group = groups.setdefault((dtype, device), len(groups))
        if group == len(filled):
            filled.append(0)
        ties = tuple(names[id(tensor)][1:])
        axes = _find_axes(name, labelled) if labelled else None
        entries.append(Entry(name, shape, dtype, device, numel, group, filled[group], start, ties, axes))
        filled[group] += numel
        start += numel
    names, chosen_buffers = _group_names([name for name, _, _ in buffers], [tensor for _, tensor, _ in buffers])
    buffer_entries = tuple(
        BufferEntry(
            name,
            tuple(t.shape),
            t.dtype,
            t.device,
            t.numel(),
            persistent,
            tuple(names[id(t)][1:]),
            _find_axes(name, labelled) if labelled else None,
        )
        for name, t, persistent in (buffers[position] for position in chosen_buffers)
    )
    return Layout(tuple(entries), buffer_entries), chosen, chosen_buffers


def _group_names(names: list[str], tensors: list[Tensor]) -> tuple[dict[int, list[str]], list[int]]:
    """Return the names of each distinct tensor by its id, and the positions of the first names."""
    grouped: dict[int, list[str]] = {}
    firsts: list[int] = []
    for position, tensor in enumerate(tensors):
        group = grouped.get(id(tensor))
        if group is None:
            grouped[id(tensor)] = [names[position]]
            firsts.append(position)
        else:
            group.append(names[position])
    return grouped, firsts


def read_axes(axes: Any) -> Axes:
    """Return the names and labels of axes that have `names` and `spaces`, as those of a labelled tensor do.

    Example:
        >>> import moduli as mo
        >>> from moduli.layout import read_axes
        >>> read_axes(mo.tensor([1.0, 2.0], c=["r", "g"])._axes)
        (Axis(name='c', labels=('r', 'g')),)
    """
    return tuple(
        Axis(name, None if space is None or not space.labelled else space.labels)
        for name, space in zip(axes.names, axes.spaces, strict=True)
    )


def _find_axes(name: str, labelled: Mapping[str, Any]) -> Axes | None:
    base = find_labelled_name(name, labelled)
    return None if base is None else read_axes(labelled[base])
