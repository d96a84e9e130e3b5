"""Matching the units of a saved model with those of another one whose numbers or labels of units differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layout import Axes, UnitMap, unwrapped_name
from ._factors import Factors, Segments, list_names, locate_units, measure
from ._model_axes import ModelAxes, ParameterAxes


def match_units(
    axes: ModelAxes,
    shapes: Mapping[str, Sequence[int]],
    labels: Mapping[str, tuple[Axes, Axes]] | None = None,
) -> dict[str, UnitMap]:
    """Return maps that give saved tensors the units of a model: by label if both have labels, otherwise by position.

    Units that only the model has are new; units that only the saved one has are dropped.

    Args:
        axes: The axes of the model.
        shapes: The shapes of the saved tensors by name; names that the model does not have are ignored.
        labels: The axes of labelled tensors, in the model and saved, by name.

    Returns:
        The maps, by name, of the tensors that have axes with other units.

    Raises:
        ValueError: If the shapes are not those of one model with other numbers of units.

    Example:
        >>> import torch, moduli as mo
        >>> ax = mo.axes.trace(torch.nn.Linear(2, 3), torch.zeros(1, 2))
        >>> maps = mo.axes.match_units(ax, {"weight": (2, 2), "bias": (2,)})
        >>> maps["bias"].resize_state(torch.tensor([5.0, 6.0]))
        tensor([5., 6., 0.])
    """
    saved = {name: shape for name, shape in shapes.items() if axes.has_parameter(name)}
    before = _find_sizes(axes, saved)
    words = _find_labels(axes, labels or {})
    sources: dict[str, Tensor] = {}
    changed: set[str] = set()
    for name, axis in axes.axes.items():
        if name in words:
            ours, theirs = words[name]
            if ours != theirs:
                places = {label: position for position, label in enumerate(theirs)}
                sources[name] = torch.tensor([places.get(label, -1) for label in ours], dtype=torch.int64)
            if set(ours) != set(theirs):
                changed.add(name)
        elif name in before and before[name] != axis.size:
            positions = torch.arange(axis.size)
            sources[name] = torch.where(positions < before[name], positions, -1)
            changed.add(name)
    smaller = axes.resize({name: size for name, size in before.items() if name in axes})
    maps = {}
    for name, shape in saved.items():
        own = smaller.of(name)
        if changed & set(own.sizes):
            maps[name] = _map_tensor(own, axes.of(name), shape, sources)
    return maps


def _find_sizes(axes: ModelAxes, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the number of units of each axis in a model with these shapes."""
    for name, shape in shapes.items():
        if len(shape) != len(axes.of(name)):
            raise ValueError(
                f"{unwrapped_name(name)!r} has the shape {tuple(shape)}, and here the shape {axes.of(name).shape}: they have "
                "different numbers of axes"
            )
    pairs = [
        (name, factors, size)
        for name, shape in shapes.items()
        for factors, size in zip(axes.of(name).dims, shape, strict=True)
    ]
    here = {name: axis.size for name, axis in axes.axes.items()}
    # Axes that can't grow, such as positions of a kernel and chunks, have the same size in both.
    sizes = {name: axis.size for name, axis in axes.axes.items() if axis.growth is None}
    for assumed in (None, here):  # first the sizes that follow, then those that change the fewest axes
        progress = True
        while progress:
            progress = False
            for _, factors, size in pairs:
                solved = _solve(factors, size, sizes, assumed)
                if solved is not None:
                    sizes[solved[0]] = solved[1]
                    progress = True
    whole = {**here, **sizes}
    for name, factors, size in pairs:
        if measure(factors, whole) != size:
            open_names = [each for each in dict.fromkeys(list_names(factors)) if each not in sizes]
            fact = "no numbers of units of the model's axes give these shapes"
            if len(open_names) > 1:
                fact = (
                    f"several numbers of units of {' and '.join(map(repr, open_names))} give these shapes; load into a model that "
                    "has the saved number of one of them"
                )
            raise ValueError(
                f"{unwrapped_name(name)!r} has {size} entries along an axis that is {axes.of(name)} here: {fact}"
            )
    return sizes


def _solve(
    factors: Factors, size: int, sizes: Mapping[str, int], assumed: Mapping[str, int] | None
) -> tuple[str, int] | None:
    """Return an axis of a product whose size is unknown, and the size that it must have; None if it is not determined.

    Args:
        factors: The product.
        size: Its size.
        sizes: The known sizes.
        assumed: The sizes to assume for the others if several are unknown.
    """
    unknown = list(dict.fromkeys(name for name in list_names(factors) if name not in sizes))
    if not unknown or any(isinstance(factor, Segments) for factor in factors):
        return None
    if assumed is None:
        solutions = _list_solutions(factors, size, sizes, unknown if len(unknown) == 1 else [])
    else:
        if measure(factors, {**assumed, **sizes}) == size:
            return None
        solutions = _list_solutions(factors, size, {**assumed, **sizes}, unknown)
    return solutions[0] if len(solutions) == 1 else None


def _list_solutions(
    factors: Factors, size: int, sizes: Mapping[str, int], names: Sequence[str]
) -> list[tuple[str, int]]:
    """Return the axes among `names`, with the size that gives the product its size."""
    solutions = []
    for name in names:
        rest = measure(tuple(factor for factor in factors if factor != name), sizes)
        if list(factors).count(name) == 1 and rest and size % rest == 0:
            solutions.append((name, size // rest))
    return solutions


def _find_labels(
    axes: ModelAxes, labels: Mapping[str, tuple[Axes, Axes]]
) -> dict[str, tuple[Sequence[Any], Sequence[Any]]]:
    """Return the labels in the model and the saved labels of each axis that has both."""
    words: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {}
    for name, (here, saved) in labels.items():
        if not axes.has_parameter(name) or [axis.name for axis in here] != [axis.name for axis in saved]:
            continue
        for factors, ours, theirs in zip(axes.of(name).dims, here, saved, strict=False):
            if (
                len(factors) == 1
                and isinstance(factors[0], str)
                and ours.labels is not None
                and theirs.labels is not None
            ):
                words[factors[0]] = tuple(ours.labels), tuple(theirs.labels)
    return words


def _map_tensor(
    before: ParameterAxes, after: ParameterAxes, shape: Sequence[int], sources: Mapping[str, Tensor]
) -> UnitMap:
    units = {name: source.clamp(min=0) for name, source in sources.items() if name in before.sizes}
    index, fresh = list[Tensor | None](), list[Tensor | None]()
    for axis, factors in enumerate(after.dims):
        index.append(before.index(axis, units))
        is_new = torch.zeros(after.shape[axis], dtype=torch.bool)
        for name in dict.fromkeys(list_names(factors)):
            if name in sources:
                own = locate_units(factors, after.sizes, name)
                is_new |= torch.isin(own, (sources[name] < 0).nonzero().flatten())
        fresh.append(is_new.nonzero().flatten() if is_new.any() else None)
    return UnitMap(shape, index, fresh)
