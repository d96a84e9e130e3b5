"""The values of results: operations on two populations, or on one and numbers, in as few passes over memory as they take."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._core import Core
from ._deferred import PendingSum, Term, deferrable, scaled, summed, terms_of
from ._operands import check_dtype, scalar
from ._values import Values, deferred, fresh

__all__ = ["OUT", "added", "is_factor", "later", "later_pair", "operated", "pair", "times", "with_values"]

OUT: dict[Any, Callable[..., Tensor]] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.div,
    operator.pow: torch.pow,
    operator.floordiv: torch.floor_divide,
    operator.mod: torch.remainder,
}


# -- results that wait -------------------------------------------------------------------------------------------------


def later_pair(left: Core, right: Core, fn: Any, left_spare: bool, right_spare: bool) -> Values | None:
    """A sum or difference of two populations that is computed later, or None if it has to be computed now."""
    if fn not in (operator.add, operator.sub) or not deferrable(left) or right._graph:
        return None
    ours, theirs = terms_of(left, left_spare), terms_of(right, right_spare)
    terms = None if ours is None or theirs is None else summed(fn, ours, theirs)
    return None if terms is None else deferred(PendingSum(left.layout, left._count, terms))


def later(left: Core, fn: Any, values: list[Any], reflected: bool, spare: bool) -> Values | None:
    """An operation with numbers or a row that is computed later, or None if it has to be computed now."""
    if fn not in (operator.add, operator.sub, operator.mul) or not deferrable(left):
        return None
    value = values[0]
    if isinstance(value, Tensor):
        # What the tensor holds may change before it is read.
        value = value.detach().clone()
    if fn is operator.mul:
        ours = terms_of(left, spare) if is_factor(values) else None
        terms = None if ours is None else scaled(ours, value if isinstance(value, Tensor) else float(value))
    elif isinstance(value, Tensor) and value.numel() == left.layout.numel:
        ours, theirs = terms_of(left, spare), [Term(1.0, value.reshape(-1), None)]
        terms = None if ours is None else summed(fn, theirs, ours) if reflected else summed(fn, ours, theirs)
    else:
        return None
    return None if terms is None else deferred(PendingSum(left.layout, left._count, terms))


# -- numbers -----------------------------------------------------------------------------------------------------------


def is_factor(values: list[Any]) -> bool:
    """Whether operands are numbers, or one number per member."""
    return bool(values) and all(
        isinstance(v, int | float) or (isinstance(v, Tensor) and (v.dim() == 0 or v.shape[-1:] == (1,))) for v in values
    )


def times(pending: Any, values: list[Any]) -> Any:
    # All groups were given the same numbers; that of the highest precision is kept.
    factor = max(values, key=lambda v: v.element_size() if isinstance(v, Tensor) else 0)
    return factor if pending is None else pending * factor


def added(target: Tensor, source: Tensor, factor: Any, sign: float) -> Tensor:
    """Add sign * factor * source, in one pass."""
    if factor is None:
        # Without a factor these are faster than with the factor 1.
        return target.add_(source) if sign == 1.0 else target.sub_(source)
    if isinstance(factor, Tensor):
        return target.addcmul_(source, factor.to(target.dtype), value=sign)
    return target.add_(source, alpha=sign * factor)


def pair(left: Core, right: Core, fn: Any, left_spare: bool, right_spare: bool) -> Values:
    """An operation on two populations, written over one of them if no name refers to it afterwards."""
    x, y = left._values, right._values
    left_spare = left_spare and left._spare()
    right_spare = right_spare and right._spare() and left._values is not y
    layout, count = left.layout, left._count
    with torch.no_grad(), torch.inference_mode(False):
        if fn in (operator.add, operator.sub) and left._floating() and right._floating():
            return _sum(left, x, y, 1.0 if fn is operator.add else -1.0, left_spare, right_spare)
        for group in layout.groups:
            if fn is operator.truediv and not left._left_out(group):
                check_dtype(layout, group, fn, 1)
        ours, theirs = x.settle(), y.settle()
        out = x if left_spare else y if right_spare else fresh(layout, count)
        for target, a, b in zip(out.matrices, ours, theirs, strict=True):
            if fn is operator.truediv and not (a.is_floating_point() or a.is_complex()):
                target.copy_(a)
                continue
            OUT[fn](a, b, out=target)
        return out


def _sum(left: Core, x: Values, y: Values, sign: float, left_spare: bool, right_spare: bool) -> Values:
    """The sum x + sign y, with factors that wait folded in: one pass, or two where both operands have a factor."""
    a, b = x.pending, y.pending
    if left_spare and a is not None and right_spare and b is None and sign == 1.0:
        x, y, a, b = y, x, b, a
        left_spare, right_spare = right_spare, left_spare
    if left_spare:
        for target, source in zip(x.settle(), y.matrices, strict=True):
            added(target, source, b, sign)
        return x
    if right_spare:
        for source, target in zip(x.matrices, y.matrices, strict=True):
            if b is None and a is None and sign == -1.0:
                torch.sub(source, target, out=target)
                continue
            if b is not None:
                target.mul_(sign * (b.to(target.dtype) if isinstance(b, Tensor) else b))
            elif sign != 1.0:
                target.neg_()
            added(target, source, a, 1.0)
        y.pending = None
        return y
    values = fresh(left.layout, left._count)
    for out, p, q in zip(values.matrices, x.matrices, y.matrices, strict=True):
        if a is None and isinstance(b, Tensor):
            torch.addcmul(p, q, b.to(p.dtype), value=sign, out=out)
        elif a is None and b is None:
            (torch.add if sign == 1.0 else torch.sub)(p, q, out=out)
        elif a is None:
            torch.add(p, q, alpha=sign * b, out=out)
        elif b is None and sign == 1.0:
            torch.addcmul(q, p, a.to(p.dtype), out=out) if isinstance(a, Tensor) else torch.add(q, p, alpha=a, out=out)
        else:
            torch.mul(p, a.to(p.dtype) if isinstance(a, Tensor) else a, out=out)
            added(out, q, b, sign)
    return values


def with_values(left: Core, fn: Any, values: list[Any], reflected: bool, spare: bool) -> Values:
    """An operation on a population and numbers, columns or rows."""
    spare = spare and left._spare()
    x = left._values
    with torch.no_grad(), torch.inference_mode(False):
        factor, x_matrices = x.pending, x.matrices
        if factor is not None and (fn is not operator.mul or spare or isinstance(factor, Tensor)):
            factor, x_matrices = None, x.settle()
        out = x if spare else fresh(left.layout, left._count)
        for group, target, matrix, value in zip(left.layout.groups, out.matrices, x_matrices, values, strict=True):
            if left._left_out(group):
                target.copy_(matrix)
                continue
            if factor is not None:
                value = value * factor
            if isinstance(value, Tensor):
                value = value.detach()
            elif reflected:
                value = torch.as_tensor(value, dtype=group.dtype if _floats(group.dtype) else None, device=group.device)
            OUT[fn](value, matrix, out=target) if reflected else OUT[fn](matrix, value, out=target)
        return out


def _floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def operated(fn: Any, other: Any, reflected: bool) -> Callable[[str, Tensor], Tensor] | None:
    """What an operation with a number, or one number per member, does to a buffer that takes part in it."""
    if isinstance(other, nn.Module):
        theirs = dict(other.named_buffers())
        return lambda name, held: fn(theirs[name], held) if reflected else fn(held, theirs[name])
    value = scalar(other)
    if isinstance(value, Tensor) and value.dim() > 0:
        if value.dim() > 1 and value.shape[1:] != (1,):
            return None
        column = value.reshape(-1)

        def act(name: str, held: Tensor) -> Tensor:
            if held.shape[0] != column.shape[0]:
                return held.clone()
            per_member = column.reshape(-1, *[1] * (held.dim() - 1)).to(held.dtype)
            return fn(per_member, held) if reflected else fn(held, per_member)  # type: ignore[no-any-return]

        return act
    return lambda name, held: fn(value, held) if reflected else fn(held, value)
