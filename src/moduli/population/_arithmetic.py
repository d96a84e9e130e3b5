"""Arithmetic of populations: whole-matrix operations with no more passes over memory than hand-written code.

A population can be combined with populations, single particles, numbers, and tensors of three shapes. An operand becomes one
value for each group of the layout, which broadcasts against the (N, P) matrix of that group: a number, a column (N, 1) of
per-member numbers, a row (1, P) shared by all members, or a whole matrix.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from moduli import particles
from moduli.kernels import find_temporaries
from moduli.layout import Alignment, AxesError, Group, Guard, Layout, align, diff, read
from moduli.particles import StructureError

from ._core import Core, Values, allocate
from ._members import repeat_buffers

# The function of torch with `out=` for each operator.
OUT: dict[Any, Callable[..., Tensor]] = {
    getattr(operator, name): getattr(torch, name) for name in ("add", "sub", "mul", "pow", "neg", "abs")
}
OUT.update({operator.truediv: torch.div, operator.floordiv: torch.floor_divide})
OUT.update({operator.mod: torch.remainder, operator.pos: torch.clone})


class Arithmetic(particles.InPlaceOperators, Core):
    """The operators of populations."""

    # -- results -----------------------------------------------------------------------------------------------------

    def _binary(self, fn: Any, other: Any, reflected: bool = False) -> Any:
        temporary = find_temporaries(self, other, reflected)
        self._check_operands()
        values = read_operand(self, other, fn)
        if values is None:
            return NotImplemented
        out = None
        if not self._inert():
            spare = (pop for pop, each in zip((self, other), temporary, strict=True) if each and _is_spare(pop))
            out = next((pop._values for pop in spare), None)
        result = operate(self, fn, values, reflected, out)
        on_buffers = make_buffer_operation(self, fn, other, reflected) if self._buffers else None
        return self._finish_result(result, on_buffers, other if reflected and isinstance(other, nn.Module) else None)

    def _unary(self, fn: Any) -> Self:
        return self._map_tensors(OUT[fn])

    def _map_tensors(self, fn: Callable[..., Tensor]) -> Self:
        """Return the population with a function applied to every value."""
        self._check_operands()
        with torch.no_grad(), torch.inference_mode(False):
            values = allocate(self.layout, self._count)
            for out, matrix in zip(values.matrices, self._values.matrices, strict=True):
                out.copy_(matrix) if fn is torch.clone else fn(matrix, out=out)
        return self._finish_result(values, lambda _, buffer: fn(buffer))

    def _finish_result(
        self,
        values: Values,
        buffer: Callable[[str, Tensor], Tensor] | None = None,
        module: nn.Module | None = None,
    ) -> Self:
        """Return the population of an operation's values, with buffers according to their policies."""
        self._restore(values, self._inert())
        if not self._buffers:
            buffers = {}
        elif module is not None:
            buffers = repeat_buffers(match(self, module)[1], self._count)
        else:
            buffers = self._keep_buffers(buffer)
        return self._make_alike(values, self._count, buffers)

    def _inplace(self, fn: Any, other: Any) -> Any:
        with Guard(deferred=True):
            self._check_operands()
            values = read_operand(self, other, fn)
            if values is None:
                return NotImplemented
            self._write(lambda matrix, value: OUT[fn](matrix, value, out=matrix), values)
            return self

    def _check_operands(self) -> None:
        """Raise if a member was edited, or inside `differentiable()`, since results are detached."""
        if particles.is_differentiable():
            raise RuntimeError(
                "the arithmetic of a population keeps no history; inside differentiable() combine members of it, as in "
                "pop[0] + t * (pop[1] - pop[0])"
            )
        self._check_members()

    def _write(self, act: Callable[..., Any], *operands: Sequence[Any]) -> None:
        """Call `act(matrix, *operands)` for every group; parameters that take no part in operations keep their values."""
        inert, matrices = self._inert(), self._values.matrices
        with Guard(deferred=True, grad=False) as guard, Guard() as inert_guard:
            guard.add(self._mark_changed)
            guard.tensors(matrices if len(matrices) > 1 else ())  # one operation changes all or nothing
            inert_guard.tensors([view for place, view in enumerate(self.layout.views(matrices)) if place in inert])
            for group, matrix, *args in zip(self.layout.groups, matrices, *operands, strict=True):
                if not self._left_out(group):
                    act(matrix, *[value.detach() if isinstance(value, Tensor) else value for value in args])
            inert_guard.restore()
            self._mark_changed()


# -- operands ------------------------------------------------------------------------------------------------------------


def read_operand(pop: Core, other: Any, fn: Any) -> list[Any] | None:
    """Return an operand as one value for each group of a population; None if its type is not an operand.

    Args:
        pop: The population.
        other: The operand.
        fn: The operator.

    Raises:
        StructureError: If the operand does not fit the population.
        TypeError: If the result would need another kind of dtype.
    """
    values: list[Any]
    if isinstance(other, Core):
        check_count(pop, other)
        values = match(pop, other)[0]
    elif isinstance(other, nn.Module):
        values = match(pop, other)[0]
    else:
        value = particles.read_number(other)
        if value is None:
            return None
        values = broadcast(pop, value) if isinstance(value, Tensor) else [value] * len(pop.layout.groups)
    inert = pop._inert()
    for group, each in zip(pop.layout.groups, values, strict=True):
        if not inert or not pop._left_out(group):
            name = pop.layout.entries[group.indices[0]].name
            particles.check_kept(name, group.dtype, each, fn is operator.truediv, "pop.template.")
    return values


def check_count(ours: Core, theirs: Core) -> None:
    """Raise StructureError if two populations have different numbers of members."""
    if ours._count != theirs._count:
        raise StructureError(
            f"cannot combine populations of {ours._count} and {theirs._count} members; choose as many with pop[...], or "
            "combine with one member, as in `pop - other[0]`"
        )


