"""Axes: the names and labels of all axes of a tensor, interned, and the label logic that is remembered on them.

Two tensors whose axes agree share *one* `Axes` object, so that "are the labels equal?" is an identity check, and what was
once worked out (which permutation aligns these two, what is left after dropping an axis) hangs on the object and is a
look-up the second time. Sizes of positional axes are deliberately not part of it: a batch of 31 and a batch of 32 have the
same axes, which keeps compiled code from being compiled again for every batch size.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, final

from ._constant import constant
from ._coords import AxisCoordinates
from ._errors import UnknownLabelError
from ._space import Space, check_name

P = ParamSpec("P")
R = TypeVar("R")

DimLike = int | str
"""One axis: its name, or its position (negative from the end)."""

DimsLike = int | str | Sequence[int | str] | None
"""Several axes: a name, names in one string (``"y x"``), positions, or a sequence of both; None for all."""

Pair = tuple[str | None, Space | None]
"""The name of one axis, and its Space, None where it is positional."""

_MOST_PLANS: Final = 512


@constant()
class Axes:
    """The name and the labels of every axis. Made by `intern`; compare with ``is``."""

    __slots__ = ("__weakref__", "_plans", "firm", "named", "names", "ndim", "rest", "spaces", "told")

    names: tuple[str | None, ...]
    """The name of each axis."""
    spaces: tuple[Space | None, ...]
    """The Space of each axis, None where it is positional (its size is the data's business)."""
    ndim: int
    named: bool
    """Whether every axis has a name."""
    firm: bool
    """Whether the sizes of all axes follow from the labels: then equal axes are equal sizes."""
    rest: Axes | None
    """All axes but the first."""
    told: AxisCoordinates | None
    """Further coordinates, and what another library said of the tensor beside its axes. None mostly.

    Not called "meta", which compilers take for the notes of a node on anything that has it.
    """
    _plans: dict[Hashable, Any]

    def run(self, *call: *tuple[Callable[..., R], *tuple[Any, ...]]) -> R:
        """``function(self, *args)``, remembered. A function and its arguments come as one tuple, which is the key."""
        plans = self._plans
        try:
            return plans[call]  # type: ignore[no-any-return]
        except KeyError:
            pass
        except TypeError:  # a label that can't be hashed: the function knows how to say so
            return call[0](self, *call[1:])
        value = call[0](self, *call[1:])
        if len(plans) >= _MOST_PLANS:  # ever new labels (one space per batch, say) must not grow without bound
            plans.clear()
        plans[call] = value
        return value

    def run_pair(self, function: Callable[[Axes, Axes], R], other: Axes) -> R:
        """``function(self, other)``, remembered under the other alone: quickest, for the one function of arithmetic."""
        found: R | None = self._plans.get(other)
        if found is None:
            found = self._plans[other] = self.run(function, other)  # which makes room
        return found

    def drop_marks(self) -> Axes:
        """The axes alone, without what else was told of the tensor."""
        return self if self.told is None else intern(self.names, self.spaces)

    # One object for equal axes, so identity is equality; said here because the compiler asks for it.
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Callable[..., Axes], tuple[Any, ...]]:
        return intern, (self.names, self.spaces, self.told)

    def __repr__(self) -> str:
        return f"Axes({', '.join(self.describe(i) for i in range(self.ndim))})"

    def describe(self, axis: int) -> str:
        """One axis in words, for messages: its name, or its position if it has none."""
        name = self.names[axis]
        return f"axis {axis}" if name is None else f"axis {name!r}"

    def stretches(self, at: int) -> bool:
        """Whether an axis is BROADCAST."""
        space = self.spaces[at]
        return space is not None and space.broadcast

    def refuse_broadcast(self, which: Iterable[int], what: str, why: str) -> None:
        """Refuse axes that stretch where rows, columns or entries are needed."""
        for at in which:
            if self.stretches(at):
                raise ValueError(f"{what}{self.describe(at)} is BROADCAST{why}")

    # -- finding axes ----------------------------------------------------------------------------------------------

    def axis(self, dim: DimLike) -> int:
        """The position of one axis given by name or position."""
        if isinstance(dim, str):
            try:
                return self.names.index(dim)
            except ValueError:
                further = self.told is not None and dim in self.told.entries
                hint = "; it is a further coordinate: group by it, or make a mask of t.coordinate" if further else ""
                raise UnknownLabelError(f"there is no axis named {dim!r}; {self.listing()}{hint}") from None
        if isinstance(dim, bool):
            raise TypeError(f"an axis is given by name or position, not by {dim!r}")
        at = operator.index(dim)
        if not -self.ndim <= at < self.ndim:
            raise IndexError(f"there is no axis {at} in a tensor of {self.ndim} axes; {self.listing()}")
        return at % self.ndim

    def axes(self, dims: DimsLike) -> tuple[int, ...]:
        """The positions of several axes, each once, in the order given; all of them for None."""
        if dims is None:
            return tuple(range(self.ndim))
        if isinstance(dims, str):
            found = [self.axis(name) for name in split_names(dims)] if dims not in self.names else [self.axis(dims)]
        elif isinstance(dims, Sequence):
            found = [self.axis(dim) for dim in dims]
        else:
            found = [self.axis(dims)]
        if len(set(found)) != len(found):
            raise ValueError(f"an axis is given twice in {dims!r}; {self.listing()}")
        return tuple(found)

    def listing(self) -> str:
        """The axes in words, for messages."""
        if not self.ndim:
            return "the tensor has no axes"
        return "the axes are " + ", ".join(
            repr(n) if n is not None else f"{i} (unnamed)" for i, n in enumerate(self.names)
        )

    # -- making others ---------------------------------------------------------------------------------------------

    def pairs(self) -> list[Pair]:
        """(name, space) of each axis, to be edited and given to `intern_pairs`."""
        return list(zip(self.names, self.spaces, strict=True))

    def take(self, order: Iterable[int]) -> Axes:
        """The axes at these positions, in this order."""
        order = tuple(order)
        return self.carry(intern_pairs((self.names[at], self.spaces[at]) for at in order))

    def drop(self, *gone: int) -> Axes:
        """The axes without those at some positions."""
        return self.take(at for at in range(self.ndim) if at not in gone)

    def put_labels(self, at: int, space: Space | None) -> Axes:
        """The axes with other entries on one of them: values along it go, what is known of its labels stays."""
        name, pairs = self.names[at], self.pairs()
        pairs[at] = (name, space)
        made = intern_pairs(pairs)
        return made if self.told is None else made.mark(self.told.keep(made.names, [name]))

    def put(self, at: int, *new: Pair) -> Axes:
        """The axes with others in place of one of them."""
        pairs = self.pairs()
        pairs[at : at + 1] = new
        made = intern_pairs(pairs)
        return made if self.told is None else made.mark(self.told.keep({*self.names[:at], *self.names[at + 1 :]}))

    def insert(self, dim: int, new: Pair) -> tuple[int, Axes]:
        """The axes with a new one among them, and its position."""
        if not -self.ndim - 1 <= dim <= self.ndim:
            raise IndexError(f"there is no place {dim} for a new axis among {self.ndim}; {self.listing()}")
        at, pairs = dim % (self.ndim + 1), self.pairs()
        pairs.insert(at, new)
        return at, self.carry(intern_pairs(pairs))

    # -- further coordinates ---------------------------------------------------------------------------------------

    def carry(self, made: Axes, picks: Mapping[str, slice | Sequence[int]] | None = None) -> Axes:
        """Other axes made of these, with the further coordinates that still hold.

        Args:
            made: The other axes. Those of the same name have the same entries, or those that were picked.
            picks: The entries that were picked, by the name of their axis.
        """
        told = self.told
        # A result without axes is a number: function transforms take no other, and it has no place for more.
        if told is None or not made.ndim or (not picks and (made.names, made.spaces) == (self.names, self.spaces)):
            return made.mark(told if made.ndim else None)
        picked = told.pick(picks) if picks else told
        return made.mark(None if picked is None else picked.keep(made.names))

    def mark(self, told: AxisCoordinates | None) -> Axes:
        """The same axes with other further coordinates."""
        return self if told is self.told else intern(self.names, self.spaces, told)

    def find_coordinate(self, name: str) -> tuple[int, Sequence[Hashable]] | None:
        """The axis and the values of a further coordinate along one axis; None if there is none of this name."""
        coordinate = None if self.told is None else self.told.find(name)
        return None if coordinate is None else (self.names.index(coordinate[0]), coordinate[1])

    def coordinate_names(self) -> list[str]:
        """The names of the further coordinates along one axis."""
        return [] if self.told is None else [name for name in self.told.entries if self.told.find(name) is not None]

    def dims(self, shape: Sequence[int]) -> tuple[Space, ...]:
        """The Spaces, now that the sizes are known."""
        return tuple(
            space if space is not None else Space(size, name)
            for name, space, size in zip(self.names, self.spaces, shape, strict=True)
        )


