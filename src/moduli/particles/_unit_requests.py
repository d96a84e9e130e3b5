"""Reading the arguments of `grow` and `shrink`: sizes, labels, positions and scores of units."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..axes import ModelAxes, ModelAxis, locate_units
from ..layout import layout_of, match_name, suggest_name
from ._unit_plan import AxisResize


def list_labels(net: nn.Module, axes: ModelAxes) -> dict[str, tuple[Any, ...]]:
    """Return the labels of the labelled axes, by name."""
    layout = layout_of(net)
    labels: dict[str, tuple[Any, ...]] = {}
    entries: Any = (*layout.entries, *layout.buffers)
    for name, own in ((entry.name, entry.axes) for entry in entries):
        dims = axes.of(name).dims if own is not None else ()
        for axis, factors in zip(own or (), dims, strict=False):
            if axis.labels is not None and len(factors) == 1 and isinstance(factors[0], str):
                labels[factors[0]] = tuple(axis.labels)
    return labels


def expand_names(axes: ModelAxes, chosen: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the requested value of each axis, from values by name or pattern."""
    wanted: dict[str, Any] = {}
    for name, value in chosen.items():
        names = [name] if name in axes else [each for each in axes if match_name(each, [name])]
        wanted |= dict.fromkeys(names or [axes[name].name], value)  # `axes[name]` raises with similar names
    return list(wanted.items())


def find_axis(axes: ModelAxes, name: str, verb: str) -> ModelAxis:
    """Return an axis of a model; raise ValueError if its size is fixed.

    Args:
        axes: The axes of the model.
        name: The axis.
        verb: The operation, for the error.
    """
    axis = axes[name]
    if axis.growth is None:
        raise ValueError(
            f"{verb}: axis {name!r} is fixed, and other units would change what the model computes: {'; '.join(axis.reasons)}"
        )
    return axis


def plan_growth(axes: ModelAxes, name: str, size: Any, labels: tuple[Any, ...] | None, how: str) -> AxisResize:
    """Return the resize of an axis that gets more units.

    Args:
        axes: The axes of the model.
        name: The axis.
        size: The new number of units; for an axis with labels, the labels of all units.
        labels: The present labels of the axis; None if it has none.
        how: "split" for copies, "zero" for fresh units.
    """
    axis = find_axis(axes, name, "grow")
    modes = {"copy": "copy" if how == "split" else "fresh", "input": "fresh", "fresh": "fresh", "zero": "zero"}
    mode = modes[str(axis.growth)]
    if labels is None:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"grow: axis {name!r} has no labels; give the number of units that it gets, not {size!r}")
        if size < axis.size:
            raise ValueError(
                f"grow: axis {name!r} has {axis.size} units, more than {size}; particles.shrink removes units"
            )
        source = torch.arange(size) % axis.size if axis.size else torch.zeros(size, dtype=torch.int64)
        return AxisResize(name, axis.size, source, torch.arange(axis.size, size), mode)
    return _plan_labelled_growth(axis, size, labels, mode)


def _plan_labelled_growth(axis: ModelAxis, size: Any, labels: tuple[Any, ...], mode: str) -> AxisResize:
    """Return the resize of an axis whose units get the labels `size`, which include the present ones."""
    name = axis.name
    if isinstance(size, int | str):
        raise TypeError(f"grow: the units of axis {name!r} have labels; give the labels of all units that it gets")
    wanted = tuple(size)
    missing = [label for label in labels if label not in set(wanted)]
    if missing or len(set(wanted)) != len(wanted):
        what = f"{missing[:4]} would be removed; particles.shrink removes units" if missing else "some are there twice"
        raise ValueError(f"grow: the labels of axis {name!r} have to contain those that are there, each once: {what}")
    places = {label: position for position, label in enumerate(labels)}
    fresh = [position for position, label in enumerate(wanted) if label not in places]
    copies = iter(range(len(fresh)))
    source = torch.tensor([places[each] if each in places else next(copies) % len(labels) for each in wanted])
    return AxisResize(name, axis.size, source, torch.tensor(fresh, dtype=torch.int64), mode, wanted)


