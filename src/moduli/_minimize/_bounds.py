"""Bounds as they are written: SciPy's list of intervals, intervals by name, or lower and upper bounds in x0's form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
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
        read = partial(_read_leaf, batched=batched)
        pairs = [pair or (None, None) for pair in point.match(bounds, "bounds", _is_interval, read, _FORMS)]
        low, high = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    else:
        low, high = _read_side(point, lower, "lower"), _read_side(point, upper, "upper")
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


def _read_side(point: StartPoint, given: Any, side: str) -> list[Bound]:
    """A bound for every leaf: one number for all, or a nesting like x0; None is open."""
    if isinstance(given, bool | str):
        raise TypeError(f"minimize: {side} bounds are numbers in the form of x0, not {given!r}")

    def read(part: Any, leaf: Tensor, name: str) -> Tensor:
        if isinstance(part, list | tuple):
            open_end = -torch.inf if side == "lower" else torch.inf
            part = [open_end if item is None else item for item in part]
        data = part.data if isinstance(part, Labelled) else torch.as_tensor(part)
        try:
            return data.detach().to(leaf).expand_as(leaf).clone()
        except RuntimeError as error:
            raise ValueError(f"minimize: {side} of {name} does not fit the shape of x0: {error}") from None

    forms = "give one number, or the form of x0 (for a module a dictionary by parameter name)"
    return point.match(given, f"{side} bounds", lambda part: isinstance(part, int | float), read, forms)


def _is_end(value: Any) -> bool:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return value is None or number or (isinstance(value, Tensor | np.ndarray) and value.ndim == 0)


def _is_interval(given: Any) -> bool:
    return isinstance(given, list | tuple) and len(given) == 2 and all(map(_is_end, given))


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | Labelled | np.ndarray)


def _read_leaf(given: Any, leaf: Tensor, name: str, batched: bool) -> tuple[Tensor, Tensor]:
    """Both bounds of one leaf from an interval, a list of intervals, or an array with intervals along its last axis."""
    one = leaf[0] if batched and leaf.dim() else leaf
    if isinstance(given, np.ndarray) and given.dtype == object:
        given = given.tolist()
    if _is_interval(given):
        data = _read_interval(given)
    elif _is_array(given):
        if isinstance(given, np.ndarray) and given.dtype.kind not in "iuf":
            raise TypeError(f"minimize: bounds of {name} are not understood; {_FORMS}")
        data = torch.as_tensor(given.data if isinstance(given, Labelled) else given)
        if data.shape not in ((*one.shape, 2), (*leaf.shape, 2)):
            raise ValueError(
                f"minimize: bounds of {name} are an array of shape {tuple(data.shape)}; it has {(*one.shape, 2)}, or "
                "give lower= and upper="
            )
    else:
        if not isinstance(given, Sequence) or isinstance(given, str) or any(map(_is_array, given)):
            raise TypeError(f"minimize: bounds of {name} are not understood; {_FORMS}")
        pairs = [(None, None) if pair is None else pair for pair in given]
        if one.dim() > 1 or len(pairs) != one.numel() or not all(map(_is_interval, pairs)):
            raise ValueError(
                f"minimize: {name} has {one.numel()} variables, and its bounds {len(pairs)} entries; give an interval "
                "(low, high) for each, or one for all"
            )
        data = torch.stack([_read_interval(pair) for pair in pairs]).reshape(*one.shape, 2)
    low, high = data.to(leaf).unbind(-1)
    return low.expand(leaf.shape).clone(), high.expand(leaf.shape).clone()


def _read_interval(pair: Any) -> Tensor:
    ends = zip(pair, (-torch.inf, torch.inf), strict=True)
    return torch.tensor([open_end if end is None else float(end) for end, open_end in ends], dtype=torch.float64)
