"""Bounds as they are written: SciPy's list of intervals, intervals by name, or lower and upper bounds in x0's form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..labels import Tensor as Labelled
from ._point import StartPoint

Bound = Tensor | None
_FORMS = (
    "bounds are one interval (low, high) for all variables, a list with an interval for each variable as in SciPy, or a "
    "dictionary of those by name; None is open. Tensors of bounds are given by lower= and upper="
)


def read_bounds(
    point: StartPoint, bounds: Any, lower: Any, upper: Any, batched: bool = False
) -> tuple[list[Bound], list[Bound]]:
    """The lower and upper bound of every leaf, as tensors of its shape; None where a whole leaf is open.

    Args:
        point: The starting point.
        bounds: Intervals, as SciPy has them.
        lower: A number, or in the form of x0, with None where it is open.
        upper: The same.
        batched: Whether the leaves hold many starts along their first axis; intervals are those of one of them.
    """
    if bounds is not None and (lower is not None or upper is not None):
        raise TypeError("minimize: give either bounds=, or lower= and upper=")
    if hasattr(bounds, "lb") and hasattr(bounds, "ub"):  # scipy.optimize.Bounds
        lower, upper, bounds = bounds.lb, bounds.ub, None
    if isinstance(bounds, Iterator):
        bounds = list(bounds)
    if bounds is not None:
        low, high = _read_intervals(point, bounds, batched)
    else:
        low, high = point.spread(lower, "lower"), point.spread(upper, "upper")
    low = [None if bound is None or bool((bound == -torch.inf).all()) else bound for bound in low]
    high = [None if bound is None or bool((bound == torch.inf).all()) else bound for bound in high]
    for name, leaf, a, b in zip(point.names, point.leaves, low, high, strict=True):
        if leaf.is_complex() and (a is not None or b is not None):
            raise TypeError(f"minimize: {name} is complex, and complex numbers have no order; bound its parts instead")
        _check(name, leaf, a, b)
    return low, high


def _check(name: str, leaf: Tensor, low: Bound, high: Bound) -> None:
    if (low is not None and bool(low.isnan().any())) or (high is not None and bool(high.isnan().any())):
        raise ValueError(f"minimize: a bound of {name} is not a number; None is open")
    if low is not None and high is not None and bool((low > high).any()):
        raise ValueError(f"minimize: a lower bound of {name} is not below its upper bound, nor equal to it (fixed)")
    outside = torch.zeros_like(leaf, dtype=torch.bool)
    if low is not None:
        outside |= leaf < low
    if high is not None:
        outside |= leaf > high
    if low is not None and high is not None:
        outside &= low != high  # what is fixed is put where it belongs
    if bool(outside.any()):
        raise ValueError(
            f"minimize: the start is outside of the bounds ({int(outside.sum())} numbers of {name}); start inside, "
            "for instance at x0.clamp(low, high)"
        )


def _read_intervals(point: StartPoint, bounds: Any, batched: bool) -> tuple[list[Bound], list[Bound]]:
    low: list[Bound] = [None] * len(point.leaves)
    high: list[Bound] = [None] * len(point.leaves)
    positions = {name: i for i, name in enumerate(point.names)}

    def walk(given: Any, x: Any, name: str) -> None:
        if name in positions:
            i = positions[name]
            low[i], high[i] = _read_leaf(given, point.leaves[i], name, batched)
        elif given is None:
            return
        elif _is_interval(given):
            for key, i in positions.items():
                if key.startswith(name):
                    low[i], high[i] = _read_leaf(given, point.leaves[i], key, batched)
        elif isinstance(x, Mapping):
            if not isinstance(given, Mapping):
                raise TypeError(f"minimize: bounds of {name} are a {type(given).__name__}; {_FORMS}")
            unknown = [key for key in given if key not in x]
            if unknown:
                raise ValueError(f"minimize: bounds name {unknown[0]!r}, which {name} does not have")
            for key, item in given.items():
                walk(item, x[key], f"{name}[{key!r}]")
        elif isinstance(given, Sequence) and not isinstance(given, str) and len(given) == len(x):
            for i, (item, part) in enumerate(zip(given, x, strict=True)):
                walk(item, part, f"{name}[{i}]")
        else:
            raise TypeError(f"minimize: bounds do not have the form of {name}; {_FORMS}")

    if point.module is not None:
        if not _is_interval(bounds) and not isinstance(bounds, Mapping):
            raise TypeError("minimize: bounds of a module are one interval, or a dictionary by parameter name")
        named = dict.fromkeys(point.names, bounds) if _is_interval(bounds) else dict(bounds)
        unknown = [key for key in named if key not in positions]
        if unknown:
            raise ValueError(f"minimize: bounds name {unknown[0]!r}; the module has {', '.join(point.names)}")
        for key, item in named.items():
            walk(item, None, key)
    else:
        walk(bounds, point.x0, "x0")
    return low, high


def _is_end(value: Any) -> bool:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return value is None or number or (isinstance(value, Tensor | np.ndarray) and value.ndim == 0)


def _is_interval(given: Any) -> bool:
    return isinstance(given, list | tuple) and len(given) == 2 and all(map(_is_end, given))


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | Labelled | np.ndarray)


def _read_leaf(given: Any, leaf: Tensor, name: str, batched: bool) -> tuple[Bound, Bound]:
    """Both bounds of one leaf from an interval, a list of intervals, or an array with intervals along its last axis."""
    if given is None:
        return None, None
    one = leaf[0] if batched and leaf.dim() else leaf
    if isinstance(given, np.ndarray) and given.dtype == object:
        given = given.tolist()
    if _is_interval(given):
        return _fill([given[0]], leaf, -torch.inf), _fill([given[1]], leaf, torch.inf)
    if _is_array(given):
        if isinstance(given, np.ndarray) and given.dtype.kind not in "iuf":
            raise TypeError(f"minimize: bounds of {name} are not understood; {_FORMS}")
        data = torch.as_tensor(given.data if isinstance(given, Labelled) else given)
        if data.shape not in ((*one.shape, 2), (*leaf.shape, 2)):
            raise ValueError(
                f"minimize: bounds of {name} are an array of shape {tuple(data.shape)}; it has {(*one.shape, 2)}, or "
                "give lower= and upper="
            )
        return data[..., 0].to(leaf).expand(leaf.shape), data[..., 1].to(leaf).expand(leaf.shape)
    if not isinstance(given, Sequence) or isinstance(given, str) or any(map(_is_array, given)):
        raise TypeError(f"minimize: bounds of {name} are not understood; {_FORMS}")
    pairs = [(None, None) if pair is None else pair for pair in given]
    if one.dim() > 1 or len(pairs) != one.numel() or not all(map(_is_interval, pairs)):
        raise ValueError(
            f"minimize: {name} has {one.numel()} variables, and its bounds {len(pairs)} entries; give an interval "
            "(low, high) for each, or one for all"
        )
    lows, highs = zip(*pairs, strict=True)
    return _fill(list(lows), leaf, -torch.inf), _fill(list(highs), leaf, torch.inf)


def _fill(ends: list[Any], leaf: Tensor, open_end: float) -> Bound:
    if all(end is None for end in ends):
        return None
    numbers = [open_end if end is None else float(end) for end in ends]
    row = torch.tensor(numbers, dtype=leaf.dtype, device=leaf.device)
    return (row if len(ends) > 1 else row[0]).expand(leaf.shape).clone()
