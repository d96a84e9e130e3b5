"""Bins of dates: which day, month or year each one falls into, and `resample`, which groups by them."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any, Final

import numpy as np

from ._axes import Axes, DimLike, cache_by_axes
from ._groupby import plan_members
from ._groups import GroupPlan, Groups
from ._instants import DateArray, get_dates
from ._locate import require_labels
from ._space import Space
from ._tensor import Tensor, method

_MONTHS: Final = {"M": 1, "Q": 3, "Y": 12}
_STEPS: Final = {"D": "D", "h": "h", "min": "m", "s": "s", "ms": "ms", "us": "us", "ns": "ns"}
_OLD: Final = {"M": "ME", "Q": "QE", "Y": "YE", "A": "YE", "H": "h", "T": "min", "S": "s"}
_MONTH_NAMES: Final = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_WEEKDAYS: Final = ("MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN")
_MOST: Final = 10**7

Bins = tuple[np.ndarray[Any, np.dtype[np.int64]], DateArray]
"""The number of the bin of each date, and the label of each bin."""


@method
def resample(t: Tensor, dim: DimLike | None = None, rule: str | None = None, /, **named: str) -> Groups:
    """Group the entries of an axis of dates by periods of time, without gaps between them.

    Args:
        t: The tensor.
        dim: The axis, by name or position, if it is not given as a keyword.
        rule: The period: ``"YE"``, ``"QE"``, ``"ME"`` and ``"W"`` are labelled by their last day (of weeks Sunday),
            ``"YS"``, ``"QS"`` and ``"MS"`` by their first; ``"D"``, ``"h"``, ``"min"``, ``"s"``, ``"ms"``, ``"us"`` and
            ``"ns"`` by their start. A number in front is so many of them, as in ``"6h"``. After a dash, the month with which
            quarters and years end or start, as in ``"QS-DEC"``, or the weekday with which weeks end, as in ``"W-MON"``.
        named: Axis name to period, as one keyword.

    Returns:
        The groups, in the order of time. A period without entries is a group without entries, whose mean is NaN.

    Raises:
        TypeError: If the labels of the axis are not dates, or there is not exactly one axis.
        ValueError: If there is no such period, or there would be more than ten million.

    Example:
        >>> import numpy as np
        >>> import moduli as mo
        >>> day = mo.tensor(np.arange(60.0), time=np.arange("2000-01-01", "2000-03-01", dtype="datetime64[D]"))
        >>> day.resample(time="ME").mean()
        Tensor(time: 2000-01-31=15., 2000-02-29=45., dtype=torch.float64)
    """
    chosen: dict[Any, Any] = {**({} if dim is None else {dim: rule}), **named}
    if len(chosen) != 1:
        raise TypeError(f"resample takes one axis and a period, as in t.resample(time='ME'), got {list(chosen)}")
    ((which, period),) = chosen.items()
    return Groups(t, _plan_bins(t._axes, t._axes.axis(which), period))


@cache_by_axes
def _plan_bins(axes: Axes, axis: int, rule: str) -> GroupPlan:
    members, labels = bin_dates(require_labels(axes, axis, "resample"), rule)
    return plan_members(axes, axis, members, Space(labels), axes.names[axis])


def bin_dates(space: Space, rule: str) -> tuple[Sequence[int], Sequence[Hashable]]:
    """Return the number of the bin of each label, and the labels of all bins in order, as pandas' ``resample`` has them.

    Args:
        space: A Space whose labels are dates, or durations for periods of fixed length.
        rule: The period, as in `resample`.

    Raises:
        TypeError: If the labels are not dates.
        ValueError: If there is no such period, or there would be more than ten million.
    """
    dates = get_dates(space)
    if dates is None and len(space):
        raise TypeError(f"resample goes by time, and the labels are no dates: {space!r}")
    count, unit, anchor = _parse_rule(rule)
    if dates is None or not len(dates):
        return [], []
    if unit in _STEPS:
        members, labels = _bin_steps(dates, count, _STEPS[unit])
    elif dates.dtype.kind == "m":
        raise TypeError(f"durations have periods of fixed length only, such as 'D' or '6h', not {rule!r}")
    elif unit == "W":
        members, labels = _bin_weeks(dates, count, 6 if anchor is None else _WEEKDAYS.index(anchor))
    elif len(unit) == 2 and unit[0] in _MONTHS and unit[1] in "ES":
        ends, months = unit[1] == "E", _MONTHS[unit[0]]
        # The month, counted from January, with which periods start.
        start = 0 if anchor is None else _MONTH_NAMES.index(anchor) + ends
        members, labels = _bin_months(dates, count, months, ends, start % months)
    else:
        hint = f"; write {_OLD[unit]!r}" if unit in _OLD else ""
        raise ValueError(
            f"{rule!r} is no period of time; there are YE, YS, QE, QS, ME, MS, W, {', '.join(_STEPS)}{hint}"
        )
    return members.tolist(), labels  # type: ignore[return-value]


def _parse_rule(rule: Any) -> tuple[int, str, str | None]:
    """Return the count, unit and anchor of a period such as "6h" or "QS-DEC"."""
    match = re.fullmatch(r"(\d*)([A-Za-z]+)(?:-([A-Z]{3}))?", rule) if isinstance(rule, str) else None
    if match is None or match[1] == "0":
        raise ValueError(f"{rule!r} is no period of time such as 'ME', 'YS', 'W', 'D' or '6h'")
    unit, anchor = match[2], match[3]
    anchors = _WEEKDAYS if unit == "W" else _MONTH_NAMES if unit in ("QE", "QS", "YE", "YS") else ()
    if anchor is not None and anchor not in anchors:
        what = f"the anchor of {unit!r} is one of {', '.join(anchors)}" if anchors else f"{unit!r} has no anchor"
        raise ValueError(f"{rule!r} is no period of time: {what}")
    return int(match[1] or 1), unit, anchor


def _number(periods: np.ndarray[Any, Any], count: int, ends: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the bin of each period, with `count` periods per bin, and the period that labels each bin.

    Periods that are labelled by their end are counted so that the first one ends a bin; others, so that it starts one.
    """
    first = int(periods.min())
    members = -((first - periods) // count) if ends else (periods - first) // count
    bins = int(members.max()) + 1
    if bins > _MOST:
        raise ValueError(f"resample would make {bins} bins, more than {_MOST}; take a longer period")
    return members, first + count * np.arange(bins)


def _bin_months(dates: DateArray, count: int, months: int, ends: bool, start: int) -> Bins:
    members, periods = _number((dates.astype("M8[M]").astype(np.int64) - start) // months, count, ends)
    first = periods * months + start
    if not ends:
        return members, first.astype("M8[M]").astype("M8[D]")
    return members, (first + months).astype("M8[M]").astype("M8[D]") - np.timedelta64(1, "D")


def _bin_weeks(dates: DateArray, count: int, end: int) -> Bins:
    # Day 3 of the epoch, 1970-01-04, was a Sunday, which is 6.
    last = 3 + (end + 1) % 7
    members, weeks = _number((dates.astype("M8[D]").astype(np.int64) + 6 - last) // 7, count, True)
    return members, (weeks * 7 + last).astype("M8[D]")


def _bin_steps(dates: DateArray, count: int, unit: str) -> Bins:
    """Return bins of fixed length, counted from the midnight before the first date, or from the first duration."""
    kind = dates.dtype.kind
    step = np.timedelta64(count, unit)  # type: ignore[call-overload]
    first = dates.min()
    origin = first.astype("M8[D]") if kind == "M" else first
    away = (dates - origin) // step
    skipped = int(away.min())
    members, numbers = _number(away - skipped, 1, False)
    return members, origin + (numbers + skipped) * step
