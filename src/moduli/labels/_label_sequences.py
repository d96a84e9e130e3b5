"""The labels of an axis as one of three sequences: a range, an array of one kind of values, or a tuple of anything.

Equal labels in equal order always have the same canonical form. So Spaces are compared and hashed without a Python loop over
their labels: an axis of a million numbers or dates takes an array, and no dictionary.
"""

from __future__ import annotations

import itertools
import numbers
import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final, final, overload

import numpy as np

from ._instants import (
    as_instant,
    canonical_dates,
    canonical_label,
    is_instant_type,
    join_instants,
    list_instants,
    mixed_label,
    refuse_missing,
    rescale,
)

Array = np.ndarray[Any, np.dtype[Any]]
_INT64: Final = np.iinfo(np.int64)


@final
class ArrayLabels(Sequence[Hashable]):
    """Distinct integers, floats, dates or durations in an array; made by `collect_labels`.

    Entries are given as Python's numbers, and as NumPy's dates in the unit of each alone.
    """

    __slots__ = ("_hash", "_listed", "_sorted", "values")

    def __init__(self, values: Array) -> None:
        values.flags.writeable = False
        self.values: Final = values
        self._hash: int | None = None
        self._sorted: tuple[Array, Array | None] | None = None
        self._listed: tuple[Hashable, ...] | None = None

    @property
    def kind(self) -> str:
        """The kind of the dtype: i, f, M (dates) or m (durations)."""
        return self.values.dtype.kind

    def as_tuple(self) -> tuple[Hashable, ...]:
        """Return all labels as a tuple, which is cached."""
        if self._listed is None:
            self._listed = tuple(list_instants(self.values) if self.kind in "mM" else self.values.tolist())
        return self._listed

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, at: int) -> Hashable: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Hashable]: ...
    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return take_labels(self, at)
        return canonical_label(self.values[at]) if self.kind in "mM" else self.values[at].item()

    def __iter__(self) -> Any:
        return iter(self.as_tuple())

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ArrayLabels):
            return NotImplemented
        return self.values.dtype == other.values.dtype and np.array_equal(self.values, other.values)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.values.dtype.str, self.values.tobytes()))
        return self._hash

    def find(self, label: object) -> int:
        """Return the position of one label, -1 if it is absent."""
        value = self._convert(label)
        if value is None:
            return -1
        return int(self._find_all(np.array([value], self.values.dtype))[0])

    def find_all(self, labels: Array) -> Array:
        """Return the positions of labels of the same kind in an array, -1 for absent ones."""
        if self.kind not in "mM":
            return self._find_all(labels)
        converted, exact = rescale(labels, self.values.dtype)
        return np.where(exact, self._find_all(converted), -1)

    def order(self) -> tuple[Array, Array | None]:
        """Return the values in ascending order, and their positions; None if they are in that order already."""
        if self._sorted is None:
            values = _as_numbers(self.values)
            if len(values) < 2 or bool((values[1:] > values[:-1]).all()):
                self._sorted = self.values, None
            else:
                places = np.argsort(values, kind="stable")
                self._sorted = self.values[places], places
        return self._sorted

    def _find_all(self, wanted: Array) -> Array:
        ordered, places = self.order()
        if not len(ordered):
            return np.full(len(wanted), -1)
        at = np.searchsorted(ordered, wanted).clip(max=len(ordered) - 1)
        present = ordered[at] == wanted
        return np.where(present, at if places is None else places[at], -1)

    def _convert(self, label: object) -> Any:
        """Return the value of the array's dtype that equals a label; None if there is none."""
        if self.kind in "mM":
            instant = as_instant(label)
            if instant is None or instant.dtype.kind != self.kind:
                return None
            converted, exact = rescale(np.array([instant]), self.values.dtype)
            return converted[0] if exact[0] else None
        if self.kind == "i":
            number = as_integer(label)
            return number if number is not None and _INT64.min <= number <= _INT64.max else None
        if isinstance(label, np.timedelta64) or not isinstance(label, numbers.Complex):
            return None
        try:
            value = float(label.real)
        except (OverflowError, ValueError):
            return None
        return value if value == label else None


