"""Instants: dates and durations in canonical form, whatever their original type and unit.

A date is stored as `numpy.datetime64`, a duration as `numpy.timedelta64`; Python's `datetime`, `date` and `timedelta` and those
of pandas are converted to these. The unit is the coarsest of days, seconds, milliseconds and so on that holds the values
exactly. It follows from the values alone, so that equal instants are equal labels, and equal axes are one object.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from ._space import Space

DateArray = np.ndarray[Any, np.dtype[Any]]
"""An array of `datetime64` or `timedelta64`."""

UNITS: Final = ("D", "s", "ms", "us", "ns", "ps", "fs", "as")
FACTORS: Final = (86400, 1000, 1000, 1000, 1000, 1000, 1000)
"""How many of the next unit make one of each unit."""


_BASES: Final = {"M": {"Y": "D", "M": "D", "W": "D", "h": "s", "m": "s"}, "m": {"Y": "M", "W": "D", "h": "s", "m": "s"}}
"""The unit that each other unit is converted to exactly; durations in months stay, because months differ in length."""
MOST: Final = 2**63 - 1
_TYPES: Final = (np.datetime64, np.timedelta64, datetime.date, datetime.timedelta)


def get_dates(space: Space) -> DateArray | None:
    """Return the labels of a Space as an array of dates or durations; None if they are something else."""
    values: DateArray | None = getattr(space._labels, "values", None)
    return values if values is not None and values.dtype.kind in "mM" else None


def is_instant_type(kind: type) -> bool:
    """Whether instances of a type are dates or durations."""
    return issubclass(kind, _TYPES)


def as_instant(label: object) -> np.datetime64 | np.timedelta64 | None:
    """Return a date or duration of any type in NumPy's form; None for other values, and for NaT.

    Raises:
        TypeError: If the date has a time zone.
    """
    instant: np.datetime64 | np.timedelta64 | None = None
    if isinstance(label, (np.datetime64, np.timedelta64)):
        instant = label
    elif isinstance(label, datetime.datetime):
        if label.tzinfo is not None:
            raise refuse_zone(label)
        exact = getattr(label, "to_datetime64", None)  # pandas has nanoseconds
        instant = np.datetime64(label, "us") if exact is None else exact()
    elif isinstance(label, datetime.date):
        instant = np.datetime64(label, "D")
    elif isinstance(label, datetime.timedelta):
        exact = getattr(label, "to_timedelta64", None)
        instant = np.timedelta64(label, "us") if exact is None else exact()
    return None if instant is None or np.isnat(instant) else instant


def canonical_dates(dates: DateArray) -> DateArray:
    """Return dates or durations in the coarsest unit that holds all of them exactly.

    Raises:
        TypeError: If durations have no unit.
        ValueError: If a date is too far away to be counted in days, or in seconds if it has hours.
    """
    kind, (unit, _) = dates.dtype.kind, np.datetime_data(dates.dtype)
    if unit == "generic":
        raise TypeError("durations without a unit can't be labels; give them one, as in x.astype('timedelta64[s]')")
    base = _BASES[kind].get(unit, unit)
    if dates.dtype != np.dtype(f"{kind}8[{base}]"):
        dates = _cast(dates, f"{kind}8[{base}]")
    if base in ("D", "M"):
        return dates
    counts, at = dates.view(np.int64), UNITS.index(base)
    for coarser in range(at):
        factor = math.prod(FACTORS[coarser:at])
        if factor > MOST:
            continue
        # The first few values mostly decide; a product is faster than a remainder.
        for part in (counts[:8], counts):
            whole = part // factor
            if not np.array_equal(whole * factor, part):
                break
        else:
            return whole.view(f"{kind}8[{UNITS[coarser]}]")
    return dates


def _cast(dates: DateArray, dtype: str) -> DateArray:
    try:
        converted = dates.astype(dtype)
        exact = np.array_equal(converted.astype(dates.dtype), dates)
    except OverflowError:
        exact = False
    if not exact:
        raise ValueError(f"{dates[0]} is among labels that are too far away to be counted in {dtype}")
    return converted


def rescale(dates: DateArray, dtype: np.dtype[Any]) -> tuple[DateArray, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Return dates or durations in another unit, and a mask of those that it holds exactly; the others are undefined."""
    return rescale_canonical(canonical_dates(dates), dtype)


