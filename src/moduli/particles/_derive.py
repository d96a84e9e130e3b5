"""Operations on whole modules: computing the values of a result, and making it."""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moduli.layout import Group

from . import _pass, _quick
from ._operand import (
    Operand,
    broadcast,
    graphing,
    keeps_graph,
    leaves,
    matching,
    number,
    recording,
    refuse_graph,
    spare_of,
    tensors_of,
)
from ._pass import Part
from ._pool import Slab
from ._record import Lazy, Record, build, parameters_in
from ._species import adopt_children
from ._template import LAZY, RECORD
from .base import NytoModuleBase
from .errors import StructureError
from .mtype import ParamConfig

__all__ = [
    "Operand",
    "binary",
    "briefly",
    "change",
    "derive",
    "duplicate",
    "graphing",
    "matching",
    "number",
    "rebuilt",
    "recording",
    "refuse_graph",
    "reshelled",
    "rewrapped",
    "tensors_of",
    "unary",
]


def derive(
    left: Operand,
    compute: Callable[[int, Group], tuple[Tensor, float]],
    buffer: Callable[[int, Tensor], Tensor] | None = None,
    spare: Lazy | None = None,
) -> nn.Module:
    """Make a particle like an operand, with other values.

    Args:
        left: The operand.
        compute: Gives the vector of each group, and a number to multiply it with.
        buffer: What the operation does to a buffer whose policy is to take part in it.
        spare: An operand that nobody can read after the operation; the vectors may be its own.
    """
    if graphing():
        return _derived(left, compute, buffer, True, None)
    with leaves():
        return _derived(left, compute, buffer, False, spare)


def _derived(
    left: Operand,
    compute: Callable[[int, Group], tuple[Tensor, float]],
    buffer: Callable[[int, Tensor], Tensor] | None,
    graph: bool,
    spare: Lazy | None,
) -> nn.Module:
    template = left.template
    groups = template.layout.groups
    vectors: list[Tensor] = []
    scale = 1.0
    config = left.config()
    for index, group in enumerate(groups):
        if config and all(place in config and not config[place].operational for place in group.indices):
            vector, factor = left.part(index, group).plainly().clone(), 1.0
        else:
            vector, factor = compute(index, group)
        if vector.dtype is not group.dtype or vector.shape[0] != group.numel:
            vector = _fitted(left, group, vector)
        if factor != 1.0 and (len(groups) > 1 or graph):
            vector, factor = vector * factor, 1.0
        vectors.append(vector)
        scale = factor
    slab = spare.slab if spare is not None and _alike(vectors, spare.slab.vectors) else None
    if slab is not None:
        held: list[Tensor] = []
    elif left.lazy is not None:
        if _alike(vectors, left.lazy.slab.vectors):
            slab = left.lazy.slab
        held = left.lazy.slab.vectors
    else:
        # The parameters of the operand are in these vectors, and may change.
        held = left.record.slab.vectors if left.record is not None and left.record.slab is not None else []
    if slab is None:
        slab = Slab([vector.clone() if any(vector is other for other in held) else vector for vector in vectors])
    buffers = _buffers(left, buffer) if template.buffer_names else []
    made = Lazy(template, left.memory, slab, left.flags(), buffers, left.version)
    made.scale = scale
    made.graph = graph
    if config:
        _exempt(left, made, config)
    shell: nn.Module = object.__new__(template.nodes[0].kind)
    if template.rich:
        return _copied(left, made, shell)
    state = shell.__dict__
    state.update(template.nodes[0].attributes)
    state[LAZY] = made
    return shell


def _alike(vectors: list[Tensor], others: list[Tensor]) -> bool:
    return bool(vectors) and len(vectors) == len(others) and all(x is y for x, y in zip(vectors, others, strict=True))


def _fitted(left: Operand, group: Group, vector: Tensor) -> Tensor:
    """The result of an operation in the dtype of the parameters."""
    name = left.template.layout.entries[group.indices[0]].name if group.indices else "the parameters"
    if vector.shape != (group.numel,):
        raise StructureError(f"the operation gave {tuple(vector.shape)} values for the {group.numel} of {name!r}")
    if (vector.is_floating_point() and group.dtype.is_floating_point) or group.dtype.is_complex:
        return vector.to(group.dtype)
    raise TypeError(
        f"the operation would turn {name!r} from {group.dtype} into {vector.dtype}; convert the model first, for instance "
        f"net.to({vector.dtype}), or leave the parameter out with set_param_config(operational=False, name={name!r})"
    )


