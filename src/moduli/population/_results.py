"""The values of results: operations on two populations, or on one and numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._core import Core
from ._deferred import PendingSum, Term, deferrable, scale_terms, sum_terms, terms_of
from ._operands import check_dtype, scalar
from ._values import Values, allocate, make_deferred

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


def defer_pair(left: Core, right: Core, fn: Any, left_spare: bool, right_spare: bool) -> Values | None:
    """A sum or difference of two populations that is computed later, or None if it has to be computed now."""
    if fn not in (operator.add, operator.sub) or not deferrable(left) or right._graph:
        return None
    ours, theirs = terms_of(left, left_spare), terms_of(right, right_spare)
    terms = None if ours is None or theirs is None else sum_terms(fn, ours, theirs)
    return None if terms is None else make_deferred(PendingSum(left.layout, left._count, terms))


def defer(left: Core, fn: Any, values: list[Any], reflected: bool, spare: bool) -> Values | None:
    """An operation with numbers or a row that is computed later, or None if it has to be computed now."""
    if fn not in (operator.add, operator.sub, operator.mul) or not deferrable(left):
        return None
    value = values[0]
    if isinstance(value, Tensor):
        # What the tensor holds may change before it is read.
        value = value.detach().clone()
    if fn is operator.mul:
        ours = terms_of(left, spare) if _is_factor(values) else None
        terms = None if ours is None else scale_terms(ours, value if isinstance(value, Tensor) else float(value))
    elif isinstance(value, Tensor) and value.numel() == left.layout.numel:
        ours, theirs = terms_of(left, spare), [Term(1.0, value.reshape(-1), None)]
        terms = None if ours is None else sum_terms(fn, theirs, ours) if reflected else sum_terms(fn, ours, theirs)
    else:
        return None
    return None if terms is None else make_deferred(PendingSum(left.layout, left._count, terms))


# -- numbers -----------------------------------------------------------------------------------------------------------


def _is_factor(values: list[Any]) -> bool:
    """Whether operands are numbers, or one number per member."""
    return bool(values) and all(
        isinstance(v, int | float) or (isinstance(v, Tensor) and (v.dim() == 0 or v.shape[-1:] == (1,))) for v in values
    )


def pair(left: Core, right: Core, fn: Any) -> Values:
    """An operation on two populations."""
    with torch.no_grad(), torch.inference_mode(False):
        for group in left.layout.groups:
            if fn is operator.truediv and not left._left_out(group):
                check_dtype(left.layout, group, fn, 1)
        out = allocate(left.layout, left._count)
        for target, a, b in zip(out.held, left._values.matrices, right._values.matrices, strict=True):
            if fn is operator.truediv and not _floats(a.dtype):
                target.copy_(a)
                continue
            OUT[fn](a, b, out=target)
        return out


def operate_with_values(left: Core, fn: Any, values: list[Any], reflected: bool) -> Values:
    """An operation on a population and numbers, columns or rows."""
    with torch.no_grad(), torch.inference_mode(False):
        out = allocate(left.layout, left._count)
        for group, target, matrix, value in zip(
            left.layout.groups, out.held, left._values.matrices, values, strict=True
        ):
            if left._left_out(group):
                target.copy_(matrix)
                continue
            if isinstance(value, Tensor):
                value = value.detach()
            elif reflected:
                # Filled there: a number that is made here first would be copied to the device.
                value = torch.full((), value, dtype=group.dtype if _floats(group.dtype) else None, device=group.device)
            OUT[fn](value, matrix, out=target) if reflected else OUT[fn](matrix, value, out=target)
        return out


def _floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def make_buffer_operation(fn: Any, other: Any, reflected: bool) -> Callable[[str, Tensor], Tensor] | None:
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
