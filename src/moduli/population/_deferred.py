"""Sums that wait: `0.7*v + 1.5*r1*(best - x) + 1.5*r2*(leader - x)` as one pass over memory instead of one per operator.

The result of an operator on large populations may be a `PendingSum`: a sum of terms c (p - q), where c is a number or a column
of one number per member and p and q are matrices or rows. It is computed, block by block so that what is between stays in
the cache, when the values are asked for.

What a recipe reads must not change in between. Rows and columns are copied. A matrix is read later only if the population
is the one that holds it: no view, leaf or member of it exists when the recipe is made, and asking for one
afterwards, or changes the population in place, has everything computed first that waits for it (`Values.matrices`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from moduli._torch import UNKNOWN, count_references, count_storage_uses, is_wrapped
from moduli.layout import Layout

if TYPE_CHECKING:
    from ._core import Core
    from ._values import Values


# Below so many bytes the passes are cheap, and deciding is not.
_LEAST = 1 << 18
# A block is about a megabyte, and there are so few of them that the number of operations does not grow with the members.
_BLOCK = 1 << 20
_MOST_BLOCKS = 64
_MOST_TERMS = 8
_probe = torch.empty(1, device="cpu")
# How often a storage is counted that one tensor holds; where that is not known, nothing counts as held by one.
_ALONE = -1 if count_storage_uses(_probe) == UNKNOWN else count_storage_uses(_probe)


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
        and (not pop._buffers or not pop._policies())
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
