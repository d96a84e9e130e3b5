"""Space: the ordered labels of one axis. Above 400 lines, because the methods of one class carry their examples."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, final

import numpy as np

from .._html import write_frame, write_html_table
from .._texts import shorten
from ._constant import constant
from ._errors import UnknownLabelError
from ._instants import is_instant_type, mixed_label
from ._label_sequences import (
    ArrayLabels,
    as_integer,
    collect_labels,
    locate_alike,
    show_label,
    show_labels,
    take_labels,
)

_POSITIONAL: Final = 0
_LABELLED: Final = 1
_BROADCAST: Final = 2


@final
@constant("__len__", "__getitem__", "__iter__", "__contains__", "__or__", "__and__", "__sub__")
class Space:
    """The ordered, distinct labels of one axis, with an optional name.

    ``Space(3)`` is *positional*: it has a size and nothing else, pairs with any axis of that size, and its slices
    renumber. ``Space(["red", "green", "blue"])`` is *labelled*: it pairs label by label. ``Space(range(3))`` is labelled
    too, by the numbers 0, 1 and 2. Spaces are immutable, hashable, and cheap: a million positions cost nothing.

    Args:
        labels: A size, an iterable of distinct hashable labels, or another Space to copy.
        name: The name of the axis: a non-empty string without white space.

    Raises:
        TypeError: If a label can't be hashed, or the argument is neither a size nor labels.
        ValueError: If a size is negative, a label occurs twice, or the name is not usable.

    Example:
        >>> channel = Space(["red", "green", "blue"], name="channel")
        >>> len(channel), channel[1], channel.index("blue"), "pink" in channel
        (3, 'green', 2, False)
        >>> channel[1:]
        Space(['green', 'blue'], name='channel')
        >>> Space(3) == Space(range(3)), Space(5)[2:] == Space(3)
        (False, True)
    """

    __slots__ = ("__weakref__", "_hash", "_index", "_kind", "_labels", "_name", "_size")

    _kind: int
    _labels: Sequence[Hashable]
    _name: str | None
    _hash: int | None
    _index: dict[Hashable, int] | None
    _size: int

    def __new__(cls, labels: int | Iterable[Hashable] | Space, name: str | None = None) -> Space:
        if isinstance(labels, Space):
            return labels if name is None else labels.rename(name)
        if isinstance(labels, (bool, str, bytes)):
            raise TypeError(
                f"a Space is made from a size or from an iterable of labels, not from {labels!r}"
                + ("" if isinstance(labels, bool) else f"; for one label per character write Space(list({labels!r}))")
            )
        if isinstance(labels, (set, frozenset)):
            raise TypeError("a set has no order, so it can't say which label stands where; write Space(sorted(labels))")
        check_name(name)
        if not hasattr(labels, "__iter__") or getattr(labels, "ndim", None) == 0:
            if is_instant_type(type(labels)):
                raise TypeError(f"a Space is made from a size or from an iterable of labels, not from {labels!r} alone")
            try:
                size = operator.index(labels)  # type: ignore[arg-type]
            except TypeError:
                raise TypeError(
                    f"a Space is made from a size or from an iterable of labels, not from a {type(labels).__name__}"
                ) from None
            if size < 0:
                raise ValueError(f"the size of a Space can't be negative, got {size}")
            return _make(_POSITIONAL, range(size), name)
        return _make_labelled(labels, name)  # type: ignore[arg-type]

    # -- properties ------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str | None:
        """The name of the axis, or None.

        Example:
            >>> Space(4, name="batch").name
            'batch'
        """
        return self._name

    @property
    def size(self) -> int:
        """The number of labels, the same as ``len(space)``.

        Example:
            >>> Space(4).size
            4
        """
        return len(self._labels)

    @property
    def labels(self) -> Sequence[Hashable]:
        """The labels in order, as a tuple or a range; the positions if the space is positional.

        Example:
            >>> Space(["a", "b"]).labels, Space(2).labels
            (('a', 'b'), range(0, 2))
        """
        labels = self._labels
        return labels.as_tuple() if isinstance(labels, ArrayLabels) else labels

    @property
    def positional(self) -> bool:
        """Whether the space has only a size: ``Space(n)``, and not ``BROADCAST``.

        Example:
            >>> Space(2).positional, Space(range(2)).positional
            (True, False)
        """
        return self._kind == _POSITIONAL

    @property
    def labelled(self) -> bool:
        """Whether the space has labels.

        Example:
            >>> Space(2).labelled, Space(range(2)).labelled
            (False, True)
        """
        return self._kind == _LABELLED

    @property
    def broadcast(self) -> bool:
        """Whether this is ``BROADCAST``, with or without a name.

        Example:
            >>> BROADCAST.broadcast, Space(1).broadcast
            (True, False)
        """
        return self._kind == _BROADCAST

    def __len__(self) -> int:
        return self._size  # a compiler can read it, unlike an array

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._labels)

    def __contains__(self, label: object) -> bool:
        try:
            self.index(label)
        except UnknownLabelError:
            return False
        return True

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Space):
            return NotImplemented
        return (
            self._kind == other._kind
            and self._name == other._name
            and hash(self) == hash(other)
            and self._labels == other._labels
        )

    def __hash__(self) -> int:
        if self._hash is None:
            object.__setattr__(self, "_hash", hash((self._kind, self._name, self._labels)))
        return self._hash  # type: ignore[return-value]

    def __setattr__(self, attribute: str, value: object) -> None:
        raise AttributeError(f"a Space is immutable: make another one instead of setting {attribute!r}")

    def __copy__(self) -> Space:
        return self

    def __deepcopy__(self, memo: object) -> Space:
        return self

    def __reduce__(self) -> tuple[Callable[..., Space], tuple[Any, ...]]:
        if isinstance(self._labels, ArrayLabels) and self._labels.kind in "mM":
            values = self._labels.values
            return _restore_dates, (values.dtype.str, tuple(values.view(np.int64).tolist()), self._name)
        return _restore, (self._kind, self.labels, self._name)

    def __repr__(self) -> str:
        if self._kind == _BROADCAST:
            return "BROADCAST" if self._name is None else f"BROADCAST.rename({self._name!r})"
        if self._kind == _POSITIONAL:
            what = str(len(self))
        elif isinstance(self._labels, range):
            what = repr(self._labels)
        else:
            what = show_labels(self._labels)
        return f"Space({what})" if self._name is None else f"Space({what}, name={self._name!r})"

    def _repr_html_(self) -> str:
        if self._kind in (_BROADCAST, _POSITIONAL):
            return write_frame(repr(self))
        first = [shorten(label, 40) for label in itertools.islice(self._labels, 12)]
        more = ["..."] if len(self) > len(first) else []
        title = f"Space {'' if self._name is None else self._name}: {len(self)} labels"
        return write_frame(title, write_html_table([*first, *more], []))

    # -- looking up ------------------------------------------------------------------------------------------------

    def index(self, label: object) -> int:
        """Return the position of a label.

        Args:
            label: One of the labels.

        Raises:
            UnknownLabelError: If the space does not have it (a KeyError, IndexError and ValueError at once).

        Example:
            >>> Space(["a", "b", "c"]).index("c")
            2
        """
        labels = self._labels
        if isinstance(labels, range):
            # range.index searches for a non-integer one by one; a dictionary would undo its laziness.
            position = self._position(label)
        elif isinstance(labels, ArrayLabels):
            position = labels.find(label)
        else:
            position = self._look_up(label)
        if position >= 0:
            return position
        raise UnknownLabelError(f"{self!r} has no label {show_label(label)}; its labels are {show_labels(labels)}")

    def locate(self, labels: Sequence[Hashable] | Space) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the positions of many labels at once, -1 for absent ones.

        Args:
            labels: Hashable labels.

        Example:
            >>> Space(["a", "b", "c"]).locate(["c", "x", "a"])
            array([ 2, -1,  0])
        """
        wanted = labels._labels if isinstance(labels, Space) else labels
        own = self._labels
        if isinstance(wanted, (ArrayLabels, range)) and isinstance(own, (ArrayLabels, range)):
            located = locate_alike(own, wanted)
            if located is not None:
                return located
        if isinstance(own, range):
            positions = map(self._position, wanted)
        elif isinstance(own, ArrayLabels) and (own.kind in "mM" or getattr(wanted, "kind", None) == "m"):
            positions = map(own.find, wanted)
        elif isinstance(own, tuple) and not (isinstance(labels, Space) and isinstance(wanted, tuple)):
            positions = map(self._look_up, wanted)
        else:  # labels in canonical form
            positions = map(self._table().get, wanted, itertools.repeat(-1))
        return np.fromiter(positions, np.int64, len(wanted))

    def has_labels_of(self, other: Space) -> bool:
        """Whether both have the same labels, in any order.

        Args:
            other: Another Space.

        Example:
            >>> Space(["a", "b"]).has_labels_of(Space(["b", "a"]))
            True
        """
        if self._labels == other._labels:
            return True
        return len(self) == len(other) and bool((self.locate(other) >= 0).all())

    def _position(self, label: object) -> int:
        number = label if type(label) is int else as_integer(label)
        return self._labels.index(number) if number is not None and number in self._labels else -1

    def _look_up(self, label: Any) -> int:
        canonical = mixed_label(label)
        if isinstance(canonical, np.timedelta64) and np.datetime_data(canonical.dtype)[0] in "YM":
            # NumPy compares durations of months with integers, so they are compared with their like.
            alike = (at for at, own in enumerate(self._labels) if isinstance(own, np.timedelta64) and own == canonical)
            return next(alike, -1)
        try:
            position = self._table().get(canonical, -1)
        except TypeError:  # it can't be hashed, so it is no label
            return -1
        is_like = isinstance(canonical, np.timedelta64) is isinstance(self._labels[position], np.timedelta64)
        return position if is_like else -1

    def _table(self) -> dict[Hashable, int]:
        if self._index is None:
            object.__setattr__(self, "_index", dict(zip(self._labels, range(len(self._labels)), strict=True)))
        return self._index  # type: ignore[return-value]

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            labels: Sequence[Hashable] = take_labels(self._labels, at)
            if self._kind == _LABELLED and not isinstance(labels, tuple):  # distinct, as all of them are
                return _make(_LABELLED, labels, self._name)
        elif hasattr(at, "__index__") and not getattr(at, "ndim", 0):
            return self._label_at(operator.index(at))
        elif isinstance(at, str) or not hasattr(at, "__iter__"):
            raise TypeError(
                f"a Space is indexed by a position, a slice or a list of positions, not by {at!r}; "
                "to look up a label use space.index(label)"
            )
        elif isinstance(self._labels, ArrayLabels) and isinstance(at, (list, np.ndarray)) and len(at) > 64:
            # Faster than the loop below, which takes a microsecond for each label.
            return _make_labelled(self._labels.values[np.array(at, np.int64)], self._name)
        else:
            labels = [self[operator.index(i)] for i in at]
        if self._kind == _POSITIONAL:
            return _make(_POSITIONAL, range(len(labels)), self._name)
        if self._kind == _BROADCAST:
            return self if len(labels) == 1 else _make(_POSITIONAL, range(len(labels)), self._name)
        return _make_labelled(labels, self._name)

    def _label_at(self, position: int) -> Hashable:
        try:
            return self._labels[position]
        except IndexError:
            raise IndexError(f"position {position} is out of range for {self!r} of size {len(self)}") from None

    # -- algebra ---------------------------------------------------------------------------------------------------

    def _algebra(self, other: object, choose: Callable[[Space, Space], Iterable[Hashable]]) -> Any:
        if not isinstance(other, Space):
            return NotImplemented
        if self._name is not None and other._name is not None and self._name != other._name:
            raise ValueError(f"can't combine {self!r} with {other!r}: the names differ; rename one of them")
        name = self._name if self._name is not None else other._name
        if self._kind == _BROADCAST or other._kind == _BROADCAST:
            raise ValueError("BROADCAST has no labels to combine")
        labels = list(choose(self, other))
        if self._kind == other._kind == _POSITIONAL and labels == list(range(len(labels))):
            return _make(_POSITIONAL, range(len(labels)), name)
        return _make_labelled(labels, name)

    def __or__(self, other: Space) -> Space:
        """Return the labels of both: the left's in order, then the right's new ones."""
        return self._algebra(other, lambda a, b: [*a, *_pick(b, a.locate(b) < 0)])  # type: ignore[no-any-return]

    def __and__(self, other: Space) -> Space:
        """Return the common labels, in the left's order."""
        return self._algebra(other, lambda a, b: _pick(a, b.locate(a) >= 0))  # type: ignore[no-any-return]

    def __sub__(self, other: Space) -> Space:
        """Return the labels of the left that the right does not have, in order."""
        return self._algebra(other, lambda a, b: _pick(a, b.locate(a) < 0))  # type: ignore[no-any-return]

    def rename(self, name: str | None) -> Space:
        """Return the same labels under another name (or none).

        Args:
            name: The new name of the axis, or None to have no name.

        Example:
            >>> Space(3, name="row").rename("column")
            Space(3, name='column')
        """
        if name == self._name:
            return self
        check_name(name)
        if self._kind == _BROADCAST and name is None:
            return BROADCAST
        return _make(self._kind, self._labels, name, self._index)

    def map(self, function: Callable[[Any], Hashable]) -> Space:
        """Return the space with the labels ``function(label)``, which have to be distinct.

        Args:
            function: Called with each label, returns the new one.

        Raises:
            ValueError: If two labels are mapped to the same one.

        Example:
            >>> Space(["a", "b"]).map(str.upper)
            Space(['A', 'B'])
        """
        if self._kind == _BROADCAST:
            raise ValueError("BROADCAST has no labels to map")
        return _make_labelled([function(label) for label in self._labels], self._name)