_table: weakref.WeakValueDictionary[Hashable, Axes] = weakref.WeakValueDictionary()
_lock: Final = threading.RLock()  # a garbage collection inside may come back here


def intern(names: Sequence[str | None], spaces: Sequence[Space | None], told: AxisCoordinates | None = None) -> Axes:
    """The one Axes object with these names and spaces, and with what else is known of the tensor.

    Raises:
        ValueError: If two axes have the same name.
    """
    names = tuple(names)
    spaces = tuple(
        space if space is None or space.name == name else space.rename(name)
        for name, space in zip(names, spaces, strict=True)
    )
    key = (names, spaces, told)
    found = _table.get(key)
    if found is not None:
        return found
    for name in names:
        check_name(name)
    given = [name for name in names if name is not None]
    if len(set(given)) != len(given):
        twice = next(name for name in given if given.count(name) > 1)
        raise ValueError(
            f"two axes would both be named {twice!r} (the names would be {list(names)}); "
            f"rename one of them first, for example t.rename({twice}={twice + '2'!r})"
        )
    axes = Axes.__new__(Axes)
    axes.names, axes.spaces, axes.ndim, axes._plans = names, spaces, len(names), {}
    axes.named, axes.firm, axes.told = None not in names, None not in spaces, told
    axes.rest = intern(names[1:], spaces[1:]) if names else None
    with _lock:  # threads that make the same axes at once must end up with one object
        return _table.setdefault(key, axes)


