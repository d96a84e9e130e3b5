"""The first difference between two layouts, as a value and as a sentence."""

from dataclasses import dataclass
from typing import Literal

import torch

from ._layout import Layout
from ._scan import Source, layout_of


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two layouts first differ, and how. Its text is a sentence about "left" and "right".

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
    for entry in a:
        for name in entry.names:
            if name not in b:
                return Difference(name, "missing", entry.shape, None)
            other = b[name]
            if entry.shape != other.shape:
                return Difference(name, "shape", entry.shape, other.shape)
            if entry.dtype != other.dtype:
                return Difference(name, "dtype", entry.dtype, other.dtype)
    # Every name of the left is on the right from here on, so a name too many can only be the right's.
    for entry in b:
        for name in entry.names:
            if name not in a:
                return Difference(name, "missing", None, entry.shape)
    for entry in a:
        for name in entry.names:
            if set(entry.names) != set(b[name].names):
                # Of two different sets of names, the first that only one of them has.
                apart = set(entry.names) ^ set(b[name].names)
                tie = next(other for other in (*entry.names, *b[name].names) if other in apart)
                return Difference(tie, "tie", _partner(tie, a), _partner(tie, b))
    # The same names with the same ties: they can only come in another order.
    theirs = _order_names(b)
    place, name = next((i, n) for i, (n, m) in enumerate(zip(_order_names(a), theirs, strict=True)) if n != m)
    return Difference(name, "order", place, theirs.index(name))


def _partner(name: str, layout: Layout) -> str | None:
    """The name to which `name` is tied, or None when it stands alone."""
    return next((other for other in layout[name].names if other != name), None)


def _order_names(layout: Layout) -> list[str]:
    """All names, those of one parameter together, in the order that the fingerprint depends on."""
    return [name for entry in layout for name in (entry.name, *sorted(entry.ties))]