def take_labels(labels: Sequence[Hashable], at: slice) -> Sequence[Hashable]:
    """Return a slice of labels in canonical form."""
    return _hold(labels.values[at]) if isinstance(labels, ArrayLabels) else labels[at]


def collect_labels(labels: Iterable[Hashable]) -> tuple[Sequence[Hashable], dict[Hashable, int] | None]:
    """Return distinct labels in canonical form, and their positions if a dictionary was needed.

    Raises:
        TypeError: If a label can't be hashed, or is a date with a time zone.
        ValueError: If a label occurs twice, or is not equal to itself.
    """
    if isinstance(labels, range):
        return labels, None
    array = _read_array(labels)
    if array is None:
        tolist = getattr(labels, "tolist", None)
        if tolist is not None:  # NumPy arrays and tensors, whose scalars would be slow labels
            labels = tolist()
        listed = tuple(labels)
        kinds = set(map(type, listed))
        if any(kind.__module__ == "numpy" and not issubclass(kind, _DATES) for kind in kinds):
            listed = tuple(
                label.item() if isinstance(label, np.generic) and not isinstance(label, _DATES) else label
                for label in listed
            )
            kinds = set(map(type, listed))
        array = _as_array(listed, kinds)
        if array is None:
            return _collect_any(listed, kinds)
    if array.dtype.kind in "mM":
        refuse_missing(array)
        array = canonical_dates(array)
    _refuse_repetition(array)
    return _hold(array, canonical=True), None


_DATES: Final = (np.datetime64, np.timedelta64)


def _read_array(labels: object) -> Array | None:
    """Return a copy of an array of numbers or dates, NumPy's or of its interface; None for other values."""
    dtype = getattr(labels, "dtype", None)
    if not isinstance(dtype, np.dtype) or getattr(labels, "ndim", None) != 1:
        return None
    if dtype.kind in "mM":
        return np.array(labels)
    if dtype.kind == "i" or (dtype.kind == "u" and dtype.itemsize < 8):
        return np.array(labels, np.int64)
    # Long doubles are excluded, because Python's float can't represent them.
    return np.array(labels, np.float64) if dtype.kind == "f" and dtype.itemsize <= 8 else None


def _as_array(labels: tuple[Any, ...], kinds: set[type]) -> Array | None:
    """Return labels of one type as an array; None if types differ, or arrays do not have the type."""
    if kinds == {int}:
        try:
            return np.array(labels, np.int64)
        except OverflowError:
            return None
    if kinds == {float}:
        return np.array(labels, np.float64)
    if kinds and all(map(is_instant_type, kinds)):
        return join_instants(labels)
    return None


def _collect_any(labels: tuple[Any, ...], kinds: set[type]) -> tuple[Sequence[Hashable], dict[Hashable, int] | None]:
    inner = set(map(type, itertools.chain.from_iterable(label for label in labels if type(label) is tuple)))
    if tuple in inner or any(map(is_instant_type, kinds | inner)):
        labels = tuple(map(mixed_label, labels))
    try:
        # Look-ups need this table anyway, and its size shows whether a label occurs twice.
        index = dict(zip(labels, range(len(labels)), strict=True))
    except TypeError as error:
        raise TypeError(f"labels must be hashable, unlike some of {show_labels(labels)}: {error}") from None
    if len(index) != len(labels):
        seen: set[Hashable] = set()
        twice = next(label for label in labels if label in seen or seen.add(label))  # type: ignore[func-returns-value]
        raise _describe_repetition(twice)
    if not kinds <= _EQUAL_TO_THEMSELVES and any(map(operator.ne, labels, labels)):
        raise _describe_unequal(next(label for label in labels if label != label))
    return (labels, index) if labels else (range(0), None)


_EQUAL_TO_THEMSELVES: Final = frozenset({str, int, bool, bytes, type(None)})