def intern_pairs(pairs: Iterable[Pair]) -> Axes:
    """`intern` for a list of (name, space)."""
    pairs = list(pairs)
    return intern([name for name, _ in pairs], [space for _, space in pairs])


def axes_of(dims: Iterable[Space]) -> Axes:
    """The Axes of a tuple of Spaces."""
    dims = tuple(dims)
    for axis, space in enumerate(dims):
        if not isinstance(space, Space):
            raise TypeError(f"dims are Spaces, one per axis, but number {axis} is {space!r}; write Space({space!r})")
    return intern_pairs(map(as_pair, dims))


def as_pair(space: Space) -> Pair:
    """The name of an axis, and its Space unless that has positions only."""
    return space.name, None if space.positional else space


def make_unnamed(ndim: int) -> Axes:
    """The Axes of a plain tensor: positional, without names."""
    return _unnamed[ndim]


# All that torch can have, made at once: compiled code and threads only look.
_unnamed: Final = [intern((None,) * ndim, (None,) * ndim) for ndim in range(65)]
SCALAR: Final = make_unnamed(0)


def as_key(dims: DimsLike) -> DimsLike:
    """Axes as an argument of label logic, which must be hashable."""
    return tuple(dims) if type(dims) is list else dims


def split_names(names: str) -> list[str]:
    """The names in one string, separated by spaces or commas."""
    found = names.replace(",", " ").split()
    for name in found:
        check_name(name)
    return found


def cache_by_axes(function: Callable[Concatenate[Axes, P], R]) -> Callable[Concatenate[Axes, P], R]:
    """Mark label logic: remembered per Axes, and run at trace time under `torch.compile`.

    The function takes an Axes and hashable arguments, never tensors, and returns what depends on them alone. Where every
    tenth of a microsecond counts, ``axes.run(function, ...)`` does the same with one call less.
    """

    @functools.wraps(function)
    def look_up(axes: Axes, *args: Any) -> Any:
        return axes.run(function, *args)

    return look_up  # type: ignore[return-value]


@final
class UnfitAxes(Axes):
    """The axes of a tensor whose data no longer has them: made when a transform changed the rank behind our back."""

    __slots__ = ("meant",)

    meant: Axes

    @classmethod
    def of(cls, meant: Axes) -> UnfitAxes:
        """Axes that refuse every use and remember what they were."""
        axes = cls.__new__(cls)
        axes.meant = meant
        return axes

    def __getattr__(self, attribute: str) -> Any:
        # The slots of Axes are left empty, so every use of names, spaces or plans ends here.
        if attribute in Axes.__slots__:
            raise ValueError(
                f"this tensor's data no longer fits its axes: {self.meant.listing()}, but a function transform changed "
                "the shape. Use mo.vmap(fn, over=name) to map over an axis and keep the labels, or take .data and "
                "label it again with mo.tensor"
            )
        raise AttributeError(attribute)

    def __reduce__(self) -> tuple[Callable[..., Axes], tuple[Any, ...]]:
        return UnfitAxes.of, (self.meant,)

    def __repr__(self) -> str:
        return f"UnfitAxes({self.meant!r})"