def match(pop: Core, other: Core | nn.Module) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the values of another population or of a module in the order of labels of this population.

    Args:
        pop: The population that decides the order.
        other: The population or module whose values are reordered.

    Returns:
        The matrix of each group, of one row for a module; and the buffers by name, stacked where the matrices are.

    Raises:
        StructureError: If the structures, labels or devices differ.
    """
    if isinstance(other, Core):
        if other.layout is pop.layout:
            return other._values.matrices, other._buffers
        alignment = _align(pop, other.layout, other.template)
        if alignment is None:
            return other._values.matrices, other._buffers
        tensors = alignment.reorder_parameters(other.layout.views(other._values.matrices), 1)
        rows = [[tensors[i].reshape(len(other), -1) for i in group.indices] for group in pop.layout.groups]
        return [torch.cat(parts, 1) for parts in rows], _reorder_buffers(alignment, other.layout, other._buffers, 1)
    seen = read(other)
    layout, tensors = seen.structure.layout, seen.parameters
    buffers = {entry.name: buffer for entry, buffer in zip(layout.buffers, seen.buffers, strict=True)}
    alignment = _align(pop, layout, other)
    if alignment is not None:
        tensors = alignment.reorder_parameters(tensors)
        buffers = _reorder_buffers(alignment, layout, buffers, 0)
    return pop.layout.pack([tensor.detach() for tensor in tensors]) if tensors else [], buffers


def _align(pop: Core, layout: Layout, module: nn.Module) -> Alignment | None:
    """Return the alignment of a model's labels to those of a population; raise StructureError if they do not fit."""
    refused = f"cannot combine a population of {type(pop.template).__name__} with {type(module).__name__}"
    try:
        alignment = align(pop.layout, layout)
    except AxesError as error:
        raise StructureError(f"{refused}: {error}") from error
    theirs = layout if alignment is None else alignment.layout
    if pop.layout is not theirs:
        _check_same(pop.layout, theirs, refused)
    return alignment


def _reorder_buffers(
    alignment: Alignment, layout: Layout, buffers: Mapping[str, Tensor], lead: int
) -> dict[str, Tensor]:
    names = [entry.name for entry in layout.buffers]
    return dict(zip(names, alignment.reorder_buffers([buffers[name] for name in names], lead), strict=True))


def _check_same(ours: Layout, theirs: Layout, refused: str) -> None:
    if ours.entries is not theirs.entries and ours.fingerprint != theirs.fingerprint:
        raise StructureError(
            f"{refused}: {diff(ours, theirs)}. A population does not follow the edits of other models: resize its members "
            "with particles.grow(pop, ...) or shrink, or build one from edited models with Population.from_modules"
        )
    for x, y in zip(ours, theirs, strict=True):
        if x.device != y.device:
            raise StructureError(
                f"{x.name!r} is on {x.device} in the population and on {y.device} in the other operand"
            )


def broadcast(pop: Core, value: Tensor) -> list[Any]:
    """Return for each group the part of a tensor of one number per member (N), of one vector (P), or of a whole matrix.

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
    """Return the columns of one group from rows of all parameters."""
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


# -- results -------------------------------------------------------------------------------------------------------------


def _is_spare(pop: Any) -> bool:
    """Whether the storage of a population that is a temporary of an expression can be overwritten."""
    if not isinstance(pop, Core) or pop._parent is not None:
        return False
    return not (pop._leaves or pop._members or pop._members.leaves) and pop._values.is_spare()


def operate(left: Core, fn: Any, values: list[Any], reflected: bool, out: Values | None) -> Values:
    """Return the matrices of an operation on a population and numbers, columns, rows or matrices.

    Args:
        left: The population.
        fn: The operator.
        values: The other operand, from `read_operand`.
        reflected: Whether the other operand is on the left.
        out: Matrices to overwrite; None for new ones.
    """
    with torch.no_grad(), torch.inference_mode(False):
        out = out or allocate(left.layout, left._count)
        for group, target, matrix, value in zip(
            left.layout.groups, out.matrices, left._values.matrices, values, strict=True
        ):
            if left._left_out(group):
                target.copy_(matrix)
                continue
            if isinstance(value, Tensor):
                value = value.detach()
            elif reflected:
                # `torch.full` fills on the device, where `torch.tensor` would copy a number from the host.
                whole = not (group.dtype.is_floating_point or group.dtype.is_complex)
                value = torch.full((), value, dtype=None if whole else group.dtype, device=group.device)
            OUT[fn](value, matrix, out=target) if reflected else OUT[fn](matrix, value, out=target)
        return out


def make_buffer_operation(pop: Core, fn: Any, other: Any, reflected: bool) -> Callable[[str, Tensor], Tensor] | None:
    """Return the function of (name, buffer) by which an operation changes buffers; None if the operand does not fit them.

    Args:
        pop: The population.
        fn: The operator.
        other: The other operand.
        reflected: Whether the other operand is on the left.
    """
    theirs = match(pop, other)[1] if isinstance(other, nn.Module | Core) else None
    value: Any = particles.read_number(other) if theirs is None else None
    columns = isinstance(value, Tensor) and value.dim() > 0
    if columns and value.dim() > 1 and value.shape[1:] != (1,):
        return None

    def act(name: str, buffer: Tensor) -> Tensor:
        operand = value if theirs is None else theirs[name]
        if columns:
            if len(buffer) != len(operand):
                return buffer.clone()
            operand = operand.reshape(-1, *[1] * (buffer.dim() - 1)).to(buffer.dtype)
        return fn(operand, buffer) if reflected else fn(buffer, operand)  # type: ignore[no-any-return]

    return act
