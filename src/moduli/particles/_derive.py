"""Operations on whole modules: reading operands where they are, and making the result."""

from __future__ import annotations

import copy
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moduli.layout import Group, diff

from . import _pass, _quick
from ._pass import Part
from ._pool import Slab
from ._record import Lazy, Record, Unborn, build, parameters_in, transformed
from ._species import adopt_children, conflicts, current, is_lagging, resolved
from ._template import LAZY, RECORD, Memory, Template, Walk, distinct_buffers
from .base import NytoModuleBase
from .errors import StructureError
from .kernel import _Operators
from .mtype import ParamConfig

__all__ = ["Operand", "binary", "change", "derive", "differentiable", "operand", "rebuilt", "unary"]

_REQUIRES_GRAD = attrgetter("requires_grad")
_SMALL = 1 << 19


class _Mode(threading.local):
    graph = False


_mode = _Mode()


@contextmanager
def differentiable() -> Iterator[None]:
    """Let operations on models keep the graph, so that gradients reach operands and coefficients.

    The parameters of a result are then tensors with a history instead of new leaves. Operations in place are refused.

    Example:
        >>> import torch
        >>> from moduli.particles import adopt, differentiable
        >>> a, b = adopt(torch.nn.Linear(1, 1)), adopt(torch.nn.Linear(1, 1))
        >>> t = torch.tensor(0.5, requires_grad=True)
        >>> with differentiable():
        ...     merged = a + t * (b - a)
        >>> merged(torch.ones(1)).sum().backward()
        >>> t.grad is not None
        True
    """
    before = _mode.graph
    _mode.graph = True
    try:
        yield
    finally:
        _mode.graph = before


class Operand:
    """One particle in an operation: its values where they are, and what is needed to make another one like it."""

    __slots__ = ("lazy", "live", "memory", "module", "record", "scope", "template", "tensors", "version")

    module: nn.Module
    template: Template
    memory: Memory | None
    record: Record | None
    lazy: Lazy | None
    tensors: list[Tensor]
    live: Walk | None
    version: Any

    def part(self, index: int, group: Group) -> Part:
        """The values of one group."""
        if self.lazy is not None:
            return Part(self.lazy.slab.vectors[index], self.lazy.scale)
        record, tensors = self.record, self.tensors
        single = len(self.template.layout.groups) == 1
        if record is not None and not torch.is_grad_enabled():
            if record.slab is not None or record.flats:
                same = list(map(Tensor.data_ptr, tensors)) == record.pointers and all(
                    map(Tensor.is_contiguous, tensors)
                )
                if same and record.slab is not None:
                    if record.quick is None and self.memory is not None and self.live is not None:
                        _quick.quicken(self.module, record, self.memory, self.live, tensors)
                    return Part(record.slab.vectors[index])
                if not same:
                    record.forget_values()
            chosen = tensors if single else [tensors[i] for i in group.indices]
            if not record.flats and group.numel * group.dtype.itemsize <= _SMALL:
                record.remember_values(tensors)
            if record.quick is None and single and self.memory is not None and self.live is not None:
                _quick.quicken(self.module, record, self.memory, self.live, tensors)
            flats = record.flats if single or not record.flats else [record.flats[i] for i in group.indices]
            return Part(None, 1.0, chosen, flats)
        return Part(None, 1.0, tensors if single else [tensors[i] for i in group.indices])

    def flags(self) -> tuple[bool, ...]:
        """Which parameters require gradients."""
        return self.lazy.flags if self.lazy is not None else tuple(map(_REQUIRES_GRAD, self.tensors))

    def buffers(self) -> list[Any]:
        """The buffers, each once."""
        if self.lazy is not None:
            return self.lazy.buffers
        return distinct_buffers(self.live) if self.live is not None and self.live.buffers else []

    def parameter(self, place: int) -> nn.Parameter:
        """One parameter itself."""
        if self.lazy is not None:
            build(self.module)
            self.__init__(self.module, scope=self.scope)  # type: ignore[misc]
        return self.tensors[place]  # type: ignore[return-value]

    def __init__(
        self, module: nn.Module, attributes: bool = True, scope: tuple[str, ...] | None = None, wrapped: bool = False
    ) -> None:
        self.module = module
        # Patterns of names, if the operation is to act on those parameters only.
        self.scope = scope
        lazy: Lazy | None = module.__dict__.get(LAZY)
        if lazy is not None and is_lagging(lazy.version):
            build(module)
            lazy = None
        self.lazy = lazy
        if lazy is not None:
            self.template, self.memory, self.record, self.live = lazy.template, lazy.memory, None, None
            self.tensors = []
            self.version = lazy.version
            return
        self.record, self.memory, self.tensors, self.live = current(module, attributes)
        if self.record.wrapped and not wrapped:
            raise StructureError(
                f"this {type(module).__name__} is wrapped by a ParticleModule; use the wrapper, or `with GetNytoModule(wrapper)`"
            )
        self.template = self.memory.template
        if self.record.version is None:
            self.record.version = Unborn()
        self.version = self.record.version

    def config(self) -> dict[int, ParamConfig]:
        """The configurations of parameters that have one, by place in the layout."""
        outside = {}
        if self.scope is not None:
            for place, entry in enumerate(self.template.layout):
                if not any(fnmatchcase(name, pattern) for name in entry.names for pattern in self.scope):
                    outside[place] = ParamConfig(operational=False)
        species = self.version.species if type(self.version) is Unborn else self.version.data.species
        if not species.configured:
            return outside
        version = self.version.version if isinstance(self.version, Unborn) else self.version
        if version is None:
            version = resolved(self.record or Record(self.version), self.template)
        places = {entry.name: place for place, entry in enumerate(self.template.layout.entries)}
        names = version.data.names
        plain = ParamConfig()
        found = {places[names[pid]]: config for pid, config in version.data.config.items() if config != plain}
        return {**outside, **found}


