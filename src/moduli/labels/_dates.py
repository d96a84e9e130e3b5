"""Properties of dates: components such as the month, periods that text names, distances."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ._instants import (
    FACTORS,
    MOST,
    UNITS,
    DateArray,
    as_instant,
    canonical_dates,
    find_finest,
    get_dates,
    is_instant_type,
    join_instants,
    refuse_zone,
    rescale_canonical,
)

if TYPE_CHECKING:
    from ._space import Space


def datetime_component(space: Space, component: str) -> Sequence[Hashable]:
    """Return one component of the date of each label, such as its month: ``"time.month"`` in groupby.

    Args:
        space: A Space whose labels are dates, or durations for ``days``, ``seconds``, ``microseconds`` and ``nanoseconds``.
        component: ``year``, ``quarter``, ``month``, ``season``, ``week``, ``day``, ``dayofyear``, ``dayofweek`` (Monday is
            0), ``weekday``, ``hour``, ``minute``, ``second``, ``microsecond``, ``nanosecond``, ``days_in_month``, ``date``.

    Returns:
        One value per position: an integer, a string for ``season`` (``"DJF"``), or a date for ``date``.

    Raises:
        TypeError: If the labels are not dates.
        ValueError: If there is no such component.

    Example:
        >>> import numpy as np
        >>> from moduli.labels import Space
        >>> from moduli.labels._dates import datetime_component
        >>> datetime_component(Space(np.arange("2000-01", "2000-04", dtype="datetime64[M]"), "time"), "month")
        [1, 2, 3]
    """
    called = "the labels" if space.name is None else f"the labels of axis {space.name!r}"
    dates = get_dates(space)
    if dates is None and len(space):
        raise TypeError(f"{called} are not dates, so they have no component {component!r}: {space!r}")
    return read_component(np.empty(0, "M8[D]") if dates is None else dates, component, called)


def read_component(dates: DateArray, component: str, called: str) -> Sequence[Hashable]:
    """Return one component of each date, as `datetime_component` does.

    Args:
        dates: The dates or durations.
        component: The component.
        called: Their name in errors.

    Raises:
        ValueError: If there is no such component.
    """
    components = _OF_DATES if dates.dtype.kind == "M" else _OF_DURATIONS
    if component not in components:
        what = "dates" if dates.dtype.kind == "M" else "durations"
        raise ValueError(f"{called} are {what}, whose components are {', '.join(components)}, not {component!r}")
    values: list[Hashable] = list(components[component](dates).tolist())
    return values


def _count(dates: DateArray, unit: str, within: str) -> DateArray:
    """Return the number of whole units since the start of a greater unit."""
    start = dates.astype(f"M8[{within}]").astype(f"M8[{unit}]")
    number: DateArray = (dates.astype(f"M8[{unit}]") - start).astype(np.int64)
    return number


def _dayofweek(dates: DateArray) -> DateArray:
    # Day 0 of the epoch, 1970-01-01, was a Thursday, which is 3.
    return (dates.astype("M8[D]").astype(np.int64) + 3) % 7


def _week(dates: DateArray) -> DateArray:
    """Return the week of ISO 8601, which belongs to the year of its Thursday."""
    thursday = dates.astype("M8[D]") + (3 - _dayofweek(dates)).astype("m8[D]")
    return _count(thursday, "D", "Y") // 7 + 1


def _month(dates: DateArray) -> DateArray:
    return _count(dates, "M", "Y") + 1


def _days_in_month(dates: DateArray) -> DateArray:
    months = dates.astype("M8[M]")
    number: DateArray = ((months + np.timedelta64(1, "M")).astype("M8[D]") - months.astype("M8[D]")).astype(np.int64)
    return number


_Component = Callable[[DateArray], DateArray]
_OF_DATES: Final[dict[str, _Component]] = {
    "year": lambda dates: dates.astype("M8[Y]").astype(np.int64) + 1970,
    "quarter": lambda dates: (_month(dates) + 2) // 3,
    "month": _month,
    "season": lambda dates: np.array(["DJF", "MAM", "JJA", "SON"])[_month(dates) % 12 // 3],
    "week": _week,
    "day": lambda dates: _count(dates, "D", "M") + 1,
    "dayofyear": lambda dates: _count(dates, "D", "Y") + 1,
    "day_of_year": lambda dates: _count(dates, "D", "Y") + 1,
    "dayofweek": _dayofweek,
    "day_of_week": _dayofweek,
    "weekday": _dayofweek,
    "hour": lambda dates: _count(dates, "h", "D"),
    "minute": lambda dates: _count(dates, "m", "h"),
    "second": lambda dates: _count(dates, "s", "m"),
    "microsecond": lambda dates: _count(dates, "us", "s"),
    "nanosecond": lambda dates: _count(dates, "ns", "us"),
    "days_in_month": _days_in_month,
    "date": lambda dates: dates.astype("M8[D]"),
}


def _part(unit: str, within: str) -> _Component:
    def count(durations: DateArray) -> DateArray:
        whole = durations.astype(f"m8[{within}]").astype(durations.dtype)
        # astype rounds towards zero, but the parts of negative durations are counted from the unit below.
        whole = whole - (whole > durations).astype(f"m8[{within}]")
        return ((durations - whole) // np.timedelta64(1, unit)).astype(np.int64)  # type: ignore[call-overload, no-any-return]

    return count


_OF_DURATIONS: Final[dict[str, _Component]] = {
    "days": lambda durations: durations // np.timedelta64(1, "D"),
    "seconds": _part("s", "D"),
    "microseconds": _part("us", "s"),
    "nanoseconds": _part("ns", "us"),
}


# -- dates among others ------------------------------------------------------------------------------------------------


class Period(NamedTuple):
    """The dates that a text names, from `start` up to, not including, `end`."""

    start: np.datetime64
    end: np.datetime64
    unit: str


_TEXT: Final = re.compile(
    r"(?P<Y>[+-]?\d{4,})(-(?P<M>\d\d)(-(?P<D>\d\d)([T ](?P<h>\d\d)(:(?P<m>\d\d)(:(?P<s>\d\d)(\.(?P<f>\d{1,18}))?)?)?)?)?)?"
    r"(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_RESOLUTIONS: Final = ("Y", "M", "D", "h", "m", *UNITS[1:])


def parse_period(text: str) -> Period:
    """Read ISO 8601 text: a year, a month, a day, or a time of it down to fractions of seconds.

    Raises:
        TypeError: If it has a time zone.
        ValueError: If it is no such text.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no date such as '1991', '1991-05', '1991-05-17' or '1991-05-17T06:30'")
    parts = match.groupdict()
    if parts.pop("zone"):
        raise refuse_zone(text)
    fraction = parts.pop("f")
    unit = [unit for unit, part in parts.items() if part is not None][-1]
    if fraction:
        unit = UNITS[1 + -(-len(fraction) // 3)]
    try:
        start: np.datetime64 = np.array([text.strip().replace(" ", "T")]).astype(f"M8[{unit}]")[0]
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{text!r} is no date: {error}") from None
    return Period(start, start + np.timedelta64(1, unit), unit)  # type: ignore[call-overload]


_DURATION: Final = re.compile(r"(?P<count>[+-]?\d+)\s*(?P<unit>[A-Za-z]+)")
_DURATION_UNITS: Final = {
    **dict.fromkeys(("D", "d", "day", "days"), "D"),
    **dict.fromkeys(("h", "hour", "hours"), "h"),
    **dict.fromkeys(("min", "minute", "minutes"), "m"),
    **dict.fromkeys(("s", "second", "seconds"), "s"),
    **{name: name for name in ("ms", "us", "ns")},
}


def parse_duration(text: str) -> np.timedelta64:
    """Read a number and a unit, such as ``"2h"`` or ``"3 days"``.

    Raises:
        ValueError: If it is no such text.
    """
    match = _DURATION.fullmatch(text.strip())
    unit = None if match is None else _DURATION_UNITS.get(match["unit"])
    if match is None or unit is None:
        raise ValueError(f"{text!r} is no duration such as '3 days', '2h', '30min' or '5s'")
    return np.timedelta64(int(match["count"]), unit)  # type: ignore[call-overload, no-any-return]


def has_resolution_of(dates: DateArray, period: Period) -> bool:
    """Whether a text is as precise as dates are, so that it names one date; otherwise it names all dates of its period."""
    unit = np.datetime_data(dates.dtype)[0]
    if unit == "s":
        counts = dates.view(np.int64)
        unit = "h" if not (counts % 3600).any() else "m" if not (counts % 60).any() else "s"
    return _RESOLUTIONS.index(period.unit) >= _RESOLUTIONS.index(unit)


def find_instant(ordered: DateArray, instant: np.datetime64 | np.timedelta64) -> int:
    """Return the number of dates, in ascending order, that are before an instant."""
    own = canonical_dates(np.array([instant]))
    unit, its = np.datetime_data(ordered.dtype)[0], np.datetime_data(own.dtype)[0]
    if (unit == "M") != (its == "M"):
        raise TypeError("months have no fixed length to compare them with other durations")
    count, exact = int(own.view(np.int64)[0]), True
    if unit != its:
        step = _ATTOSECONDS[unit]
        count, rest = divmod(count * _ATTOSECONDS[its], step)
        exact = not rest
    if not -MOST <= count <= MOST:
        return 0 if count < 0 else len(ordered)
    return int(np.searchsorted(ordered.view(np.int64), count, "left" if exact else "right"))


_ATTOSECONDS: Final = {unit: math.prod(FACTORS[at:]) for at, unit in enumerate(UNITS)}


def count_attoseconds(label: Any) -> Any:
    """Return the exact number of attoseconds of a date since 1970, or of a duration; other labels unmodified."""
    instant = as_instant(label)
    if instant is None:
        return label
    own = canonical_dates(np.array([instant]))
    unit = np.datetime_data(own.dtype)[0]
    if unit == "M":
        raise TypeError(f"{label!r} is a number of months, which have no fixed length to compare")
    return int(own.view(np.int64)[0]) * _ATTOSECONDS[unit]


def measure_dates(dates: DateArray, others: Sequence[Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return dates and other dates as floats: their distance from the first of the dates, in one unit.

    Raises:
        TypeError: If the others are not of the same kind.
    """
    joined = join_instants([*dates[:1], *others]) if all(is_instant_type(type(other)) for other in others) else None
    if joined is None or (len(dates) and joined.dtype.kind != dates.dtype.kind):
        raise TypeError(f"dates can't be compared with the points {list(others)}")
    if not len(dates):
        return np.empty(0), np.empty(len(others))
    finest = dates.dtype if dates.dtype == joined.dtype else find_finest(dates.dtype, joined.dtype)
    measured = []
    for each in (dates, joined[1:]):
        counts, exact = rescale_canonical(each, finest)
        if not exact.all():
            raise ValueError(f"{each[int(exact.argmin())]} is too far away to be measured in {finest}")
        measured.append((counts - joined[0]).astype(np.int64).astype(np.float64))
    return measured[0], measured[1]


def as_nanoseconds(dates: DateArray) -> DateArray:
    """Return dates in nanoseconds, which all versions of pandas and xarray have, or in the finest unit that holds them."""
    for unit in ("ns", "us", "ms", "s"):
        dtype = np.dtype(f"{dates.dtype.kind}8[{unit}]")
        converted, exact = rescale_canonical(dates, dtype)
        if exact.all():
            return converted
    return dates
