"""Space: the ordered labels of one axis."""

from __future__ import annotations

import itertools
import numbers
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, final

import numpy as np

from ._constant import constant
from ._errors import UnknownLabelError

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

    __slots__ = ("__weakref__", "_hash", "_index", "_kind", "_labels", "_name")

    _kind: int
    _labels: Sequence[Hashable]
    _name: str | None
    _hash: int | None
    _index: dict[Hashable, int] | None

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

    # -- what it is ------------------------------------------------------------------------------------------------

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
        return self._labels

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
        """Whether the space has labels of its own.

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
        return len(self._labels)

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
        return _restore, (self._kind, self._labels, self._name)

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

    # -- looking up ------------------------------------------------------------------------------------------------

    def index(self, label: object) -> int:
        """The position of a label.

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
            if position >= 0:
                return position
        else:
            try:
                return self._table()[label]
            except (KeyError, TypeError):
                pass
        raise UnknownLabelError(f"{self!r} has no label {label!r}; its labels are {show_labels(labels)}")

    def locate(self, labels: Sequence[Hashable] | Space) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The positions of many labels at once, -1 where the space does not have one.

        Args:
            labels: Hashable labels.

        Example:
            >>> Space(["a", "b", "c"]).locate(["c", "x", "a"])
            array([ 2, -1,  0])
        """
        wanted = labels._labels if isinstance(labels, Space) else labels
        if not isinstance(self._labels, range):
            found = map(self._table().get, wanted, itertools.repeat(-1))
        else:
            found = map(self._position, wanted)
        return np.fromiter(found, np.int64, len(wanted))

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
        number = label if type(label) is int else _as_integer(label)
        return self._labels.index(number) if number is not None and number in self._labels else -1

    def _table(self) -> dict[Hashable, int]:
        if self._index is None:
            object.__setattr__(self, "_index", dict(zip(self._labels, range(len(self._labels)), strict=True)))
        return self._index  # type: ignore[return-value]

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            labels: Sequence[Hashable] = self._labels[at]
        elif hasattr(at, "__index__") and not getattr(at, "ndim", 0):
            position = operator.index(at)
            try:
                return self._labels[position]
            except IndexError:
                raise IndexError(f"position {position} is out of range for {self!r} of size {len(self)}") from None
        elif isinstance(at, str) or not hasattr(at, "__iter__"):
            raise TypeError(
                f"a Space is indexed by a position, a slice or a list of positions, not by {at!r}; "
                "to look up a label use space.index(label)"
            )
        else:
            labels = [self[operator.index(i)] for i in at]
        if self._kind == _POSITIONAL:
            return _make(_POSITIONAL, range(len(labels)), self._name)
        if self._kind == _BROADCAST:
            return self if len(labels) == 1 else _make(_POSITIONAL, range(len(labels)), self._name)
        return _make_labelled(labels, self._name)

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
        """The labels of both: the left's in order, then the right's new ones."""
        return self._algebra(other, lambda a, b: [*a, *(label for label in b if label not in a)])  # type: ignore[no-any-return]

    def __and__(self, other: Space) -> Space:
        """The common labels, in the left's order."""
        return self._algebra(other, lambda a, b: (label for label in a if label in b))  # type: ignore[no-any-return]

    def __sub__(self, other: Space) -> Space:
        """The labels of the left that the right does not have, in order."""
        return self._algebra(other, lambda a, b: (label for label in a if label not in b))  # type: ignore[no-any-return]

    def rename(self, name: str | None) -> Space:
        """The same labels under another name (or none).

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
        """The space whose labels are ``function(label)``; two labels must not become one.

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


def _make(kind: int, labels: Sequence[Hashable], name: str | None, index: dict[Hashable, int] | None = None) -> Space:
    space = object.__new__(Space)
    for slot, value in (("_kind", kind), ("_labels", labels), ("_name", name), ("_hash", None), ("_index", index)):
        object.__setattr__(space, slot, value)
    return space


def _restore(kind: int, labels: Sequence[Hashable], name: str | None) -> Space:
    return BROADCAST if kind == _BROADCAST and name is None else _make(kind, labels, name)