operand = Operand


def graphing() -> bool:
    """Whether operations are only composed of torch's own, for gradients or transforms to follow."""
    return _mode.graph or transformed()


@contextmanager
def _leaves() -> Iterator[None]:
    """Results are leaves that can be trained, whatever mode the caller is in."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            yield
        finally:
            torch._C._set_grad_enabled(before)


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
    with _leaves():
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
        made.slab.vectors = [vector.clone() for vector in made.slab.vectors]
        vectors = made.slab.vectors
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
    if scope is None and not _mode.graph:
        made: nn.Module | None = None
        if fn is operator.add or fn is operator.sub:
            if isinstance(other, NytoModuleBase):
                spared = direct and sys.getrefcount(other) <= _TEMPORARY
                made = _quick.total(fn, module, other, spared)
        elif fn is operator.mul and (type(other) is float or type(other) is int):
            made = _quick.multiple(module, other)
        if made is not None:
            return made
    left = Operand(module, scope=scope)
    plain = graphing()
    if isinstance(other, NytoModuleBase):
        right = Operand(other, False)
        matching(left, right)
        there: list[Any] = right.buffers() if left.template.buffer_names else []

        spare = _spare(right, sys.getrefcount(other)) if direct and not plain else None

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
        parts = _broadcast(left, value)
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


class _Probe(_Operators):
    """Finds out what the count of references to a right operand is when nothing else refers to it."""

    def _binary(self, fn: Any, other: Any, reflected: bool = False) -> int:
        return _probed(fn, self, other, reflected)


def _probed(fn: Any, module: Any, other: Any, reflected: bool = False) -> int:
    return sys.getrefcount(other)


def _temporary() -> int:
    """The count for a value that exists only inside an expression; 0 if it cannot be told from one with a name."""
    named = _Probe()
    alone: int = _Probe() + _Probe()
    with_name: int = _Probe() + named
    return alone if with_name > alone else 0


_TEMPORARY = _temporary()
_LARGE = 1 << 20


def _spare(right: Operand, count: int) -> Lazy | None:
    """The result that an operand is, if it exists only inside the expression that is being computed."""
    lazy = right.lazy
    # The operand refers to the module once more than the probe did.
    if lazy is None or count > _TEMPORARY + 1 or not _TEMPORARY or lazy.slab.users > 1 or lazy.shared or lazy.graph:
        return None
    groups = right.template.layout.groups
    if len(groups) != 1 or groups[0].numel * groups[0].dtype.itemsize < _LARGE or right.template.rich:
        return None
    return lazy


def matching(left: Operand, right: Operand) -> None:
    """Check that two operands have the same structure.

    Raises:
        StructureError: If they do not, with the first difference.
    """
    ours, theirs = left.template.layout, right.template.layout
    if ours is theirs:
        return
    if ours.entries is not theirs.entries and ours.fingerprint != theirs.fingerprint:
        raise conflicts(left.module, right.module, diff(ours, theirs))
    for x, y in zip(ours, theirs, strict=True):
        if x.device != y.device:
            raise StructureError(
                f"cannot combine {type(left.module).__name__} and {type(right.module).__name__}: {x.name!r} is on {x.device} "
                f"on the left and on {y.device} on the right; move one of them with .to()"
            )


def number(other: Any) -> Any:
    """A scalar operand as torch takes it, or None if it is no scalar or tensor."""
    if isinstance(other, bool | int | float | complex | Tensor):
        return other
    if isinstance(other, np.generic):
        return other.item()
    if isinstance(other, np.ndarray):
        return torch.from_numpy(other)
    return None


def _broadcast(left: Operand, value: Tensor) -> list[Tensor]:
    """A tensor in the shape of every parameter.

    Raises:
        StructureError: If it does not fit, or would change the shape of a parameter.
    """
    parts = []
    inert = {place for place, config in left.config().items() if not config.operational}
    for place, entry in enumerate(left.template.layout):
        if place in inert:
            parts.append(torch.zeros((), dtype=entry.dtype, device=entry.device).expand(entry.shape))
            continue
        try:
            shape = tuple(torch.broadcast_shapes(entry.shape, value.shape))  # type: ignore[no-untyped-call]
        except RuntimeError:
            shape = ()
        if shape != entry.shape:
            raise StructureError(
                f"a tensor of shape {tuple(value.shape)} does not fit {entry.name!r} of shape {entry.shape}: operations keep "
                "the shape of every parameter; use moduli.particles.only to act on some parameters"
            )
        parts.append(value.expand(entry.shape))
    return parts


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
            parts = _broadcast(left, value)
            _pass.inplace(fn, [left.tensors[p] for p in places], [parts[p] for p in places])
            return True
        for place in places:
            _keeps(layout.entries[place], fn, value)
        _pass.inplace(fn, [left.tensors[p] for p in places], value)
    return True


def refuse_graph() -> None:
    """Refuse operations in place where a graph is kept."""
    if _mode.graph:
        raise RuntimeError("inside differentiable() operations in place are refused: write a = a + b instead of a += b")


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


def tensors_of(which: Operand) -> list[Tensor]:
    """The values of an operand, one tensor per entry of its layout."""
    if which.lazy is None:
        return which.tensors
    vectors = which.lazy.slab.vectors if which.lazy.scale == 1.0 else which.lazy.own()
    return which.template.layout.views(vectors)


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
    with _leaves():
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
    with _leaves():
        parameters = {
            id(t): nn.Parameter(t.detach().clone(), requires_grad=t.requires_grad) for t in Operand(module).tensors
        }
    return reshelled(module, parameters)


@contextmanager
def recording() -> Iterator[None]:
    """No gradients are recorded, except where `differentiable` asks for them."""
    if graphing():
        yield
    else:
        with _leaves():
            yield


def rewrapped(wrapper: Any, inside: nn.Module) -> Any:
    """A module like a wrapper, with its mode, hooks and attributes, around another module."""
    held = wrapper._modules["root_module"]
    memo: dict[int, Any] = {id(held): inside}
    return copy.deepcopy(wrapper, memo)