def plan_shrinking(
    net: Any, axes: ModelAxes, name: str, size: int, units: Any, labels: tuple[Any, ...] | None, score: Any
) -> AxisResize:
    """Return the resize of an axis that keeps some units.

    Args:
        net: The model.
        axes: Its axes.
        name: The axis.
        size: The present number of units.
        units: The units to keep: a number, labels, positions, or a mask.
        labels: The present labels of the axis; None if it has none.
        score: The score of each unit, or the function that computes it; None for the norm.
    """
    positions = _read_positions(net, axes, name, size, units, labels, score)
    inside = bool(len(positions)) and bool(positions.min() >= 0) and bool(positions.max() < size)
    if not inside or len(set(positions.tolist())) != len(positions):
        raise ValueError(
            f"shrink: the units of axis {name!r} that stay are positions in 0 to {size - 1}, at least one, each once"
        )
    chosen = None if labels is None else tuple(labels[position] for position in positions.tolist())
    return AxisResize(name, size, positions, torch.zeros(0, dtype=torch.int64), "keep", chosen)


def _read_positions(
    net: Any, axes: ModelAxes, name: str, size: int, units: Any, labels: tuple[Any, ...] | None, score: Any
) -> Tensor:
    """Return the positions of the units to keep; the arguments are those of `plan_shrinking`."""
    if isinstance(units, int) and not isinstance(units, bool):
        return _choose(net, axes, name, size, units, score)
    if labels is not None and not isinstance(units, Tensor):
        places = {label: position for position, label in enumerate(labels)}
        unknown = [label for label in units if label not in places]
        if unknown:
            close = suggest_name(str(unknown[0]), list(map(str, labels)))
            raise KeyError(f"shrink: axis {name!r} has no labels {unknown[:4]}.{close}")
        return torch.tensor([places[label] for label in units], dtype=torch.int64)
    positions = torch.as_tensor(units).detach().to("cpu")
    if positions.dtype == torch.bool:
        if positions.shape != (size,):
            raise ValueError(f"shrink: the mask of axis {name!r} has shape {tuple(positions.shape)}, not ({size},)")
        return positions.nonzero().flatten()
    if positions.numel() and (positions.is_floating_point() or positions.is_complex()):
        raise TypeError(
            f"shrink: the units of axis {name!r} are {positions.dtype}; give positions (integers), a mask (booleans), or "
            "the number of units that stay, with score= to choose them"
        )
    positions = positions.to(torch.int64)
    return torch.where(positions < 0, positions + size, positions)


def _choose(net: Any, axes: ModelAxes, name: str, size: int, count: int, score: Any) -> Tensor:
    """Return the positions of the units with the largest scores, in order."""
    if not 0 < count <= size:
        raise ValueError(f"shrink: axis {name!r} has {size} units, of which {count} can't stay")
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    scores = score if isinstance(score, Tensor) else (score or partial(_measure_units, name))(axes, tensors)
    if tuple(scores.shape) != (size,):
        raise ValueError(f"shrink: the scores of axis {name!r} have shape {tuple(scores.shape)}, not ({size},)")
    return scores.detach().to("cpu").topk(count).indices.sort().values


def _measure_units(name: str, axes: ModelAxes, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return, for each unit of an axis, the norm of all parameter entries that belong to it."""
    total = torch.zeros(axes[name].size, dtype=torch.float64)
    for each, axis in axes[name].places:
        own = axes.of(each)
        if own.role == "buffer" or each not in tensors:
            continue
        values = tensors[each].detach().to("cpu").abs().double().square()
        axis += values.dim() - len(own)  # members of a population come first
        sums = values.sum([other for other in range(values.dim()) if other != axis]) if values.dim() > 1 else values
        units = locate_units(own.dims[axis - values.dim() + len(own)], own.sizes, name)
        total.index_add_(0, units[units >= 0], sums[units >= 0])
    return total.sqrt()
