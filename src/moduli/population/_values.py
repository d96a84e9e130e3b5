"""The numbers of a population: one N x P matrix for each group of its layout, and sums of them that wait.

`Values` owns the matrices. The last few that nothing refers to any more are used again: a fresh one costs a page fault for
every 4 KiB of it.

The result of an operator on large populations may be a `PendingSum`: a sum of terms c (p - q), where c is a number or a column
of one number per member and p and q are matrices or rows. So `0.7*v + 1.5*r1*(best - x) + 1.5*r2*(leader - x)` is one pass over
memory instead of one per operator: it is computed, block by block so that what is between stays in the cache, when the values
are asked for.

What a sum reads must not change in between. Rows and columns are copied. A matrix is read later only if the population
is the one that holds it: no view, leaf or member of it exists when the sum is made, and asking for one
afterwards, or changing the population in place, has everything computed first that waits for it (`Values.matrices`).
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from moduli._torch import UNKNOWN, count_references, count_storage_uses, is_wrapped
from moduli.layout import Layout
from moduli.particles import buffer_policies

if TYPE_CHECKING:
    from ._core import Core

# Matrices to use again: those of so many bytes, below which the C library does as well, and above which memory is dear.
_spare: deque[Tensor] = deque(maxlen=3)
# Below so many bytes passes are cheap, and deciding whether a sum may wait is not.
_LEAST, _MOST = 1 << 18, 1 << 26
# A block is about a megabyte, and there are so few of them that the number of operations does not grow with the members.
_BLOCK = 1 << 20
_MOST_BLOCKS = 64
_MOST_TERMS = 8
_probe = torch.empty(1, device="cpu")
# How often a storage is counted that one tensor holds; where that is not known, nothing counts as held by one.
_ALONE = -1 if count_storage_uses(_probe) == UNKNOWN else count_storage_uses(_probe)


class Values:
    """The matrices of a population.

    Attributes:
        held: The matrices as they are, for those that know that nothing waits.
        recipe: How to compute the matrix, if it is not computed yet.
    """

    __slots__ = ("__weakref__", "_waiting", "held", "recipe")

    def __init__(self, matrices: list[Tensor], recipe: PendingSum | None = None) -> None:
        self.held = matrices
        self.recipe = recipe
        # Results that are to be computed from these matrices before anything happens to them.
        self._waiting: list[weakref.ref[Values]] = []

    def __del__(self) -> None:
        if len(self.held) == 1 and _LEAST <= self.held[0].nbytes <= _MOST and is_alone(self.held):
            _spare.append(self.held.pop())

    @property
    def matrices(self) -> list[Tensor]:
        """One (N, P) matrix per group of the layout. Nothing waits for them any more: they may be changed."""
        if self.recipe is not None:
            self.compute()
        if self._waiting:
            self.serve()
        return self.held

    def compute(self, onto: Tensor | None = None, sign: float = 1.0) -> None:
        """Carry out the recipe, and add the result to a matrix if one is given."""
        recipe = self.recipe
        if recipe is not None:
            with torch.no_grad(), torch.inference_mode(False):
                made = allocate(recipe.layout, recipe.members)
                compute(recipe, made.held[0], onto, sign)
            self.held, made.held, self.recipe = made.held, [], None

    def serve(self, besides: Values | None = None) -> None:
        """Compute what waits for these matrices, besides one result that the caller computes."""
        waiting, self._waiting = self._waiting, []
        for place, reference in enumerate(waiting):
            values = reference()
            if values is not None and values is not besides:
                try:
                    values.compute()
                except BaseException:
                    self._waiting = waiting[place:]
                    raise

    def await_(self, values: Values) -> None:
        """Remember a result that is to be computed before the matrices change."""
        if len(self._waiting) > 16:
            self._waiting = [known for known in self._waiting if (held := known()) is not None and held.recipe]
        self._waiting.append(weakref.ref(values))


def make_deferred(recipe: PendingSum) -> Values:
    """Values that are computed when they are asked for."""
    made = Values([], recipe)
    for term in recipe.terms:
        for operand in (term.plus, term.minus):
            if isinstance(operand, Values):
                operand.await_(made)
    return made


def allocate(layout: Layout, count: int) -> Values:
    """Uninitialised matrices for `count` members of a layout."""
    groups = layout.groups
    kind = (groups[0].dtype, groups[0].device) if groups else None
    for _ in range(len(_spare) if len(groups) == 1 else 0):
        try:
            matrix = _spare.popleft()
        except IndexError:
            break  # another thread took it
        if matrix.shape == (count, groups[0].numel) and (matrix.dtype, matrix.device) == kind:
            return Values([matrix])
        _spare.append(matrix)
    with torch.inference_mode(False):
        return Values([torch.empty(count, g.numel, dtype=g.dtype, device=g.device) for g in groups])


# -- sums that wait ----------------------------------------------------------------------------------------------------


class Term(NamedTuple):
    """c (p - q), or c p."""

    factor: Any
    plus: Values | Tensor
    minus: Values | Tensor | None


class PendingSum(NamedTuple):
    """A sum of terms, for some members of a layout with one group."""

    layout: Layout
    members: int
    terms: list[Term]


def deferrable(pop: Core) -> bool:
    """Whether operations on a population may wait, going by its structure."""
    if pop._values.recipe is not None:
        return True
    groups = pop.layout.groups
    return (
        len(groups) == 1
        and groups[0].dtype.is_floating_point
        and groups[0].device.type == "cpu"
        and groups[0].numel * pop._count * groups[0].dtype.itemsize >= _LEAST
        and not pop._graph
        and not pop._inert()
        and (not pop._buffers or {"copy"}.issuperset(buffer_policies(pop.template).values()))
    )


def terms_of(pop: Core, temporary: bool) -> list[Term] | None:
    """A population as terms to be read later, or None if its values may change unnoticed.

    Args:
        pop: The population.
        temporary: Whether no name refers to it, so that its own recipe can be continued.
    """
    values = pop._values
    if values.recipe is not None:
        if temporary:
            return values.recipe.terms
        # Computed once, not again by everything that it is a part of.
        values.compute()
    if pop._parent is not None or pop._members or not is_alone(values.held, pop._leaves):
        return None
    return [Term(1.0, values, None)]


def is_alone(held: list[Tensor], leaves: list[Tensor] | None = None) -> bool:
    """Whether a list has the only reference to its one matrix and every part of it, but for leaves that have no other."""
    matrix = held[0]
    if (
        type(matrix) is not Tensor
        or matrix.device.type != "cpu"
        or matrix.requires_grad
        or matrix.is_inference()
        or is_wrapped(matrix)
        or matrix.untyped_storage().is_shared()
    ):
        return False
    del matrix
    # What the count is for something that one list holds is seen on an object made here.
    alone = [object()]
    if count_references(held[0]) > count_references(alone[0]):
        return False
    if leaves and any(count_references(leaves[i]) > count_references(alone[0]) for i in range(len(leaves))):
        return False
    return _ALONE > 0 and count_storage_uses(held[0]) <= _ALONE + len(leaves or ())


def scale_terms(terms: list[Term], factor: Any) -> list[Term]:
    """The terms of a multiple."""
    return [Term(_times(term.factor, factor), term.plus, term.minus) for term in terms]


def _times(known: Any, factor: Any) -> Any:
    return factor if isinstance(known, float) and known == 1.0 else known * factor


def negate_terms(terms: list[Term]) -> list[Term]:
    """The terms with the other sign."""
    return [
        Term(1.0, term.minus, term.plus) if term.minus is not None and _is_one(term) else Term(-term.factor, *term[1:])
        for term in terms
    ]


def _is_one(term: Term) -> bool:
    return isinstance(term.factor, float) and term.factor == 1.0


def sum_terms(fn: Callable[..., Any], left: list[Term], right: list[Term]) -> list[Term] | None:
    """The terms of a sum or difference, or None if there are too many."""
    if fn is operator.sub:
        if len(left) == len(right) == 1 and all(_is_one(t) and t.minus is None for t in (*left, *right)):
            return [Term(1.0, left[0].plus, right[0].plus)]
        right = negate_terms(right)
    terms = [*left, *right]
    return terms if len(terms) <= _MOST_TERMS else None


# -- computing ---------------------------------------------------------------------------------------------------------


def compute(recipe: PendingSum, out: Tensor, onto: Tensor | None = None, sign: float = 1.0) -> None:
    """Write the sum into a matrix that no term reads; then add it, with a sign, to another one, which terms may read."""
    first, *rest = recipe.terms
    second = rest[0] if rest and rest[0].minus is None and first.minus is None and _is_one(first) else None
    rest = rest[1:] if second is not None else rest
    single = not rest and (first.minus is None or _is_one(first)) and onto is None
    for rows, spare in _blocks(out, recipe.terms, single):
        target = out[rows] if rows is not None else out
        p, q, factor = _cut_rows(first, rows)
        if q is not None:
            torch.sub(p, q, out=target)
            if not _is_one(first):
                target.mul_(factor)
        elif second is not None:
            _sum(p, *_cut_rows(second, rows)[::2], target)
        elif _is_one(first):
            target.copy_(p)
        else:
            torch.mul(p, factor, out=target)
        for term in rest:
            _add(target, term, rows, spare)
        if onto is not None:
            part = onto[rows] if rows is not None else onto
            _sum(part, target, sign, part)


def _sum(p: Tensor, q: Tensor, factor: Any, target: Tensor) -> None:
    """P + c q, in one pass."""
    if isinstance(factor, Tensor):
        torch.addcmul(p, q, factor, out=target)
    elif abs(factor) == 1.0:
        # Without a factor these are faster than with the factor 1.
        (torch.add if factor > 0 else torch.sub)(p, q, out=target)
    else:
        torch.add(p, q, alpha=factor, out=target)


def accumulate(target: Tensor, terms: list[Term]) -> None:
    """Add a sum to a matrix that no term reads, or that the only term reads."""
    for rows, spare in _blocks(target, terms, False):
        part = target[rows] if rows is not None else target
        for term in terms:
            _add(part, term, rows, spare)


def _add(target: Tensor, term: Term, rows: slice | None, spare: Tensor | None) -> None:
    p, q, factor = _cut_rows(term, rows)
    if q is not None and spare is not None:
        p = torch.sub(p, q, out=spare[: target.shape[0]])
    _sum(target, p, factor, target)


def _blocks(out: Tensor, terms: list[Term], whole: bool) -> list[tuple[slice | None, Tensor | None]]:
    count, size = out.shape
    paired = any(term.minus is not None for term in terms)
    if whole:
        return [(None, None)]
    rows = max(1, _BLOCK // max(1, size * out.element_size()), -(-count // _MOST_BLOCKS))
    spare = out.new_empty(min(rows, count), size) if paired else None
    if rows >= count:
        return [(None, spare)]
    return [(slice(start, min(count, start + rows)), spare) for start in range(0, count, rows)]


def _cut_rows(term: Term, rows: slice | None) -> tuple[Tensor, Tensor | None, Any]:
    """The operands of a term for a block of members."""
    p, q = _matrix(term.plus), None if term.minus is None else _matrix(term.minus)
    factor = term.factor
    if rows is None:
        return p, q, factor
    if isinstance(factor, Tensor) and factor.dim() == 2 and factor.shape[0] > 1:
        factor = factor[rows]
    return p[rows] if p.dim() == 2 else p, q[rows] if q is not None and q.dim() == 2 else q, factor


def _matrix(operand: Values | Tensor) -> Tensor:
    return operand if isinstance(operand, Tensor) else operand.held[0]
