"""Axes: the names and labels of all axes of a tensor, interned, and the label logic that is cached on them.

Tensors with equal axes share *one* `Axes` object, so that comparing labels is an identity check, and results that depend on
axes alone (the permutation that aligns two tensors, the axes after dropping one) are cached on the object. Sizes of positional
axes are not part of it: a batch of 31 and a batch of 32 have the same axes, so that compiled code is not compiled again for
every batch size.
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

    __slots__ = ("__weakref__", "_plans", "coordinates", "firm", "named", "names", "ndim", "rest", "spaces")

    names: tuple[str | None, ...]
    """The name of each axis."""
    spaces: tuple[Space | None, ...]
    """The Space of each axis, None where it is positional (its size is that of the data)."""
    ndim: int
    named: bool
    """Whether every axis has a name."""
    firm: bool
    """Whether the sizes of all axes follow from the labels, so that equal axes have equal sizes."""
    rest: Axes | None
    """All axes but the first."""
    coordinates: AxisCoordinates | None
    """Further coordinates, and the name and attributes that another library gave the tensor; mostly None."""
    _plans: dict[Hashable, Any]

    def run(self, *call: *tuple[Callable[..., R], *tuple[Any, ...]]) -> R:
        """Return ``function(self, *args)``, cached. A function and its arguments come as one tuple, which is the key."""
        plans = self._plans
        try:
            return plans[call]  # type: ignore[no-any-return]
        except KeyError:
            pass
        except TypeError:  # a label that can't be hashed, of which the function raises
            return call[0](self, *call[1:])
        value = call[0](self, *call[1:])
        if len(plans) >= _MOST_PLANS:  # bounds the cache for labels that are always new, such as one space per batch
            plans.clear()
        plans[call] = value
        return value

    def run_pair(self, function: Callable[[Axes, Axes], R], other: Axes) -> R:
        """Return ``function(self, other)``, cached by the other alone, which is the fastest look-up, for arithmetic."""
        plan: R | None = self._plans.get(other)
        if plan is None:
            plan = self._plans[other] = self.run(function, other)  # which bounds the cache
        return plan

    def drop_marks(self) -> Axes:
        """Return the same axes without further coordinates."""
        return self if self.coordinates is None else intern(self.names, self.spaces)

    # Equal axes are one object, so equality is identity; defined because the compiler requires it.
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Callable[..., Axes], tuple[Any, ...]]:
        return intern, (self.names, self.spaces, self.coordinates)

    def __repr__(self) -> str:
        return f"Axes({', '.join(self.describe(i) for i in range(self.ndim))})"

    def describe(self, axis: int) -> str:
        """Return the name of an axis, or its position if it has none, for messages."""
        name = self.names[axis]
        return f"axis {axis}" if name is None else f"axis {name!r}"

    def stretches(self, at: int) -> bool:
        """Whether an axis is BROADCAST."""
        space = self.spaces[at]
        return space is not None and space.broadcast

    def refuse_broadcast(self, which: Iterable[int], what: str, why: str) -> None:
        """Raise ValueError for BROADCAST axes where rows, columns or entries are needed.

        Args:
            which: The positions of the axes.
            what: The start of the message.
            why: Its end.
        """
        for at in which:
            if self.stretches(at):
                raise ValueError(f"{what}{self.describe(at)} is BROADCAST{why}")

    # -- finding axes ----------------------------------------------------------------------------------------------

    def axis(self, dim: DimLike) -> int:
        """Return the position of one axis given by name or position."""
        if isinstance(dim, str):
            try:
                return self.names.index(dim)
            except ValueError:
                further = self.coordinates is not None and dim in self.coordinates.entries
                hint = "; it is a further coordinate: group by it, or make a mask of t.coordinate" if further else ""
                raise UnknownLabelError(f"there is no axis named {dim!r}; {self.listing()}{hint}") from None
        if isinstance(dim, bool):
            raise TypeError(f"an axis is given by name or position, not by {dim!r}")
        at = operator.index(dim)
        if not -self.ndim <= at < self.ndim:
            raise IndexError(f"there is no axis {at} in a tensor of {self.ndim} axes; {self.listing()}")
        return at % self.ndim

    def axes(self, dims: DimsLike) -> tuple[int, ...]:
        """Return the positions of several axes, each once, in the given order; all of them for None."""
        if dims is None:
            return tuple(range(self.ndim))
        if isinstance(dims, str):
            positions = [self.axis(name) for name in ([dims] if dims in self.names else split_names(dims))]
        elif isinstance(dims, Sequence):
            positions = [self.axis(dim) for dim in dims]
        else:
            positions = [self.axis(dims)]
        if len(set(positions)) != len(positions):
            raise ValueError(f"an axis is given twice in {dims!r}; {self.listing()}")
        return tuple(positions)

    def listing(self) -> str:
        """Return a list of the axes for messages."""
        if not self.ndim:
            return "the tensor has no axes"
        return "the axes are " + ", ".join(
            repr(n) if n is not None else f"{i} (unnamed)" for i, n in enumerate(self.names)
        )

    # -- making others ---------------------------------------------------------------------------------------------

    def pairs(self) -> list[Pair]:
        """Return (name, space) of each axis, as an editable list for `intern_pairs`."""
        return list(zip(self.names, self.spaces, strict=True))

    def take(self, order: Iterable[int]) -> Axes:
        """Return the axes at these positions, in this order."""
        order = tuple(order)
        return self.carry(intern_pairs((self.names[at], self.spaces[at]) for at in order))

    def drop(self, *gone: int) -> Axes:
        """Return the axes without those at some positions."""
        return self.take(at for at in range(self.ndim) if at not in gone)

    def put_labels(self, at: int, space: Space | None) -> Axes:
        """Return the axes with other labels on one of them, without the coordinates along it but with its attributes."""
        name, pairs = self.names[at], self.pairs()
        pairs[at] = (name, space)
        axes = intern_pairs(pairs)
        return axes if self.coordinates is None else axes.mark(self.coordinates.keep(axes.names, [name]))

    def put(self, at: int, *new: Pair) -> Axes:
        """Return the axes with others in place of one of them."""
        pairs = self.pairs()
        pairs[at : at + 1] = new
        axes = intern_pairs(pairs)
        return (
            axes
            if self.coordinates is None
            else axes.mark(self.coordinates.keep({*self.names[:at], *self.names[at + 1 :]}))
        )

    def insert(self, dim: int, new: Pair) -> tuple[int, Axes]:
        """Return the axes with a new one among them, and its position."""
        if not -self.ndim - 1 <= dim <= self.ndim:
            raise IndexError(f"there is no place {dim} for a new axis among {self.ndim}; {self.listing()}")
        at, pairs = dim % (self.ndim + 1), self.pairs()
        pairs.insert(at, new)
        return at, self.carry(intern_pairs(pairs))

    # -- further coordinates ---------------------------------------------------------------------------------------

    def carry(self, made: Axes, picks: Mapping[str, slice | Sequence[int]] | None = None) -> Axes:
        """Return other axes derived from these, with the further coordinates that are still valid.

        Args:
            made: The other axes. Those of the same name have the same entries, or those that were selected.
            picks: The selected entries, by the name of their axis.
        """
        coordinates = self.coordinates
        # A result without axes is SCALAR, which function transforms require, and has no coordinates.
        if (
            coordinates is None
            or not made.ndim
            or (not picks and (made.names, made.spaces) == (self.names, self.spaces))
        ):
            return made.mark(coordinates if made.ndim else None)
        picked = coordinates.pick(picks) if picks else coordinates
        return made.mark(None if picked is None else picked.keep(made.names))

    def mark(self, coordinates: AxisCoordinates | None) -> Axes:
        """Return the same axes with other further coordinates."""
        return self if coordinates is self.coordinates else intern(self.names, self.spaces, coordinates)

    def find_coordinate(self, name: str) -> tuple[int, Sequence[Hashable]] | None:
        """Return the axis and the values of a further coordinate along one axis; None if there is none of this name."""
        coordinate = None if self.coordinates is None else self.coordinates.find(name)
        return None if coordinate is None else (self.names.index(coordinate[0]), coordinate[1])

    def coordinate_names(self) -> list[str]:
        """Return the names of the further coordinates along one axis."""
        return (
            []
            if self.coordinates is None
            else [name for name in self.coordinates.entries if self.coordinates.find(name) is not None]
        )

    def dims(self, shape: Sequence[int]) -> tuple[Space, ...]:
        """Return the Spaces of all axes, with the sizes of positional axes from a shape."""
        return tuple(
            space if space is not None else Space(size, name)
            for name, space, size in zip(self.names, self.spaces, shape, strict=True)
        )


_table: weakref.WeakValueDictionary[Hashable, Axes] = weakref.WeakValueDictionary()
_lock: Final = threading.RLock()  # reentrant, because a garbage collection inside may intern axes


def intern(
    names: Sequence[str | None], spaces: Sequence[Space | None], coordinates: AxisCoordinates | None = None
) -> Axes:
    """Return the one Axes object with these names, spaces and further coordinates.

    Args:
        names: The name of each axis, or None.
        spaces: The Space of each axis, None if it is positional.
        coordinates: Further coordinates, if there are any.

    Raises:
        ValueError: If two axes have the same name.
    """
    names = tuple(names)
    spaces = tuple(
        space if space is None or space.name == name else space.rename(name)
        for name, space in zip(names, spaces, strict=True)
    )
    key = (names, spaces, coordinates)
    interned = _table.get(key)
    if interned is not None:
        return interned
    for name in names:
        check_name(name)
    own = [name for name in names if name is not None]
    if len(set(own)) != len(own):
        twice = next(name for name in own if own.count(name) > 1)
        raise ValueError(
            f"two axes would both be named {twice!r} (the names would be {list(names)}); "
            f"rename one of them first, for example t.rename({twice}={twice + '2'!r})"
        )
    axes = Axes.__new__(Axes)
    axes.names, axes.spaces, axes.ndim, axes._plans = names, spaces, len(names), {}
    axes.named, axes.firm, axes.coordinates = None not in names, None not in spaces, coordinates
    axes.rest = intern(names[1:], spaces[1:]) if names else None
    with _lock:  # threads that make the same axes at once must get one object
        return _table.setdefault(key, axes)


def intern_pairs(pairs: Iterable[Pair]) -> Axes:
    """Return `intern` of a list of (name, space)."""
    pairs = list(pairs)
    return intern([name for name, _ in pairs], [space for _, space in pairs])


def axes_of(dims: Iterable[Space]) -> Axes:
    """Return the Axes of a tuple of Spaces."""
    dims = tuple(dims)
    for axis, space in enumerate(dims):
        if not isinstance(space, Space):
            raise TypeError(f"dims are Spaces, one per axis, but number {axis} is {space!r}; write Space({space!r})")
    return intern_pairs(map(as_pair, dims))


def as_pair(space: Space) -> Pair:
    """Return the name of an axis, and its Space unless that has positions only."""
    return space.name, None if space.positional else space


def make_unnamed(ndim: int) -> Axes:
    """Return the Axes of a plain tensor: positional, without names."""
    return _unnamed[ndim]


# All ranks that torch supports, made on import, so that compiled code and threads only read.
_unnamed: Final = [intern((None,) * ndim, (None,) * ndim) for ndim in range(65)]
SCALAR: Final = make_unnamed(0)


def as_key(dims: DimsLike) -> DimsLike:
    """Return axes as a hashable argument of a cached function."""
    return tuple(dims) if type(dims) is list else dims


def split_names(names: str) -> list[str]:
    """Return the names in one string, separated by spaces or commas."""
    parts = names.replace(",", " ").split()
    for name in parts:
        check_name(name)
    return parts


def cache_by_axes(function: Callable[Concatenate[Axes, P], R]) -> Callable[Concatenate[Axes, P], R]:
    """Return a function of Axes cached on its first argument, and evaluated at trace time under `torch.compile`.

    The function takes an Axes and hashable arguments, never tensors, and its result depends on them alone. Hot paths call
    ``axes.run(function, ...)`` directly, which saves one call.
    """

    @functools.wraps(function)
    def look_up(axes: Axes, *args: Any) -> Any:
        return axes.run(function, *args)

    return look_up  # type: ignore[return-value]


@final
class UnfitAxes(Axes):
    """The axes of a tensor whose rank a function transform has changed, so that they no longer fit the data."""

    __slots__ = ("meant",)

    meant: Axes

    @classmethod
    def of(cls, meant: Axes) -> UnfitAxes:
        """Return axes that raise at every use and store what they were."""
        axes = cls.__new__(cls)
        axes.meant = meant
        return axes

    def __getattr__(self, attribute: str) -> Any:
        # The slots of Axes are empty, so every use of names, spaces or plans gets here.
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
