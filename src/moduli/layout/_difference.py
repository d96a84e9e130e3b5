"""The first difference between two layouts, as a value and as a sentence."""

from dataclasses import dataclass
from typing import Literal

import torch

from ._layout import Entry, Layout
from ._scan import Source, layout_of


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two layouts. Its text is a sentence about "left" and "right".

    Attributes:
        path: The name of the parameter that differs.
        kind: What differs: `"missing"`, `"shape"`, `"dtype"`, `"tie"` or `"order"`.
        left: What the left has: a shape, a dtype, the name it is tied to (None when it stands alone), or its place
            in the order of names. For `"missing"`, its shape, or None on the side that lacks it.
        right: The same for the right.

    Example:
        >>> from moduli.layout import diff
        >>> difference = diff(torch.nn.Linear(3, 2), torch.nn.Linear(4, 2))
        >>> difference.path, difference.kind, difference.left, difference.right
        ('weight', 'shape', (2, 3), (2, 4))
        >>> print(difference)
        'weight' has shape (2, 3) on the left and (2, 4) on the right
    """

    path: str
    kind: Literal["missing", "shape", "dtype", "tie", "order"]
    left: tuple[int, ...] | torch.dtype | str | int | None
    right: tuple[int, ...] | torch.dtype | str | int | None

    def __str__(self) -> str:
        if self.kind == "missing":
            here, there = ("left", "right") if self.right is None else ("right", "left")
            shape = self.left if self.right is None else self.right
            return f"{self.path!r} is missing on the {there}; on the {here} it has shape {shape}"
        if self.kind == "tie":
            left, right = (
                "a parameter of its own" if name is None else f"tied to {name!r}" for name in (self.left, self.right)
            )
            return f"{self.path!r} is {left} on the left and {right} on the right"
        if self.kind == "order":
            return f"{self.path!r} has place {self.left} on the left and place {self.right} on the right"
        return f"{self.path!r} has {self.kind} {self.left} on the left and {self.right} on the right"


def diff(left: Source | Layout, right: Source | Layout) -> Difference | None:
    """Compare the structure of two models and name the first difference; None when the fingerprints agree.

    Args:
        left: A layout, or whatever `layout_of` takes.
        right: The same.

    Example:
        >>> a, b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2, bias=False)
        >>> print(diff(a, b))
        'bias' is missing on the right; on the left it has shape (2,)
        >>> print(diff(a, a))
        None
    """
    a = left if isinstance(left, Layout) else layout_of(left)
    b = right if isinstance(right, Layout) else layout_of(right)
    if a is b or a.fingerprint == b.fingerprint:
        return None
    difference = _diff_entries(a, b) or _diff_ties(a, b)
    if difference is not None:
        return difference
    # The same names with the same ties: only their order can differ.
    theirs = _order_names(b)
    place, name = next((i, n) for i, (n, m) in enumerate(zip(_order_names(a), theirs, strict=True)) if n != m)
    return Difference(name, "order", place, theirs.index(name))


def _diff_entries(a: Layout, b: Layout) -> Difference | None:
    """Return the first name that one side lacks, or whose shape or dtype differs."""
    for name, entry in _list_entries(a):
        if name not in b:
            return Difference(name, "missing", entry.shape, None)
        other = b[name]
        if entry.shape != other.shape:
            return Difference(name, "shape", entry.shape, other.shape)
        if entry.dtype != other.dtype:
            return Difference(name, "dtype", entry.dtype, other.dtype)
    extra = next(((name, entry) for name, entry in _list_entries(b) if name not in a), None)
    return None if extra is None else Difference(extra[0], "missing", None, extra[1].shape)


def _diff_ties(a: Layout, b: Layout) -> Difference | None:
    """Return the first name that is tied differently in two layouts of the same names."""
    for name, entry in _list_entries(a):
        names, others = entry.names, b[name].names
        tie = next((each for each in (*names, *others) if (each in names) != (each in others)), None)
        if tie is not None:
            return Difference(tie, "tie", _partner(tie, a), _partner(tie, b))
    return None


def _list_entries(layout: Layout) -> list[tuple[str, Entry]]:
    """Return every name, ties included, with its entry."""
    return [(name, entry) for entry in layout for name in entry.names]


def _partner(name: str, layout: Layout) -> str | None:
    """Return the name to which `name` is tied, or None if it is not tied."""
    return next((other for other in layout[name].names if other != name), None)


def _order_names(layout: Layout) -> list[str]:
    """Return all names, those of one parameter together, in the order that the fingerprint depends on."""
    return [name for entry in layout for name in (entry.name, *sorted(entry.ties))]