def rescale_canonical(dates: DateArray, dtype: np.dtype[Any]) -> tuple[DateArray, np.ndarray[Any, np.dtype[np.bool_]]]:
    if dates.dtype == dtype:
        return dates, np.ones(len(dates), bool)
    units = [np.datetime_data(each)[0] for each in (dates.dtype, dtype)]
    if "M" in units:  # durations of months, and others
        return np.zeros(len(dates), dtype), np.zeros(len(dates), bool)
    source, target = map(UNITS.index, units)
    counts = dates.view(np.int64)
    if source < target:
        factor = math.prod(FACTORS[source:target])
        exact = np.abs(counts) <= MOST // factor
        return (np.where(exact, counts, 0) * min(factor, MOST)).view(dtype), exact
    factor = math.prod(FACTORS[target:source])
    whole = counts // min(factor, MOST)
    return whole.view(dtype), whole * min(factor, MOST) == counts


def mixed_label(label: Any) -> Any:
    """Return a label with the dates in it, also those in tuples, in canonical form.

    A duration is Python's, unless it has nanoseconds: NumPy's is equal to an integer.
    """
    if type(label) is tuple:
        return tuple(map(mixed_label, label)) if any(map(_may_hold_instant, label)) else label
    own = canonical_label(label)
    if isinstance(own, np.timedelta64) and np.datetime_data(own.dtype)[0] in _PYTHON_HAS:
        with contextlib.suppress(OverflowError):
            return datetime.timedelta(**{_PYTHON_HAS[np.datetime_data(own.dtype)[0]]: int(own.astype(np.int64))})
    return own


_PYTHON_HAS: Final = {"D": "days", "s": "seconds", "ms": "milliseconds", "us": "microseconds"}


def canonical_label(label: Any) -> Any:
    """Return a date or duration in canonical form; other labels unmodified."""
    instant = as_instant(label)
    return label if instant is None else canonical_dates(np.array([instant]))[0]


def _may_hold_instant(label: object) -> bool:
    return isinstance(label, (*_TYPES, tuple))


def list_instants(dates: DateArray) -> list[np.datetime64 | np.timedelta64]:
    """Return the entries of an array, each in its canonical form, which may be coarser than that of the array."""
    unit = np.datetime_data(dates.dtype)[0]
    if unit in ("D", "M"):
        return list(dates)
    listed: np.ndarray[Any, Any] = np.empty(len(dates), object)
    left = np.ones(len(dates), bool)
    for coarser in UNITS[: UNITS.index(unit) + 1]:
        converted, exact = rescale_canonical(dates, np.dtype(f"{dates.dtype.kind}8[{coarser}]"))
        chosen = np.flatnonzero(left & exact)
        for at, entry in zip(chosen.tolist(), list(converted[chosen]), strict=True):
            listed[at] = entry
        left &= ~exact
    return list(listed)


def join_instants(labels: Sequence[Any]) -> DateArray | None:
    """Return dates, or durations, of any types as one array; None if both occur."""
    kinds = set(map(type, labels))
    if kinds == {datetime.date}:
        return np.array(labels, "M8[D]")
    if kinds == {datetime.datetime}:
        for label in labels:
            if label.tzinfo is not None:
                raise refuse_zone(label)
        return np.array(labels, "M8[us]")
    return _join_mixed(labels)


def _join_mixed(labels: Sequence[Any]) -> DateArray | None:
    """Return dates, or durations, of different types and units as one array in the finest of their units."""
    instants = [as_instant(label) for label in labels]
    # A missing date becomes NaT, which raises when the whole array is checked.
    missing = np.datetime64("NaT", "D")
    parts = [canonical_dates(np.array([missing if instant is None else instant])) for instant in instants]
    dtypes = {part.dtype for part in parts}
    if len({(dtype.kind, "M" in np.datetime_data(dtype)) for dtype in dtypes}) > 1:
        return None
    finest = parts[0].dtype if len(dtypes) == 1 else find_finest(*dtypes)
    converted = [rescale(part, finest) for part in parts]
    for label, (_, exact) in zip(labels, converted, strict=True):
        if not exact[0]:
            raise ValueError(f"{label} is too far away to be a label beside dates in {finest}")
    return np.concatenate([part for part, _ in converted])


def find_finest(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    return max(dtypes, key=lambda dtype: UNITS.index(np.datetime_data(dtype)[0]))


def refuse_missing(dates: DateArray) -> None:
    """Raise ValueError if NaT is among dates."""
    if np.isnat(dates).any():
        raise ValueError("NaT can't be a label: it is not equal to itself")


def refuse_zone(label: object) -> TypeError:
    """Return the error for a date with a time zone, whose instant depends on rules that labels do not have."""
    return TypeError(
        f"{label!r} has a time zone, and labels are dates without one; convert it to UTC and drop the zone first, as in "
        "when.astimezone(datetime.UTC).replace(tzinfo=None), or index.tz_convert(None) in pandas"
    )
