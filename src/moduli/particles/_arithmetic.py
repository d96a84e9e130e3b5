"""Operations on whole modules: computing the values of a result, and making it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moduli.layout import Group

from . import _pass
from ._buffers import operating, result_buffers
from ._operand import Operand, broadcast, composing, leaves, number, pair, refuse_graph
from ._pass import Part
from ._record import Pending, Record, adorn, build
from ._skeleton import PENDING, RECORD, assemble, plain_attributes
from .base import NytoModuleBase
from .errors import StructureError
from .mtype import ParamConfig

__all__ = ["binary", "change", "derive", "duplicate", "part_of", "rebuild", "unary"]

Compute = Callable[[int, Group], Tensor]


def part_of(which: Operand, index: int, group: Group, spare: bool = False) -> Part:
    """The values of an operand in one group."""
    pending = which.pending
    if pending is not None and pending.vectors:
        return Part(pending.vectors[index], (), pending.scale, spare)
    if len(which.layout.groups) == 1:
        return Part(None, which.tensors)
    return Part(None, [which.tensors[i] for i in group.indices])


def derive(
    left: Operand,
    compute: Compute,
    act: Callable[..., Tensor] | None = None,
    others: dict[int, Tensor | None] | None = None,
) -> nn.Module:
    """Make a particle like an operand, with other values.

    Args:
        left: The operand.
        compute: Gives the vector of each group.
        act: What the operation does to a buffer that takes part in it.
        others: Which buffers do, and what the right operand has there.
    """
    if composing():
        return _derived(left, compute, act, others, True)
    with leaves():
        return _derived(left, compute, act, others, False)


def _derived(left: Operand, compute: Compute, act: Any, others: Any, graph: bool) -> nn.Module:
    structure = left.structure
    states = left.states()
    version = left.version(states)
    config = left.config()
    vectors: list[Tensor] = []
    for index, group in enumerate(structure.layout.groups):
        if config and all(place in config and not config[place].operational for place in group.indices):
            vector = part_of(left, index, group).gather()
        else:
            vector = compute(index, group)
        if vector.dtype is not group.dtype or vector.shape[0] != group.numel:
            vector = _fit(left, group, vector)
        vectors.append(vector)
    buffers = result_buffers(left, act, others) if left.buffers else []
    made = Pending(structure, states, vectors, left.flags(), buffers, version)
    made.graph = graph
    made.kinds = left.kinds()
    if config:
        _exempt(left, made, config)
    return _shell(made)


def _shell(pending: Pending) -> nn.Module:
    """The module of a result, to be built when it is looked into.

    Plain attributes are there at once, because those of the class would be found in their place.
    """
    kind = pending.structure.modules[0].kind
    shell: nn.Module = object.__new__(kind)
    plain, linked = plain_attributes(pending.states[0])
    shell.__dict__.update(plain)
    shell.__dict__[PENDING] = pending
    if any(hasattr(kind, name) for name in linked):
        build(shell)
    return shell


def _fit(left: Operand, group: Group, vector: Tensor) -> Tensor:
    """The result of an operation in the dtype of the parameters."""
    name = left.layout.entries[group.indices[0]].name if group.indices else "the parameters"
    if vector.shape != (group.numel,):
        raise StructureError(f"the operation gave {tuple(vector.shape)} values for the {group.numel} of {name!r}")
    if (vector.is_floating_point() and group.dtype.is_floating_point) or group.dtype.is_complex:
        return vector.to(group.dtype)
    raise TypeError(
        f"the operation would turn {name!r} from {group.dtype} into {vector.dtype}; convert the model first, for instance "
        f"net.to({vector.dtype}), or leave the parameter out with set_param_config(operational=False, name={name!r})"
    )


def _exempt(left: Operand, made: Pending, config: dict[int, ParamConfig]) -> None:
    """Give parameters that take no part in operations the value they had, or share them."""
    inert = {place: each for place, each in config.items() if not each.operational}
    if not inert:
        return
    if made.graph:
        made.vectors = [vector.clone() for vector in made.vectors]
    values = left.values()
    with torch.no_grad():
        for place, each in inert.items():
            entry = left.layout.entries[place]
            held = values[place]
            made.vectors[entry.group].narrow(0, entry.offset, entry.numel).copy_(held.detach().reshape(-1))
            if not each.clone:
                made.shared[place] = left.parameter(place)


# -- operators ---------------------------------------------------------------------------------------------------------


def unary(fn: Callable[[Any], Any], module: nn.Module, scope: tuple[str, ...] | None = None) -> nn.Module:
    """A function of the values of a particle."""
    left = Operand(module, scope)
    plain = composing()
    return derive(left, lambda index, group: _pass.unary(fn, part_of(left, index, group), plain), fn, operating(left))


def binary(
    fn: Callable[[Any, Any], Any],
    module: nn.Module,
    other: Any,
    reflected: bool = False,
    scope: tuple[str, ...] | None = None,
    temporary: tuple[bool, bool] = (False, False),
) -> Any:
    """A function of the values of a particle and of another particle, a number or a tensor.

    Args:
        fn: The function.
        module: The particle.
        other: The other operand.
        reflected: Whether the other operand is the left one.
        scope: Patterns of names, if the operation is to act on those only.
        temporary: Which of the two exist only inside the expression.
    """
    plain = composing()
    left = Operand(module, scope)
    if isinstance(other, NytoModuleBase):
        left, right = pair(left, Operand(other))

        def compute(index: int, group: Group) -> Tensor:
            x, y = part_of(left, index, group, temporary[0]), part_of(right, index, group, temporary[1])
            return _pass.binary(group, fn, x, y, reflected, plain)

        return derive(left, compute, fn, operating(left, right))
    value = number(other)
    if value is None:
        return NotImplemented
    if isinstance(value, Tensor) and value.dim() > 0:
        parts = broadcast(left, value)
        return derive(
            left,
            lambda index, group: _pass.binary(
                group, fn, part_of(left, index, group), Part(None, [parts[i] for i in group.indices]), reflected, plain
            ),
        )
    if temporary[0] and fn is operator.mul and type(value) in (int, float) and left.pending is not None and not plain:
        return _scaled(left.pending, value, operating(left), left)
    return derive(
        left,
        lambda index, group: _pass.binary(
            group, fn, part_of(left, index, group, temporary[0]), value, reflected, plain
        ),
        lambda held: fn(value, held) if reflected else fn(held, value),
        operating(left),
    )


def _scaled(pending: Pending, value: float, others: dict[int, Tensor | None], left: Operand) -> nn.Module:
    """A multiple of a result that exists only inside the expression: its vector with a number still to be multiplied in."""
    with leaves():
        buffers = result_buffers(left, lambda held: held * value, others) if left.buffers else []
    made = Pending(pending.structure, pending.states, pending.vectors, pending.flags, buffers, pending.version)
    made.scale, made.kinds = pending.scale * value, pending.kinds
    config = left.config()
    if config:
        made.values()
        _exempt(left, made, config)
    return _shell(made)


def change(fn: Any, module: nn.Module, other: Any, scope: tuple[str, ...] | None = None) -> bool:
    """Change a particle in place; False if `other` is no operand."""
    refuse_graph()
    left = Operand(module, scope, live=True)
    inert = left.inert()
    places = [place for place in range(len(left.layout)) if place not in inert]
    if isinstance(other, NytoModuleBase):
        left, right = pair(left, Operand(other))
        inert = left.inert()
        others = operating(left, right)
        values: Any = right.values()
        parts = [values[p] for p in range(len(left.layout)) if p not in inert]
        targets = [left.tensors[p] for p in range(len(left.layout)) if p not in inert]
        with torch.no_grad():
            _pass.change(fn, [*targets, *(left.buffers[p] for p in others)], [*parts, *others.values()])
        return True
    value = number(other)
    if value is None:
        return False
    others = operating(left)
    with torch.no_grad():
        if isinstance(value, Tensor) and value.dim() > 0:
            values = broadcast(left, value)
            _pass.change(fn, [left.tensors[p] for p in places], [values[p] for p in places])
            return True
        for place in places:
            _check_kept(left.layout.entries[place], fn, value)
        _pass.change(fn, [*(left.tensors[p] for p in places), *(left.buffers[p] for p in others)], value)
    return True


def _check_kept(entry: Any, fn: Any, value: Any) -> None:
    """Check that an operation in place keeps the dtype of a parameter, before anything is changed."""
    if entry.dtype.is_complex:
        return
    turned = isinstance(value, complex) or (isinstance(value, Tensor) and value.is_complex())
    whole = not entry.dtype.is_floating_point
    real = isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())
    if turned or (whole and (real or fn is operator.truediv)):
        raise TypeError(
            f"the operation would turn {entry.name!r} from {entry.dtype} into another kind of number; convert the model "
            f"first, or leave the parameter out with set_param_config(operational=False, name={entry.name!r})"
        )


# -- other modules around parameters -----------------------------------------------------------------------------------


def rebuild(
    module: nn.Module, exchanged: dict[int, Any] | None = None, buffers: dict[str, Tensor] | None = None
) -> Any:
    """A particle with the very parameters of another one, or those given in their place by `id`.

    Args:
        module: The particle.
        exchanged: Parameters by the `id` of those that they take the place of.
        buffers: Buffers by name, instead of copies.
    """
    left = Operand(module, wrapped=True, live=True)
    states = left.states()
    version = left.version(states)
    parameters = [(exchanged or {}).get(id(tensor), tensor) for tensor in left.tensors]
    with leaves():
        held = result_buffers(left)
    for place, entry in enumerate(left.layout.buffers):
        held[place] = (buffers or {}).get(entry.name, held[place])
    made: nn.Module = object.__new__(left.structure.modules[0].kind)
    record = made.__dict__[RECORD] = Record(version, states[0].get(RECORD, ()))
    modules = assemble(made, left.structure, states, parameters, held)
    adorn(modules, states)
    if left.reading is not None:
        record.saw(left.reading._replace(modules=modules), states)
    version.data.species.enter(made)
    return made


def duplicate(module: nn.Module) -> Any:
    """A particle with copies of all values, whatever the configurations say."""
    left = Operand(module, wrapped=True, live=True)
    with leaves():
        parameters = {id(t): nn.Parameter(t.detach().clone(), requires_grad=t.requires_grad) for t in left.tensors}
    return rebuild(module, parameters)
