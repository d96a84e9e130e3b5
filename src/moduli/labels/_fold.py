"""Reductions that can skip NaN, implemented once for entries along axes and for entries in groups.

A `Fold` defines sets of entries: it sums them, takes their extremes, and copies one number per set back to its entries. Means,
variances and counts follow from these. NaN is replaced before the computation, not after: the gradient of a skipped entry is
then zero, where masking the result would give NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import torch

INTERPOLATIONS: Final = ("linear", "lower", "higher", "midpoint", "nearest")


class Fold(Protocol):
    """Sets of entries, each of which becomes one."""

    def add(self, data: torch.Tensor) -> torch.Tensor:
        """Return the sum of each set."""

    def extreme(self, data: torch.Tensor, how: str) -> torch.Tensor:
        """Return the ``"amin"`` or ``"amax"`` of each set, NaN of floating data for sets without entries."""

    def spread(self, folded: torch.Tensor) -> torch.Tensor:
        """Return for each entry the number of its set, in a shape that broadcasts to the data."""


class AxesFold(NamedTuple):
    """All entries along axes, which stay with size 1."""

    axes: tuple[int, ...]

    def add(self, data: torch.Tensor) -> torch.Tensor:
        """Return the sum along the axes."""
        return data.sum(self.axes, keepdim=True) if self.axes else data

    def extreme(self, data: torch.Tensor, how: str) -> torch.Tensor:
        """Return the smallest or largest along the axes."""
        return getattr(torch, how)(data, self.axes, keepdim=True) if self.axes else data

    def spread(self, folded: torch.Tensor) -> torch.Tensor:
        """Return the data itself: size 1 broadcasts."""
        return folded


def find_valid(data: torch.Tensor, skipna: bool) -> torch.Tensor:
    """Return a mask of the entries that count: all of them, or those that are not NaN."""
    return ~torch.isnan(data) if skipna and has_nan(data) else torch.ones_like(data, dtype=torch.bool)


def has_nan(data: torch.Tensor) -> bool:
    """Whether data of this dtype can hold NaN."""
    return data.is_floating_point() or data.is_complex()


def count(fold: Fold, data: torch.Tensor, skipna: bool) -> torch.Tensor:
    """Return the number of entries of each set.

    Args:
        fold: The sets.
        data: The entries.
        skipna: Whether to skip NaN.
    """
    return fold.add(find_valid(data, skipna).to(torch.int64))


def add(fold: Fold, data: torch.Tensor, skipna: bool) -> torch.Tensor:
    """Return the sum of each set: 0 without entries.

    Args:
        fold: The sets.
        data: The entries.
        skipna: Whether to skip NaN.
    """
    wide = _widen(data, integers=torch.int64)
    total = fold.add(torch.where(find_valid(data, True), wide, 0) if skipna and has_nan(data) else wide)
    return narrow(total, data)


def mean(fold: Fold, data: torch.Tensor, skipna: bool) -> torch.Tensor:
    """Return the mean of each set: NaN without entries.

    Args:
        fold: The sets.
        data: The entries.
        skipna: Whether to skip NaN.
    """
    valid, wide = find_valid(data, skipna), _widen(data)
    return narrow(_average(fold, wide, valid)[0], data)


def _average(fold: Fold, wide: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    number = fold.add(valid.to(torch.int64))
    total = fold.add(torch.where(valid, wide, 0))
    return torch.where(number > 0, total / number.clamp(min=1), math.nan), number


def var(fold: Fold, data: torch.Tensor, skipna: bool, correction: float) -> torch.Tensor:
    """Return the variance of each set: NaN for no more than `correction` entries.

    Args:
        fold: The sets.
        data: The entries.
        skipna: Whether to skip NaN.
        correction: Subtracted from the number of entries.
    """
    return narrow(_variance(fold, data, skipna, correction), data)


def std(fold: Fold, data: torch.Tensor, skipna: bool, correction: float) -> torch.Tensor:
    """Return the standard deviation of each set; where it is 0 its gradient is 0, as in torch.

    Args:
        fold: The sets.
        data: The entries.
        skipna: Whether to skip NaN.
        correction: Subtracted from the number of entries.
    """
    variance = _variance(fold, data, skipna, correction)
    positive = variance > 0
    result = torch.where(positive, torch.where(positive, variance, 1).sqrt(), variance)
    return narrow(result, data)


def _variance(fold: Fold, data: torch.Tensor, skipna: bool, correction: float) -> torch.Tensor:
    valid, wide = find_valid(data, skipna), _widen(data)
    average, number = _average(fold, wide, valid)
    away = torch.where(valid, wide - fold.spread(torch.where(number > 0, average, 0)), 0)
    squares = away.real.square() + away.imag.square() if away.is_complex() else away.square()
    enough = number > correction
    return torch.where(enough, fold.add(squares) / torch.where(enough, number - correction, 1), math.nan)


def extreme(fold: Fold, data: torch.Tensor, how: str, skipna: bool) -> torch.Tensor:
    """Return the extreme of each set: NaN without entries.

    Args:
        fold: The sets.
        data: The entries.
        how: ``"amin"`` or ``"amax"``.
        skipna: Whether to skip NaN.
    """
    refuse_complex(data)
    if not skipna or not has_nan(data):
        return fold.extreme(data, how)
    valid = find_valid(data, True)
    result = fold.extreme(torch.where(valid, data, math.inf if how == "amin" else -math.inf), how)
    return torch.where(fold.add(valid.to(torch.int64)) > 0, result, math.nan)


def quantile(
    ranked: torch.Tensor,
    first: torch.Tensor,
    number: torch.Tensor,
    q: Sequence[float],
    interpolation: str,
) -> torch.Tensor:
    """Return quantiles of sets that are contiguous and sorted along the last axis.

    Args:
        ranked: The entries: each set in ascending order, with what does not count at its end.
        first: The position at which each set begins.
        number: How many entries of each set count, with the other axes of the data; 0 gives NaN.
        q: The quantiles, between 0 and 1.
        interpolation: One of `INTERPOLATIONS`.

    Returns:
        The quantiles along a new first axis, the sets along the last one.
    """
    levels = torch.tensor(q, dtype=torch.float64, device=ranked.device).reshape(-1, *[1] * number.ndim)
    place = levels * (number - 1).clamp(min=0)
    low, high = place.floor(), place.ceil()
    weight = place - low
    if interpolation == "nearest":
        low = high = place.round()
    elif interpolation in ("lower", "higher"):
        low = high = low if interpolation == "lower" else high
    elif interpolation == "midpoint":
        weight = torch.where(low == high, 0.0, 0.5)
    last = max(ranked.shape[-1] - 1, 0)
    source = ranked if ranked.shape[-1] else torch.nn.functional.pad(ranked, (0, 1))
    source = source.expand(len(q), *source.shape)
    below, above = (source.gather(-1, (first + at.to(torch.int64)).clamp(max=last)) for at in (low, high))
    between = torch.where(low == high, below, below + (above - below) * weight.to(ranked.dtype))
    return torch.where(number > 0, between, math.nan)


def check_quantiles(q: Sequence[float], interpolation: str) -> None:
    """Raise ValueError for quantiles outside of 0 to 1 and for unknown interpolations."""
    if not all(0 <= each <= 1 for each in q):
        raise ValueError(f"quantiles are between 0 and 1, got {list(q)}")
    if interpolation not in INTERPOLATIONS:
        raise ValueError(
            f"the interpolation of a quantile is one of {', '.join(INTERPOLATIONS)}, not {interpolation!r}"
        )


def widen_real(data: torch.Tensor) -> torch.Tensor:
    """Return real numbers that can be averaged; raise TypeError for complex ones."""
    refuse_complex(data)
    return _widen(data)


def refuse_complex(data: torch.Tensor) -> None:
    """Raise TypeError for complex numbers, which have no order."""
    if data.is_complex():
        raise TypeError("complex numbers have no order: no extremes and no quantiles; take those of t.abs() or t.real")


def _widen(data: torch.Tensor, integers: torch.dtype | None = None) -> torch.Tensor:
    """Return data in a dtype for sums: half precision as float32, integers in `integers` or the default dtype."""
    if data.dtype in (torch.float16, torch.bfloat16):
        return data.float()
    if has_nan(data):
        return data
    return data.to(torch.get_default_dtype() if integers is None else integers)


def narrow(result: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Return a result in half precision if the data has it."""
    return result.to(data.dtype) if data.dtype in (torch.float16, torch.bfloat16) else result