def check_name(name: object) -> None:
    """Refuse what can't be the name of an axis: names are listed with spaces between them."""
    if name is None:
        return
    if not isinstance(name, str):
        raise TypeError(f"the name of an axis is a string, not {name!r}")
    if not name or any(character.isspace() or character in ",>" for character in name) or name in ("...", "->"):
        raise ValueError(f"{name!r} can't name an axis: a name is not empty and has no white space, comma or '>'")


def _make_labelled(labels: Iterable[Hashable], name: str | None) -> Space:
    """The Space of distinct labels, held as a range where they are one; refuse what can't tell positions apart."""
    if isinstance(labels, range):
        return _make(_LABELLED, labels, name)
    tolist = getattr(labels, "tolist", None)
    if tolist is not None:  # NumPy arrays and tensors: their own scalars would make slow and odd labels
        labels = tolist()
    known = tuple(labels)
    kinds = set(map(type, known))
    if any(kind.__module__ == "numpy" for kind in kinds):
        known = tuple(label.item() if type(label).__module__ == "numpy" else label for label in known)  # type: ignore[attr-defined]
        kinds = set(map(type, known))
    if kinds == {int}:
        found = _as_range(known)  # type: ignore[arg-type]
        if found is not None:
            return _make(_LABELLED, found, name)
    try:
        # Looking a label up takes this table anyway, and it tells whether one occurs twice.
        index = dict(zip(known, range(len(known)), strict=True))
    except TypeError as error:
        raise TypeError(f"labels must be hashable, unlike some of {show_labels(known)}: {error}") from None
    if len(index) != len(known):
        seen: set[Hashable] = set()
        twice = next(label for label in known if label in seen or seen.add(label))  # type: ignore[func-returns-value]
        raise ValueError(f"the labels of a Space are distinct, but {twice!r} occurs more than once")
    if not kinds <= _EQUAL_TO_THEMSELVES and any(map(operator.ne, known, known)):
        wrong = next(label for label in known if label != label)
        raise ValueError(f"{wrong!r} can't be a label: it is not equal to itself")
    return _make(_LABELLED, known, name, index) if known else _make(_LABELLED, range(0), name)


_EQUAL_TO_THEMSELVES: Final = frozenset({str, int, bool, bytes, type(None)})


def _as_range(labels: tuple[int, ...]) -> range | None:
    """Integers at equal steps as a range, so that equal labels have one form, and large axes a small one."""
    step = 1 if len(labels) == 1 else labels[1] - labels[0]
    if not step:
        return None
    candidate = range(labels[0], labels[0] + step * len(labels), step)
    return candidate if all(map(operator.eq, candidate, labels)) else None


def _as_integer(label: object) -> int | None:
    """The integer that a label equals, if it equals one."""
    if not isinstance(label, numbers.Complex):
        return None
    try:
        number = int(label.real)  # type: ignore[call-overload]
    except (OverflowError, ValueError):  # infinity, NaN
        return None
    return number if number == label else None


def freeze(given: Any) -> Any:
    """Labels as an argument of label logic, which must be hashable."""
    if given is None or isinstance(given, (Space, int, range, tuple, str, bytes, set, frozenset)):
        return given  # what has no order or is one word is refused by Space
    tolist = getattr(given, "tolist", None)
    if tolist is not None:  # NumPy arrays and tensors: their own scalars are no labels
        given = tolist()
    return tuple(given) if hasattr(given, "__iter__") else given


def show_labels(labels: Sequence[Hashable], most: int = 8) -> str:
    """Labels for a message: all of a few, or the ends of many."""
    if len(labels) <= most:
        return "[" + ", ".join(map(repr, labels)) + "]"
    head, tail = labels[: most // 2], labels[-2:]
    return "[" + ", ".join([*map(repr, head), "...", *map(repr, tail)]) + "]"


BROADCAST: Final = _make(_BROADCAST, range(1), None)
"""The one axis of size 1 that stretches to any size. ``BROADCAST.rename("y")`` is the same with a name."""