_SLOTS: Final = ("_kind", "_labels", "_name", "_hash", "_index", "_size")


def _make(kind: int, labels: Sequence[Hashable], name: str | None, index: dict[Hashable, int] | None = None) -> Space:
    space = object.__new__(Space)
    for slot, value in zip(_SLOTS, (kind, labels, name, None, index, len(labels)), strict=True):
        object.__setattr__(space, slot, value)
    return space


def _pick(space: Space, chosen: np.ndarray[Any, np.dtype[np.bool_]]) -> list[Hashable]:
    return list(itertools.compress(space.labels, chosen.tolist()))


def _restore(kind: int, labels: Sequence[Hashable], name: str | None) -> Space:
    if kind == _LABELLED:
        return _make_labelled(labels, name)
    return BROADCAST if kind == _BROADCAST and name is None else _make(kind, labels, name)


def _restore_dates(dtype: str, counts: Sequence[int], name: str | None) -> Space:
    return _make_labelled(np.array(counts, np.int64).view(np.dtype(dtype)), name)


def check_name(name: object) -> None:
    """Raise if a value can't be the name of an axis: names are listed with spaces between them."""
    if name is None:
        return
    if not isinstance(name, str):
        raise TypeError(f"the name of an axis is a string, not {name!r}")
    if not name or any(character.isspace() or character in ",>" for character in name) or name in ("...", "->"):
        raise ValueError(f"{name!r} can't name an axis: a name is not empty and has no white space, comma or '>'")


def _make_labelled(labels: Iterable[Hashable], name: str | None) -> Space:
    """Return the Space of distinct labels; raise if they are not distinct."""
    collected, index = collect_labels(labels)
    return _make(_LABELLED, collected, name, index)


def freeze(given: Any) -> Any:
    """Return labels as a hashable argument of a cached function."""
    if given is None or isinstance(given, (Space, int, range, str, bytes, set, frozenset)):
        return given  # `Space` raises for sets, strings and bytes
    if is_instant_type(type(given)):
        return given  # likewise
    if isinstance(given, (tuple, list)) and any(map(is_instant_type, set(map(type, given)))):
        return Space(given)  # a tuple of durations could be equal to one of integers
    if getattr(given, "ndim", 0) == 1 and isinstance(getattr(given, "dtype", None), np.dtype):
        return Space(given)  # `tolist` would convert an array of dates to integers
    tolist = getattr(given, "tolist", None)
    labels = given if tolist is None else tolist()  # scalars of NumPy arrays and tensors are no labels
    return tuple(labels) if hasattr(labels, "__iter__") else labels


BROADCAST: Final = _make(_BROADCAST, range(1), None)
"""The one axis of size 1 that stretches to any size. ``BROADCAST.rename("y")`` is the same with a name."""
