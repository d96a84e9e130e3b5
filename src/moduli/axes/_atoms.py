"""Identity of axes: a union-find over atoms, which operations split into factors and segments.

An axis of a tensor is a `Dim`, the row-major product of atoms; an axis of size one is the empty product. An atom is a leaf, or
it is split: into a product of atoms (heads times the size of a head), or into segments, each a `Dim` (the two inputs of a
concatenation). Two axes that an operation pairs entry by entry are unified; axes that can't be unified are fixed, with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Dim = tuple[int, ...]
"""One axis of a tensor: the product of these atoms."""

INPUT = "an input"
OUTPUT = "an output"
UNREAD = "not read with this example"
INDEXED = "it is indexed by values"
"""The reason why the rows of a table that tokens index are fixed."""
NAMED_UNITS = "its units have labels"
LABELLED = "known by its labels; trace with an example to learn whether it is free"

# The ends of reasons that are not about the axis itself: a rule is missing, or can't follow the factors.
_UNCLEAR = (
    *("has no rule", "depends on the order", "cuts its factors", "do not agree", "have different sizes"),
    *("in the middle of a factor", LABELLED),
)


def is_width(reasons: Iterable[str]) -> bool:
    """Whether an axis fixed for these reasons is a width of the model: not data, positions or indices."""
    return all(reason.endswith(_UNCLEAR) for reason in reasons)


def find_growth(reasons: Iterable[str]) -> str | None:
    """Return how an axis fixed for these reasons can get units that do not affect the others; see `ModelAxis.growth`."""
    kinds = set(reasons) - {NAMED_UNITS}
    if not kinds:
        return "copy"
    if kinds == {LABELLED}:
        return "zero"
    if kinds <= {INPUT, OUTPUT, INDEXED}:
        return "input" if INPUT in kinds else "fresh"
    return None


class Atoms:
    """Atoms with their sizes, the reasons why they are fixed, and their splits.

    Attributes:
        sizes: The size of each atom.
        reasons: The reasons why each atom is fixed; empty for a free one.
        hints: A word for the kind of an axis ("head"), if an operation implies it.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.reasons: list[tuple[str, ...]] = []
        self.hints: list[str | None] = []
        self._parents: list[int] = []
        self._read: list[bool] = []
        self._factors: dict[int, Dim] = {}
        self._segments: dict[int, tuple[Dim, ...]] = {}

    def new(self, size: int, *reasons: str, read: bool = True) -> Dim:
        """Return an axis of one new atom.

        Args:
            size: Its size.
            *reasons: The reasons why it is fixed; none for a free one.
            read: Whether an operation has read its entries.
        """
        if size == 1:
            return ()
        self.sizes.append(size)
        self.reasons.append(reasons)
        self.hints.append(None)
        self._parents.append(len(self._parents))
        self._read.append(read)
        return (len(self.sizes) - 1,)

    def resolve(self, dim: Iterable[int]) -> list[int]:
        """Return the leaves and segmented atoms whose product an axis is."""
        leaves: list[int] = []
        for atom in dim:
            root = self._find(atom)
            leaves += self.resolve(self._factors[root]) if root in self._factors else [root]
        return leaves

    def segments(self, atom: int) -> tuple[Dim, ...] | None:
        """Return the segments of a resolved atom; None for a leaf."""
        return self._segments.get(atom)

    def flatten(self, atom: int) -> tuple[Dim, ...]:
        """Replace segments that are concatenations by their own segments, and return all; none for a leaf."""
        parts: list[Dim] = []
        for part in self._segments.get(atom, ()):
            inner = self.resolve(part)
            nested = self.flatten(inner[0]) if len(inner) == 1 else ()
            parts += nested or [part]
        if parts:
            self._segments[atom] = tuple(parts)
        return tuple(parts)

    def size(self, dim: Iterable[int]) -> int:
        """Return the number of entries of an axis."""
        return math.prod(self.sizes[atom] for atom in dim)

    def fix(self, dim: Iterable[int], reason: str) -> None:
        """Fix all leaves of an axis."""
        for leaf in self.list_leaves(dim):
            if reason not in self.reasons[leaf]:
                self.reasons[leaf] = (*self.reasons[leaf], reason)

    def hint(self, dim: Iterable[int], word: str) -> None:
        """Set the word for the kind of an axis, which is used in its name, unless it has one."""
        for leaf in self.list_leaves(dim):
            self.hints[leaf] = self.hints[leaf] or word

    def list_leaves(self, dim: Iterable[int]) -> list[int]:
        """Return every leaf of an axis, including those in segments."""
        leaves = []
        for atom in self.resolve(dim):
            parts = self._segments.get(atom)
            leaves += [atom] if parts is None else [leaf for part in parts for leaf in self.list_leaves(part)]
        return leaves

    def mark_read(self, dim: Iterable[int]) -> None:
        """Mark an axis as read by an operation."""
        for leaf in self.list_leaves(dim):
            self._read[leaf] = True

    def fix_unread(self, dim: Iterable[int]) -> None:
        """Fix the leaves of an axis that no operation has read, because nothing is known about them."""
        for leaf in self.list_leaves(dim):
            if not self._read[leaf]:
                self.fix((leaf,), UNREAD)

    # ------------------------------------------------------------------ pairing

    def unify(self, left: Iterable[int], right: Iterable[int]) -> None:
        """Make two axes of one size the same, splitting the coarser one; fix both if their factors do not agree."""
        a, b = self.resolve(left), self.resolve(right)
        while a and b:
            size, other = self.sizes[a[0]], self.sizes[b[0]]
            if size == other:
                self._union(a[0], b[0])
                a, b = self.resolve(a[1:]), self.resolve(b[1:])
            elif size % other == 0:
                a = self._take_factor(a, other)
            elif other % size == 0:
                b = self._take_factor(b, size)
            else:
                self.fix((*a, *b), f"factors {size} and {other} of one axis do not agree")
                return

    def _take_factor(self, atoms: list[int], size: int) -> list[int]:
        """Split the first atom so that its first factor has this size, a divisor of the atom's."""
        return [*self._factorize(atoms[0], size), *atoms[1:]]

    def _factorize(self, atom: int, size: int) -> list[int]:
        """Split an atom into a factor of this size and the rest; fix it if its segments do not fit."""
        whole = self.sizes[atom]
        parts = self._segments.get(atom)
        if parts is None:
            inherited = self.reasons[atom]
            factors = (*self.new(size, *inherited), *self.new(whole // size, *inherited))
            for factor in factors:
                self.hints[factor], self._read[factor] = self.hints[atom], self._read[atom]
            self._factors[atom] = factors
        elif not self.collapse(atom):
            self.fix((atom,), "its segments have different sizes")
            # The segments keep their own (fixed) atoms; the result is a fixed product instead.
            return [*self.new(size, *self.reasons_of(atom)), *self.new(whole // size, *self.reasons_of(atom))]
        resolved = self.resolve((atom,))
        if self.sizes[resolved[0]] == size:
            return resolved
        if self.sizes[resolved[0]] % size == 0:
            return [*self._factorize(resolved[0], size), *resolved[1:]]
        return resolved

    def reasons_of(self, atom: int) -> tuple[str, ...]:
        """Return the reasons why leaves of an atom are fixed."""
        return tuple(dict.fromkeys(reason for leaf in self.list_leaves((atom,)) for reason in self.reasons[leaf]))

    def collapse(self, atom: int) -> bool:
        """Turn segments of equal size into a product of a fixed index and one segment; return whether they have one size."""
        parts = self.flatten(atom)
        if len({self.size(part) for part in parts}) != 1:
            return False
        for part in parts[1:]:
            self.unify(parts[0], part)
        del self._segments[atom]
        self._factors[atom] = (*self.new(len(parts), "the index of a segment"), *parts[0])
        return True

    def _union(self, first: int, second: int) -> None:
        """Merge two resolved atoms of one size."""
        if first == second:
            return
        if first in self._segments and second in self._segments:
            self._union_segments(first, second)
        elif second in self._segments:
            first, second = second, first
        if first in self._segments:
            for reason in self.reasons[second]:
                self.fix((first,), reason)
            for leaf in self.list_leaves((first,)):
                self._read[leaf] = self._read[leaf] or self._read[second]
        self._parents[second] = first
        self._segments.pop(second, None)
        self.reasons[first] = tuple(dict.fromkeys((*self.reasons[first], *self.reasons[second])))
        self.hints[first] = self.hints[first] or self.hints[second]
        self._read[first] = self._read[first] or self._read[second]

    def _union_segments(self, first: int, second: int) -> None:
        """Pair the segments of two atoms, cutting the longer ones."""
        ours, theirs = list(self._segments[first]), list(self._segments[second])
        parts: list[Dim] = []
        while ours and theirs:
            size, other = self.size(ours[0]), self.size(theirs[0])
            if size > other:
                ours[:1] = self.cut(ours[0], other)
            elif other > size:
                theirs[:1] = self.cut(theirs[0], size)
            self.unify(ours[0], theirs[0])
            parts.append(ours.pop(0))
            theirs.pop(0)
        self._segments[first] = tuple(parts)

    # ------------------------------------------------------------------ segments

    def join(self, parts: Sequence[Dim]) -> Dim:
        """Return the concatenation of axes."""
        if len(parts) == 1:
            return parts[0]
        atom = self.new(sum(map(self.size, parts)))
        self._segments[atom[0]] = tuple(parts)
        return atom

    def cut(self, dim: Dim, at: int, read: tuple[bool, bool] = (True, True)) -> tuple[Dim, Dim]:
        """Return the first `at` entries of an axis and the rest, as two axes.

        Args:
            dim: The axis, of more than `at` entries.
            at: The length of the first part, at least 1.
            read: Whether each part is read; parts that nothing reads are fixed in the end.
        """
        atoms = self.resolve(dim)
        first, rest = atoms[0], tuple(atoms[1:])
        inner = self.size(rest)
        if at % inner:
            self.fix(dim, "it is cut in the middle of a factor")
            reasons = self.reasons_of(first)
            return self.new(at, *reasons), self.new(self.size(dim) - at, *reasons)
        left, right = self._cut_atom(first, at // inner, read)
        return (*left, *rest), (*right, *rest)

    def _cut_atom(self, atom: int, at: int, read: tuple[bool, bool]) -> tuple[Dim, Dim]:
        parts = self._segments.get(atom)
        if parts is None:
            reasons, was_read = self.reasons[atom], self._read[atom]
            pieces = tuple(
                self.new(size, *reasons, read=was_read and now)
                for size, now in zip((at, self.sizes[atom] - at), read, strict=True)
            )
            for piece in pieces:
                for new in piece:
                    self.hints[new] = self.hints[atom]
            self._segments[atom] = pieces
            return pieces[0], pieces[1]
        before: list[Dim] = []
        after = list(parts)
        while at:
            size = self.size(after[0])
            if size > at:
                after[:1] = self.cut(after[0], at, read)
                size = at
            before.append(after.pop(0))
            at -= size
        self._segments[atom] = (*before, *after)
        return self.join(before), self.join(after)

    # ------------------------------------------------------------------ shapes

    def regroup(self, dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim]:
        """Return the axes of a tensor with these axes that is viewed in another shape."""
        atoms = [atom for dim in dims for atom in self.resolve(dim)]
        axes: list[Dim] = []
        for size in shape:
            taken: list[int] = []
            missing = size
            while missing > 1:
                head = self.sizes[atoms[0]]
                if missing % head == 0:
                    taken.append(atoms.pop(0))
                    missing //= head
                elif head % missing == 0:
                    atoms = self._take_factor(atoms, missing)
                else:
                    break
            if missing > 1:
                return self._fix_all(dims, shape)
            axes.append(tuple(taken))
        return axes

    def _fix_all(self, dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim]:
        reason = f"viewed as {tuple(shape)}, which cuts its factors"
        for dim in dims:
            self.fix(dim, reason)
        return [self.new(size, reason) for size in shape]

    def _find(self, atom: int) -> int:
        while self._parents[atom] != atom:
            self._parents[atom] = self._parents[self._parents[atom]]
            atom = self._parents[atom]
        return atom