def _exempt(left: Operand, made: Lazy, config: dict[int, ParamConfig]) -> None:
    """Give parameters that take no part in operations the value they had, or share them."""
    inert = {place: each for place, each in config.items() if not each.operational}
    if not inert:
        return
    shared: dict[int, nn.Parameter] = {}
    if made.graph:
        fresh = Slab([vector.clone() for vector in made.slab.vectors])
        fresh.users = 1
        made.slab.release()
        made.slab = fresh
        vectors = fresh.vectors
    else:
        vectors = made.own()
    layout = left.template.layout
    for place, each in inert.items():
        entry = layout.entries[place]
        held = left.parameter(place)
        with torch.no_grad():
            vectors[entry.group].narrow(0, entry.offset, entry.numel).copy_(held.detach().reshape(-1))
        if not each.clone:
            shared[place] = held
    made.shared = shared or None


def _buffers(left: Operand, buffer: Callable[[int, Tensor], Tensor] | None) -> list[Any]:
    made: list[Any] = []
    for place, (held, policy) in enumerate(zip(left.buffers(), left.template.policies, strict=True)):
        if policy == "share":
            made.append(held)
        elif policy == "reset":
            made.append(
                (torch.ones_like if left.template.buffer_names[place].endswith("running_var") else torch.zeros_like)(
                    held
                )
            )
        elif policy == "operate" and buffer is not None and (held.is_floating_point() or held.is_complex()):
            made.append(buffer(place, held).to(held.dtype))
        else:
            made.append(held.detach().clone())
    return made


def _copied(left: Operand, made: Lazy, shell: nn.Module) -> nn.Module:
    """The result of an operation on a model that must be copied at once."""
    template = made.template
    if made.graph:
        parameters: list[Any] = template.layout.views(made.slab.vectors)
        pointers: list[int] = []
        for place, held in (made.shared or {}).items():
            parameters[place] = held
    else:
        parameters, pointers = parameters_in(template, made.own(), made.flags, made.shared)
        for place, old in enumerate(left.tensors):
            if type(old) is not nn.Parameter and isinstance(old, nn.Parameter) and not made.shared:
                parameters[place] = type(old)(parameters[place].data, made.flags[place])
    if left.live is None:
        raise StructureError(f"{type(left.module).__name__} has no live modules to copy")
    result: nn.Module = template.copied(left.module, left.live, left.tensors, parameters, made.buffers)
    record = result.__dict__[RECORD] = Record(made.version)
    if left.record is not None:
        record.order = dict(left.record.order)
    if pointers and not made.shared:
        record.slab, record.pointers = made.slab, pointers
        made.slab.users += 1
    return result


# -- operators ---------------------------------------------------------------------------------------------------------


def unary(fn: Callable[[Any], Any], module: nn.Module, scope: tuple[str, ...] | None = None) -> nn.Module:
    """A function of the values of a particle."""
    left = Operand(module, scope=scope)
    plain = graphing()
    return derive(
        left, lambda index, group: _pass.unary(group, fn, left.part(index, group), plain), lambda _, held: fn(held)
    )


def briefly(fn: Callable[[Any, Any], Any], module: nn.Module, other: Any, count: int) -> nn.Module | None:
    """The short way of a sum, a difference or a multiple; None if the long way must be taken.

    Args:
        fn: The function.
        module: The particle.
        other: The other operand, on the right unless the function commutes.
        count: How many references to it the method of the particle counts.
    """
    if keeps_graph():
        return None
    if fn is operator.add or fn is operator.sub:
        return _quick.total(fn, module, other, count) if isinstance(other, NytoModuleBase) else None
    if fn is operator.mul and (type(other) is float or type(other) is int):
        return _quick.multiple(module, other)
    return None


