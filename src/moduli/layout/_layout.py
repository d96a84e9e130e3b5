"""`Layout` and what it is made of. Nothing here looks at a module."""

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class LayoutError(ValueError):
    """A model has no layout, or tensors do not fit the one they are used with.

    Example:
        >>> from moduli.layout import layout_of
        >>> layout_of(torch.nn.LazyLinear(2))
        Traceback (most recent call last):
        ...
        moduli.layout._layout.LayoutError: 'weight' is lazy: ... run one forward pass first
    """


class Axis(NamedTuple):
    """The name and the labels of one axis of a stored tensor.

    Attributes:
        name: The name, or None.
        labels: The labels in order, as a tuple or a range; None if the axis has positions only.

    Example:
        >>> from moduli.layout import Axis
        >>> Axis("channel", ("r", "g")).labels
        ('r', 'g')
    """

    name: str | None
    labels: Sequence[Hashable] | None


Axes = tuple[Axis, ...]
"""The axes of one tensor."""


class Entry(NamedTuple):
    """One parameter of a layout. A parameter with several names has one entry, under the first.

    Attributes:
        name: Its dotted name, as `named_parameters()` gives it.
        shape: Its sizes.
        dtype: Its dtype.
        device: The device it is on.
        numel: How many elements it has.
        group: Index of its group in `Layout.groups`.
        offset: Position of its first element in the vector of its group.
        start: Position of its first element in all parameters laid end to end.
        ties: The other names of the same parameter, in order.
        axes: The names and labels of its axes, where it is a labelled tensor or one is computed from it; None otherwise.

    Example:
        >>> from moduli.layout import layout_of
        >>> entry = layout_of({"gain": torch.zeros(2, 3)})["gain"]
        >>> entry.shape, entry.numel, entry.offset
        ((2, 3), 6, 0)
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int
    group: int
    offset: int
    start: int
    ties: tuple[str, ...] = ()
    axes: Axes | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of this parameter, its own first."""
        return (self.name, *self.ties)