def _refuse_repetition(values: Array) -> None:
    if len(values) < 2:
        if values.dtype.kind == "f" and np.isnan(values).any():
            raise _describe_unequal(values[0].item())
        return
    counts = _as_numbers(values)
    if bool((counts[1:] > counts[:-1]).all()):
        return
    ordered = np.sort(counts)
    if ordered.dtype.kind == "f" and np.isnan(ordered[-1]):
        raise _describe_unequal(ordered[-1].item())
    twice = ordered[1:][ordered[1:] == ordered[:-1]].view(values.dtype)
    if len(twice):
        raise _describe_repetition(ArrayLabels(twice)[0])


def _as_numbers(values: Array) -> Array:
    """Return dates as their integers, which NumPy sorts several times as fast; there is no NaT among them."""
    return values.view(np.int64) if values.dtype.kind in "mM" else values


def _describe_repetition(label: Hashable) -> ValueError:
    return ValueError(f"the labels of a Space are distinct, but {show_label(label)} occurs more than once")


def _describe_unequal(label: Hashable) -> ValueError:
    return ValueError(f"{label!r} can't be a label: it is not equal to itself")


def _hold(values: Array, canonical: bool = False) -> range | ArrayLabels:
    """Return distinct values in canonical form: integers with equal steps as a range, which takes constant memory."""
    if not len(values):
        return range(0)
    if values.dtype.kind == "f":
        values = values + 0.0  # turns -0.0 into 0.0, which is equal
    elif values.dtype.kind in "mM":
        values = values if canonical else canonical_dates(values)
    else:
        first, step = int(values[0]), 1 if len(values) == 1 else int(values[1]) - int(values[0])
        last = first + step * (len(values) - 1)
        if int(values[-1]) == last and bool((values[1:] - values[:-1] == step).all()):
            return range(first, last + step, step)
    return ArrayLabels(np.ascontiguousarray(values))


def locate_alike(known: range | ArrayLabels, wanted: range | ArrayLabels) -> Array | None:
    """Return the positions of labels of the same kind; None if kinds differ, so that labels are compared one by one."""
    if isinstance(wanted, range):
        if not _fits_int64(wanted):
            return None
        wanted = ArrayLabels(np.arange(wanted.start, wanted.stop, wanted.step, dtype=np.int64))
    if isinstance(known, range):
        return _find_in_range(known, wanted.values) if wanted.kind == "i" else None
    return known.find_all(wanted.values) if known.kind == wanted.kind else None


def _find_in_range(known: range, labels: Array) -> Array | None:
    """Return the positions of integers in a range, -1 for absent ones; None for a range beyond 64 bits."""
    if not _fits_int64(known):
        return None
    if not len(known):
        return np.full(len(labels), -1)
    low, high = min(known[0], known[-1]), max(known[0], known[-1])
    inside = (labels >= low) & (labels <= high)
    offset = np.where(inside, labels, known.start) - known.start
    return np.where(inside & (offset % known.step == 0), offset // known.step, -1)


def _fits_int64(labels: range) -> bool:
    # Half of the range, so that differences do not overflow.
    return all(abs(end) < 2**62 for end in (labels.start, labels.stop))


def as_integer(label: object) -> int | None:
    """Return the integer that equals a label, or None; durations have none, though NumPy compares them with integers."""
    if isinstance(label, np.timedelta64) or not isinstance(label, numbers.Complex):
        return None
    try:
        number = int(label.real)  # type: ignore[call-overload]
    except (OverflowError, ValueError):  # infinity, NaN
        return None
    return number if number == label else None


def show_labels(labels: Sequence[Hashable], most: int = 8) -> str:
    """Return labels for a message: all of a few, or the ends of many."""
    if len(labels) <= most:
        return "[" + ", ".join(map(show_label, labels)) + "]"
    head, tail = labels[: most // 2], labels[-2:]
    return "[" + ", ".join([*map(show_label, head), "...", *map(show_label, tail)]) + "]"


def show_label(label: Hashable) -> str:
    """Return one label for a message: a date or duration as text, other labels as `repr`."""
    return str(label) if isinstance(label, _DATES) else repr(label)