def binary(
    fn: Callable[[Any, Any], Any],
    module: nn.Module,
    other: Any,
    reflected: bool = False,
    scope: tuple[str, ...] | None = None,
    direct: bool = False,
) -> Any:
    """A function of the values of a particle and of another particle, a number or a tensor.

    Args:
        fn: The function.
        module: The particle.
        other: The other operand.
        reflected: Whether the other operand is the left one.
        scope: Patterns of names, if the operation is to act on those parameters only.
        direct: Whether an operator passed `other` on as it was given, so that the references to it can be counted.
    """
    plain = graphing()
    left = Operand(module, scope=scope)
    if isinstance(other, NytoModuleBase):
        right = Operand(other, False)
        matching(left, right)
        there: list[Any] = right.buffers() if left.template.buffer_names else []

        spare = spare_of(right, sys.getrefcount(other)) if direct and not plain else None

        def compute(index: int, group: Group) -> tuple[Tensor, float]:
            y = right.part(index, group)
            return _pass.binary(
                group, fn, left.part(index, group), y if spare is None else y._replace(spare=True), reflected, plain
            )

        return derive(left, compute, lambda place, held: fn(held, there[place]), spare)
    value = number(other)
    if value is None:
        return NotImplemented
    if isinstance(value, Tensor) and value.dim() > 0:
        parts = broadcast(left, value)
        return derive(
            left,
            lambda index, group: _pass.binary(
                group, fn, left.part(index, group), Part(None, 1.0, [parts[i] for i in group.indices]), reflected, plain
            ),
        )
    return derive(
        left,
        lambda index, group: _pass.binary(group, fn, left.part(index, group), value, reflected, plain),
        lambda place, held: fn(value, held) if reflected else fn(held, value),
    )


def change(fn: Any, module: nn.Module, other: Any, scope: tuple[str, ...] | None = None) -> bool:
    """Change the parameters of a particle in place; False if `other` is no operand."""
    refuse_graph()
    if LAZY in module.__dict__:
        build(module)
    left = Operand(module, False, scope)
    layout = left.template.layout
    inert = {place for place, config in left.config().items() if not config.operational}
    places = [place for place in range(len(layout)) if place not in inert]
    with torch.no_grad():
        if isinstance(other, NytoModuleBase):
            right = Operand(other, False)
            matching(left, right)
            values = tensors_of(right)
            _pass.inplace(fn, [left.tensors[p] for p in places], [values[p] for p in places])
            return True
        value = number(other)
        if value is None:
            return False
        if isinstance(value, Tensor) and value.dim() > 0:
            parts = broadcast(left, value)
            _pass.inplace(fn, [left.tensors[p] for p in places], [parts[p] for p in places])
            return True
        for place in places:
            _keeps(layout.entries[place], fn, value)
        _pass.inplace(fn, [left.tensors[p] for p in places], value)
    return True


def _keeps(entry: Any, fn: Any, value: Any) -> None:
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


def rebuilt(root: nn.Module, old: Any, new: Any) -> Any:
    """New modules around given parameters, by identifier."""
    return reshelled(root, {id(old[key]): new[key] for key in old})


def reshelled(module: nn.Module, exchanged: dict[int, Any] | None = None) -> Any:
    """A particle with the very parameters of another one, or those given in their place by `id`."""
    if LAZY in module.__dict__:
        build(module)
    left = Operand(module, wrapped=True)
    parameters = [(exchanged or {}).get(id(tensor), tensor) for tensor in left.tensors]
    template, live = left.template, left.live
    with leaves():
        buffers = _buffers(left, None)
    if live is not None and template.rich:
        made: nn.Module = template.copied(module, live, left.tensors, parameters, buffers)
    else:
        made = object.__new__(template.nodes[0].kind)
        template.shell(made, parameters, buffers)
    record = made.__dict__[RECORD] = Record(left.version)
    if left.record is not None:
        record.order = dict(left.record.order)
    adopt_children(made)
    return made


def duplicate(module: nn.Module) -> Any:
    """A particle with copies of all values, whatever the configurations say."""
    if LAZY in module.__dict__:
        build(module)
    with leaves():
        parameters = {
            id(t): nn.Parameter(t.detach().clone(), requires_grad=t.requires_grad) for t in Operand(module).tensors
        }
    return reshelled(module, parameters)


def rewrapped(wrapper: Any, inside: nn.Module) -> Any:
    """A module like a wrapper, with its mode, hooks and attributes, around another module."""
    held = wrapper._modules["root_module"]
    memo: dict[int, Any] = {id(held): inside}
    return copy.deepcopy(wrapper, memo)
