"""What a population can be combined with: populations, single particles, numbers, and tensors of three shapes.

An operand becomes one value for each group of the layout, which broadcasts against the (N, P) matrix of that group: a
number, a column (N, 1) of per-member numbers, a row (1, P) shared by all members, or a whole matrix.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moduli.layout import Group, Layout, diff, layout_and_tensors
from moduli.nn import labels_of
from moduli.particles import StructureError, check_kept, is_temporary, matching_values, read_number

from ._core import Core
from ._values import PendingSum, Term, Values, allocate, deferrable, make_deferred, scale_terms, sum_terms, terms_of

OUT: dict[Any, Callable[..., Tensor]] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.div,
    operator.pow: torch.pow,
    operator.floordiv: torch.floor_divide,
    operator.mod: torch.remainder,
    operator.pos: torch.clone,
    operator.neg: torch.neg,
    operator.abs: torch.abs,
}


def read_operand(pop: Core, other: Any, fn: Any, graph: bool = False) -> list[Any] | None:
    """What an operand is for each group of a population; None if it is no operand.

    Args:
        pop: The population.
        other: The operand.
        fn: The function of both.
        graph: Whether to keep the history of the operand.

    Raises:
        StructureError: If it does not fit the population.
        TypeError: If the result would be of another kind of number.
    """
    values: list[Any]
    if isinstance(other, Core):
        check_match(pop, other)
        values = other._plain() if graph else other._values.matrices
    elif isinstance(other, nn.Module):
        values = rows(pop, other, graph)
    else:
        value = read_number(other)
        if value is None:
            return None
        values = broadcast(pop, value) if isinstance(value, Tensor) else [value] * len(pop.layout.groups)
    inert = pop._inert()
    for group, each in zip(pop.layout.groups, values, strict=True):
        if not inert or not pop._left_out(group):
            name = pop.layout.entries[group.indices[0]].name
            check_kept(name, group.dtype, each, fn is operator.truediv, "pop.template.")
    return values


def check_match(ours: Core, theirs: Core) -> None:
    """Check that two populations can be combined member by member.

    Raises:
        StructureError: If their structures, sizes or devices differ.
    """
    if ours._count != theirs._count:
        raise StructureError(
            f"cannot combine populations of {ours._count} and {theirs._count} members; choose as many with pop[...], or "
            "combine with one member, as in `pop - other[0]`"
        )
    if ours.layout is not theirs.layout:
        _same(ours.layout, theirs.layout, ours.template, theirs.template)


def _same(ours: Layout, theirs: Layout, left: nn.Module, right: nn.Module) -> None:
    if ours.entries is not theirs.entries and ours.fingerprint != theirs.fingerprint:
        raise StructureError(
            f"cannot combine a population of {type(left).__name__} with {type(right).__name__}: {diff(ours, theirs)}"
        )
    for x, y in zip(ours, theirs, strict=True):
        if x.device != y.device:
            raise StructureError(
                f"{x.name!r} is on {x.device} in the population and on {y.device} in the other operand"
            )


def rows(pop: Core, module: nn.Module, graph: bool = False) -> list[Tensor]:
    """The values of one module, as a row for each group."""
    layout, tensors = layout_and_tensors(module)
    if _owns_labels(module) and _owns_labels(pop.template):
        layout, tensors = pop.layout, matching_values(pop.template, module)
    elif layout is not pop.layout:
        _same(pop.layout, layout, pop.template, module)
    if not tensors:
        return []
    return layout.pack(tensors if graph else [tensor.detach() for tensor in tensors])


def _owns_labels(module: nn.Module) -> bool:
    return any(labels_of(each) for each in module.modules())


def broadcast(pop: Core, value: Tensor) -> list[Any]:
    """A tensor of numbers per member (N), of one vector (P), or of a whole matrix, for each group.

    Raises:
        StructureError: If its shape is none of these, or could be two of them.
    """
    count, size = len(pop), pop.layout.numel
    shape = tuple(value.shape)
    if not shape:
        return [_cast(value, group) for group in pop.layout.groups]
    if shape == (count,) and shape == (size,):
        raise StructureError(
            f"a tensor of shape {shape} could be one number per member or one vector for all, since there are {count} of "
            f"both; give it the shape ({count}, 1) or (1, {size})"
        )
    if shape in ((count,), (count, 1)):
        column = value.reshape(count, 1)
        return [_cast(column, group) for group in pop.layout.groups]
    if shape in ((size,), (1, size), (count, size)):
        flat = value.reshape(-1, size)
        return [_cast(_gather_columns(pop.layout, group, flat), group) for group in pop.layout.groups]
    raise StructureError(
        f"a tensor of shape {shape} does not fit {count} members of {size} parameters; give one number per member ({count},), "
        f"one vector ({size},), or a matrix ({count}, {size})"
    )


def _gather_columns(layout: Layout, group: Group, flat: Tensor) -> Tensor:
    """The columns of one group, from all parameters laid end to end."""
    if len(layout.groups) == 1:
        return flat
    entries = [layout.entries[i] for i in group.indices]
    return torch.cat([flat.narrow(1, entry.start, entry.numel) for entry in entries], 1)


def _cast(value: Tensor, group: Group) -> Tensor:
    if value.dtype is group.dtype and value.device == group.device:
        return value
    if value.dim() and value.device != group.device:
        raise StructureError(f"a tensor on {value.device} for parameters on {group.device}; move it with .to()")
    if group.dtype.is_complex or (group.dtype.is_floating_point and not value.is_complex()):
        return value.to(group.device, group.dtype)
    return value.to(group.device)


# -- results -----------------------------------------------------------------------------------------------------------


def defer(left: Core, fn: Any, other: Core | list[Any], reflected: bool, counts: tuple[int, int]) -> Values | None:
    """A sum, a difference or a multiple that is computed later, or None if it has to be computed now.

    Args:
        left: The population.
        fn: The function.
        other: Another population, or what another operand is for each group.
        reflected: Whether the other operand is the left one.
        counts: The references to both, as `_binary` counted them.
    """
    if fn not in (operator.add, operator.sub, operator.mul) or not deferrable(left):
        return None
    value: Any = None if isinstance(other, Core) else other[0]
    if isinstance(value, Tensor):
        # What the tensor holds may change before it is read.
        value = value.detach().clone()
    theirs: list[Term] | None = None
    if isinstance(other, Core):
        theirs = None if fn is operator.mul or other._graph else terms_of(other, is_temporary(counts[1], 1))
    elif isinstance(value, Tensor) and value.numel() == left.layout.numel and fn is not operator.mul:
        theirs = [Term(1.0, value.reshape(-1), None)]
    is_factor = value is not None and (not isinstance(value, Tensor) or value.dim() == 0 or value.shape[-1:] == (1,))
    if theirs is None and not (fn is operator.mul and is_factor):
        return None
    ours = terms_of(left, is_temporary(counts[0], 0, reflected))
    if ours is None:
        return None
    if theirs is None:
        terms: list[Term] | None = scale_terms(ours, value if isinstance(value, Tensor) else float(value))
    else:
        terms = sum_terms(fn, theirs, ours) if reflected else sum_terms(fn, ours, theirs)
    return None if terms is None else make_deferred(PendingSum(left.layout, left._count, terms))


def operate(left: Core, fn: Any, values: list[Any], reflected: bool) -> Values:
    """An operation on a population and numbers, columns, rows or matrices."""
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
    """What an operation does to a buffer that takes part in it."""
    if isinstance(other, nn.Module | Core):
        theirs = dict(other.named_buffers())
        return lambda name, held: fn(theirs[name], held) if reflected else fn(held, theirs[name])
    value = read_number(other)
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