class BufferEntry(NamedTuple):
    """One buffer of a layout. Buffers have no place in the flat vectors and no part in the fingerprint.

    Attributes:
        name: Its dotted name, as `named_buffers()` gives it.
        shape: Its sizes.
        dtype: Its dtype.
        device: The device it is on.
        numel: How many elements it has.
        persistent: Whether `state_dict()` holds it.
        ties: The other names of the same buffer, in order.
        axes: The names and labels of its axes, as of a parameter.

    Example:
        >>> from moduli.layout import layout_of
        >>> [b.name for b in layout_of(torch.nn.BatchNorm1d(3)).buffers]
        ['running_mean', 'running_var', 'num_batches_tracked']
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int
    persistent: bool
    ties: tuple[str, ...] = ()
    axes: Axes | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """The parameters of one dtype on one device, which fit in one flat vector.

    Attributes:
        dtype: Their dtype.
        device: Their device.
        numel: How many elements they have together.
        indices: Which entries of the layout they are.

    Example:
        >>> from moduli.layout import layout_of
        >>> pair = [torch.zeros(3), torch.zeros(2, dtype=torch.float64)]
        >>> [(g.dtype, g.numel) for g in layout_of(pair).groups]
        [(torch.float32, 3), (torch.float64, 2)]
    """

    dtype: torch.dtype
    device: torch.device
    numel: int
    indices: tuple[int, ...]

    def empty(self, *lead: int) -> Tensor:
        """Make an uninitialised vector for this group, or with `lead` sizes a stack of them.

        Example:
            >>> from moduli.layout import layout_of
            >>> layout_of(torch.nn.Linear(3, 2)).groups[0].empty(5).shape
            torch.Size([5, 8])
        """
        return torch.empty((*lead, self.numel), dtype=self.dtype, device=self.device)


class Layout:
    """The immutable layout of a model's parameters, and a list of its buffers. Made by `layout_of`.

    A layout is a sequence of its entries, which can also be looked up by any of their names. Equal layouts are one
    object, so `is` is a sufficient test for "same structure, labels and devices"; `fingerprint` is the test that does
    not mind labels and devices.

    Attributes:
        entries: One `Entry` per distinct parameter, in the order of `named_parameters()`.
        buffers: One `BufferEntry` per distinct buffer, in the order of `named_buffers()`.
        groups: One `Group` per dtype and device among the parameters, in order of appearance.
        numel: How many elements all parameters have together.
        labelled: Whether any of the parameters or buffers has axes.

    Example:
        >>> from moduli.layout import layout_of
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
        >>> net[1].weight = net[0].weight
        >>> layout = layout_of(net)
        >>> layout
        Layout(2 parameters, 6 elements, 1 tie)
        >>> layout["1.weight"].name, "1.bias" in layout
        ('0.weight', False)
    """

    __slots__ = ("__weakref__", "_fingerprint", "_index", "buffers", "entries", "groups", "labelled", "numel")

    entries: tuple[Entry, ...]
    buffers: tuple[BufferEntry, ...]
    groups: tuple[Group, ...]
    numel: int
    labelled: bool
    _index: dict[str, Entry]
    _fingerprint: str | None

    def __new__(cls, entries: tuple[Entry, ...] = (), buffers: tuple[BufferEntry, ...] = ()) -> "Layout":
        interned = _INTERNED.get((entries, buffers))
        if interned is not None:
            return interned
        self = super().__new__(cls)
        members: list[list[int]] = []
        for position, entry in enumerate(entries):
            if entry.group == len(members):
                members.append([])
            members[entry.group].append(position)
        firsts = [entries[indices[0]] for indices in members]
        self.entries, self.buffers, self._fingerprint = entries, buffers, None
        self.numel = sum(entry.numel for entry in entries)
        self.labelled = any(e.axes is not None for e in entries) or any(b.axes is not None for b in buffers)
        self.groups = tuple(
            Group(first.dtype, first.device, sum(entries[i].numel for i in indices), tuple(indices))
            for first, indices in zip(firsts, members, strict=True)
        )
        self._index = {name: entry for entry in entries for name in entry.names}
        _INTERNED[(entries, buffers)] = self
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the entries, without ties.

        Example:
            >>> from moduli.layout import layout_of
            >>> layout_of(torch.nn.Linear(2, 2)).names
            ('weight', 'bias')
        """
        return tuple(entry.name for entry in self.entries)

    @property
    def fingerprint(self) -> str:
        """A digest of the parameters' names, shapes, dtypes, order and ties.

        It does not depend on values, labels, devices, buffers, trainability, the process, or the machine.

        Example:
            >>> from moduli.layout import layout_of
            >>> a, b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
            >>> layout_of(a).fingerprint == layout_of(b).fingerprint
            True
        """
        if self._fingerprint is None:
            rows = [[e.name, e.shape, str(e.dtype), sorted(e.ties)] for e in self.entries]
            text = json.dumps(["moduli layout 1", rows], separators=(",", ":"), ensure_ascii=True)
            self._fingerprint = hashlib.sha256(text.encode("ascii")).hexdigest()
        return self._fingerprint

    def views(self, vectors: Tensor | Sequence[Tensor]) -> list[Tensor]:
        """Return views of flat vectors as parameters: one view per entry, in the order of the entries.

        Args:
            vectors: One vector per group; a layout of one group also takes the vector itself. Leading dimensions
                are kept, so the rows of an N x P matrix give views of shape (N, *entry.shape).

        Raises:
            LayoutError: If there are too few or too many vectors, or one has the wrong size or dtype.

        Example:
            >>> from moduli.layout import layout_of
            >>> layout = layout_of(torch.nn.Linear(3, 2))
            >>> weight, bias = layout.views(torch.arange(8.0))
            >>> bias
            tensor([6., 7.])
        """
        vectors = self._vectors(vectors)
        parts: dict[int, Tensor] = {}
        for group, vector in zip(self.groups, vectors, strict=True):
            if torch.is_grad_enabled():
                # Autograd refuses in-place operations on what torch.split returns.
                for i in group.indices:
                    parts[i] = vector.narrow(-1, self.entries[i].offset, self.entries[i].numel)
            else:
                split = torch.split(vector, [self.entries[i].numel for i in group.indices], -1)
                for i, part in zip(group.indices, split, strict=True):
                    parts[i] = part
        return [
            parts[i] if len(entry.shape) == 1 else parts[i].view((*parts[i].shape[:-1], *entry.shape))
            for i, entry in enumerate(self.entries)
        ]

    def pack(self, tensors: Sequence[Tensor], out: Tensor | Sequence[Tensor] | None = None) -> list[Tensor]:
        """Copy one tensor per entry into flat vectors, one per group; `views` undoes it.

        Without `out` the result carries gradients to the tensors. Writing into `out` does not.

        Args:
            tensors: As many tensors as there are entries, each of its entry's shape and dtype.
            out: Vectors to write into, as `views` takes them.

        Raises:
            LayoutError: If a tensor does not fit its entry, or `out` does not fit the layout.

        Example:
            >>> from moduli.layout import layout_of
            >>> net = torch.nn.Linear(3, 2)
            >>> layout_of(net).pack(list(net.parameters()))[0].shape
            torch.Size([8])
        """
        if len(tensors) != len(self.entries):
            raise LayoutError(f"this layout has {len(self.entries)} parameters; {len(tensors)} tensors were given")
        for entry, tensor in zip(self.entries, tensors, strict=True):
            if tensor.shape != entry.shape or tensor.dtype != entry.dtype:
                raise LayoutError(
                    f"{entry.name!r} is {_describe(entry.shape, entry.dtype)} in this layout, but the tensor given "
                    f"for it is {_describe(tuple(tensor.shape), tensor.dtype)}"
                )
        flat = [[tensors[i].reshape(-1) for i in group.indices] for group in self.groups]
        if out is None:
            return [torch.cat(parts) for parts in flat]
        targets = self._vectors(out)
        with torch.no_grad():
            for group, target, parts in zip(self.groups, targets, flat, strict=True):
                if target.dim() != 1:
                    raise LayoutError(
                        f"'out' for the {group.dtype} parameters has shape {tuple(target.shape)}; give one vector "
                        f"of {group.numel} elements, for instance a row of the matrix"
                    )
                torch.cat(parts, out=target)
        return targets

    def _vectors(self, vectors: Tensor | Sequence[Tensor]) -> list[Tensor]:
        """Return vectors as a list, checked against the groups."""
        vectors = [vectors] if isinstance(vectors, Tensor) else list(vectors)
        if len(vectors) != len(self.groups):
            kinds = ", ".join(f"{group.dtype} on {group.device}" for group in self.groups) or "none"
            raise LayoutError(
                f"this layout needs one vector per dtype and device ({len(self.groups)}: {kinds}); got {len(vectors)}"
            )
        for group, vector in zip(self.groups, vectors, strict=True):
            if vector.dim() == 0 or vector.shape[-1] != group.numel or vector.dtype != group.dtype:
                raise LayoutError(
                    f"the vector for the {group.dtype} parameters must end in a dimension of {group.numel}; "
                    f"got {_describe(tuple(vector.shape), vector.dtype)}"
                )
        return vectors

    def __getitem__(self, name: str) -> Entry:
        try:
            return self._index[name]
        except KeyError:
            raise KeyError(f"no parameter is called {name!r}; the first ones are {list(self._index)[:8]}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __bool__(self) -> bool:
        # A layout without parameters is still a layout; only its length is zero.
        return True

    def __setattr__(self, name: str, value: object) -> None:
        # Models of one structure share a layout. `_index` is assigned last, so its presence marks a finished object.
        if name != "_fingerprint" and hasattr(self, "_index"):
            raise AttributeError(f"a Layout is immutable; {name!r} cannot be set")
        object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Callable[..., "Layout"], tuple[Any, ...]]:
        return Layout, (self.entries, self.buffers)

    def __repr__(self) -> str:
        counts = {
            "parameter": len(self.entries),
            "element": self.numel,
            "tie": sum(len(entry.ties) for entry in self.entries),
            "buffer": len(self.buffers),
        }
        parts = [
            f"{n} {noun}{'' if n == 1 else 's'}" for noun, n in counts.items() if n or noun in ("parameter", "element")
        ]
        return f"Layout({', '.join(parts)})"


# Equal layouts are one object, which makes the commonest comparison, of two models of one class, a pointer comparison.
# The keys hold only entries, so a layout without other references is freed.
_INTERNED: WeakValueDictionary[tuple[tuple[Entry, ...], tuple[BufferEntry, ...]], Layout] = WeakValueDictionary()


def _describe(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return a tensor's shape and dtype as text, for an error."""
    return f"{str(dtype).removeprefix('torch.')} of shape {shape}"
