"""Operations on whole modules: computing the tensors of a result, and making the particle that has them."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from moduli._torch import keep_from_tracing
from moduli.kernels import allocate_large
from moduli.layout import Guard, any_sharded, cut_like, is_expanded, is_sharded, piece_like, piece_of

from ._config import result_buffers
from ._facts import unwrap_kind
from ._modes import LeafMode, is_composing, record_nothing, refuse_graph
from ._operand import Operand, broadcast, check_kept, pair, read_number
from ._operators import InPlaceOperators
from ._record import Pending, ShellState, build
from ._skeleton import PENDING, select_plain_attributes
from ._species import require
from .base import NytoModuleBase
from .edits import clone_param
from .errors import StructureError

# Functions that torch applies to a list of tensors in one call, `torch._foreach_add` and the like (clone: since 2.13).
_FOREACH: dict[Any, str] = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.neg: "neg",
    operator.abs: "abs",
    operator.pos: "clone",
    torch.sqrt: "sqrt",
    torch.exp: "exp",
    torch.lerp: "lerp",
}
_SIGNS = {operator.add: 1, operator.sub: -1}


# Sums of at least this many elements may be written into an operand that exists only inside the expression.
_LARGE = 1 << 20


def may_overwrite(x: Any) -> bool:
    """Whether an operand is an unbuilt result with large values that it shares with no other."""
    if not isinstance(x, NytoModuleBase) or PENDING not in x.__dict__:
        return False
    pending: Pending = x.__dict__[PENDING]
    return pending.structure.layout.numel >= _LARGE and pending.is_sole


def binary(
    fn: Callable[[Any, Any], Any],
    x: Any,
    other: Any,
    reflected: bool = False,
    spare: tuple[bool, bool] | None = None,
) -> Any:
    """Apply a function to a particle and to another particle, a number or a tensor, and return the resulting particle.

    Args:
        fn: The function.
        x: The particle, or a part of one.
        other: The other operand.
        reflected: Whether the other operand is the left one.
        spare: For each operand, whether it exists only inside the expression, so that large values may be overwritten.
    """
    with record_nothing():
        left = Operand(x)
        if isinstance(other, NytoModuleBase):
            spares = [] if spare is None else _list_spares(x, other, spare)
            left, right = pair(left, Operand(other))
            first, second = (right, left) if reflected else (left, right)
            if fn in _SIGNS and not is_composing() and not left.sharded:
                # A sum has the dtypes and shapes of its operands.
                return derive(left, _add(first, second, _SIGNS[fn], spares), closed=not left.acting)
            return derive(left, apply(fn, first.values(), second.values()))
        value = _read_given(left, other)
        if value is None:
            return NotImplemented
        if left.is_scalable and fn is operator.mul and type(value) in (int, float):
            # Defer the scalar factor: a following sum applies it as `alpha`.
            return derive(left, left.tensors, closed=True, scale=left.scale * value, source=left.held)  # type: ignore[arg-type]
        return derive(left, apply(fn, value, left.values()) if reflected else apply(fn, left.values(), value))


def _list_spares(x: Any, other: Any, spare: tuple[bool, bool]) -> list[list[Tensor]]:
    """Return the lists of tensors that may be overwritten."""
    pairs = zip((x, other), spare, strict=True)
    return [each.__dict__[PENDING].tensors for each, temporary in pairs if temporary and may_overwrite(each)]


def unary(fn: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to the values of a particle, or of a part of one, and return the resulting particle."""
    with record_nothing():
        left = Operand(x)
        return derive(left, apply(fn, left.values()))


def _read_given(left: Operand, other: Any) -> Any:
    """Return a number, or a tensor expanded to the shape of every entry; None if `other` is neither."""
    if isinstance(other, nn.Module) and not isinstance(other, InPlaceOperators):
        require(other)
    value = read_number(other)
    return broadcast(left, value) if isinstance(value, Tensor) and value.dim() > 0 else value


def apply(fn: Callable[..., Any], *operands: Any) -> Sequence[Tensor]:
    """Apply a function to lists of tensors, and to numbers, tensor by tensor; the results are new tensors."""
    if fn in (operator.add, operator.mul) and type(operands[0]) is not list:
        operands = operands[::-1]
    count = len(next(each for each in operands if type(each) is list))
    columns = [each if type(each) is list else [each] * count for each in operands]
    sharded = any(map(any_sharded, columns))
    if count and not (sharded or is_composing()) and type(operands[0]) is list:
        foreach = _find_foreach(fn, operands[-1])
        if foreach is not None:
            return foreach(*operands)  # type: ignore[no-any-return]
    return [_apply_one(fn, row, sharded) for row in zip(*columns, strict=True)]


def _apply_one(fn: Callable[..., Any], row: tuple[Any, ...], sharded: bool) -> Tensor:
    """Apply a function to one tensor of each operand; elementwise functions of DTensors act on the local shards."""
    local = [each.to_local() if is_sharded(each) else each for each in row] if sharded else row
    result: Tensor = fn(*local)
    result = result.clone() if any(result is operand for operand in local) else result
    return piece_like(result, next(filter(is_sharded, row), None)) if sharded else result


def _find_foreach(fn: Any, last: Any, suffix: str = "") -> Any:
    """Return torch's function for a list of tensors, depending on the last argument (a list or number); None if there is none."""
    name = _FOREACH.get(fn)
    if name is None or isinstance(last, complex):
        return None
    if not isinstance(last, Tensor):
        return getattr(torch, f"_foreach_{name}{suffix}", None)
    if last.device.type == "cpu" or name not in ("add", "mul", "div"):
        return None
    # The functions above would copy a number on a device to the host.
    return getattr(torch.ops.aten, f"_foreach_{name}{suffix}").Tensor


def _add(x: Operand, y: Operand, sign: int, spares: list[list[Tensor]]) -> Sequence[Tensor]:
    """Return x + sign y, applying the deferred factors of both.

    Args:
        x: An operand.
        y: Another one.
        sign: 1 or -1.
        spares: The values of those operands that may be overwritten.
    """
    first, second, a, b = x.unscaled(), y.unscaled(), x.scale, sign * y.scale
    if not first:
        return []
    if a != 1 and b != 1:
        first, a = list(torch._foreach_mul(first, a)), 1
    elif a != 1:
        x, y, a, b, first, second = y, x, b, a, second, first
    outs = (
        next((each for each in (second, first) if any(each is values for values in spares)), None) if spares else None
    )
    outs = allocate_large(first, x.layout.numel) if outs is None else outs
    if outs is None:
        return torch._foreach_add(first, second, alpha=b)
    return [torch.add(p, q, alpha=b, out=out) for p, q, out in zip(first, second, outs, strict=True)]


# -- results -----------------------------------------------------------------------------------------------------------


def derive(
    left: Operand, values: Sequence[Tensor], closed: bool = False, scale: float = 1, source: Pending | None = None
) -> nn.Module:
    """Return a particle like an operand, with other values.

    Args:
        left: The operand.
        values: The values of its entries, distinct tensors.
        closed: Whether the values are known to have the shapes and dtypes of the operand.
        scale: A deferred factor of the values.
        source: The result with which the values share their tensors.
    """
    tensors, shared = values if type(values) is list else list(values), False
    if left.sharded:
        # Whole tensors, such as random numbers, are the same in every process: each slices its shard.
        tensors = [cut_like(value, own) for value, own in zip(tensors, left.unscaled(), strict=True)]
    if not closed:
        tensors = [fit(e.name, e.shape, e.dtype, value) for e, value in zip(left.entries, tensors, strict=True)]
    if left.places is not None:
        values_by_place = dict(zip(left.places, tensors, strict=True))
        for place, config in left.inert.items():
            values_by_place[place] = left.parameters()[place].detach().clone()
            if not config.clone:
                # The result shares the parameter itself.
                build(left.module)
                values_by_place[place], shared = Operand(left.module, wrapped=True).tensors[place], True
        tensors = [values_by_place[place] for place in range(len(values_by_place))]
    count = len(left.layout)
    buffers = result_buffers(left, tensors[count:]) if left.buffers else []
    tensors = tensors if len(tensors) == count else tensors[:count]
    pending = _make_pending(left, tensors, buffers, scale, shared, is_composing())
    if source is not None:
        pending.share_with(source)
    return make_shell(pending)


def _make_pending(left: Operand, tensors: list[Any], buffers: list[Any], *facts: Any) -> Pending:
    version = left.version()
    return Pending(left.structure, left.states, tensors, left.flags, buffers, version, *facts)


def make_shell(pending: Pending) -> nn.Module:
    """Return the module of a result, which is built when its registries are first accessed.

    Plain attributes are set at once, because lookup would otherwise give those of the class.
    """
    kind = unwrap_kind(pending.structure.modules[0].kind)
    shell: nn.Module = object.__new__(kind)
    plain, linked = select_plain_attributes(pending.states)
    state = ShellState(plain)
    state[PENDING], state.kind, state.shell = pending, kind, weakref.ref(shell)
    object.__setattr__(shell, "__dict__", state)
    if linked and any(hasattr(kind, name) for name in linked):
        build(shell)
    return shell


def fit(name: str, shape: Sequence[int], dtype: torch.dtype, value: Tensor) -> Tensor:
    """Return the result of an operation, converted to the dtype of the parameter.

    Args:
        name: The parameter, for errors.
        shape: Its shape.
        dtype: Its dtype.
        value: The result.

    Raises:
        StructureError: If the result has another shape.
        TypeError: If the dtype cannot represent it, such as fractions in an integer parameter.
    """
    if value.shape != shape:
        raise StructureError(
            f"the operation would turn {name!r} from shape {tuple(shape)} into {tuple(value.shape)}; operations keep the shape of "
            "every parameter"
        )
    if value.dtype is dtype:
        return value
    if (value.is_floating_point() and dtype.is_floating_point) or dtype.is_complex:
        return value.to(dtype)
    raise TypeError(
        f"the operation would turn {name!r} from {dtype} into {value.dtype}; convert the model first, for instance "
        f"net.to({value.dtype}), or leave the parameter out with set_param_config(operational=False, name={name!r})"
    )


# -- in place ----------------------------------------------------------------------------------------------------------


def change(fn: Any, x: Any, other: Any) -> bool:
    """Apply an in-place operation to a particle, or to a part of one; return False if `other` is no operand.

    Args:
        fn: The function of `operator` without "i", such as `operator.add`.
        x: The particle, or a part of one.
        other: The other operand.
    """
    with Guard(deferred=True) as guard:
        return _change(fn, x, other, guard)


def _change(fn: Any, x: Any, other: Any, guard: Guard) -> bool:
    left = Operand(x, live=True)
    if isinstance(other, NytoModuleBase):
        left, right = pair(left, Operand(other))
        operand: Any = right.values()
    else:
        operand = _read_given(left, other)
        if operand is None:
            return False

    def act(tensors: list[Tensor], values: Any) -> None:
        foreach = _find_foreach(fn, values, "_")
        if foreach is not None:
            foreach(tensors, values)
            return
        one = getattr(operator, f"i{fn.__name__}")
        guard.tensors(tensors)  # one call for all of them changes all or none
        for tensor, value in zip(tensors, values if isinstance(values, list) else [values] * len(tensors), strict=True):
            one(tensor, value)

    overwrite(left, act, operand, fn is operator.truediv)
    return True


def overwrite(left: Operand, act: Callable[[list[Tensor], Any], Any], operand: Any, divides: bool = False) -> None:
    """Change the values of an operand in place, all or none.

    Args:
        left: The operand that is changed.
        act: Changes a list of tensors, using another list or a number.
        operand: The other operand: one tensor per entry, or one number.
        divides: Whether integers would become fractions.

    Raises:
        TypeError: If the dtype of a parameter cannot represent the result.
        ValueError: If elements of a parameter share memory.
    """
    refuse_graph()
    tensors = left.values()
    for place, entry in enumerate(left.entries):
        check_kept(entry.name, entry.dtype, operand[place] if isinstance(operand, list) else operand, divides)
        if is_expanded(tensors[place]):
            raise ValueError(
                f"{entry.name!r} is expanded: its elements share memory, so it can't be changed; clone() it"
            )
    if left.sharded:
        tensors = list(map(piece_of, tensors))
        operand = list(map(piece_of, operand)) if isinstance(operand, list) else operand
    if tensors:
        with Guard(deferred=True, grad=False):
            # Torch's foreach functions raise for lazily conjugated and negated tensors; copies are written back.
            resolved = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
            act(resolved, operand)
            for tensor, changed in zip(tensors, resolved, strict=True):
                if changed is not tensor:
                    tensor.copy_(changed)


class Only(InPlaceOperators):
    """A selection of a particle's parameters. Made by `only`.

    Example:
        >>> from moduli.particles import adopt, only
        >>> only(adopt(nn.Linear(2, 1)), "bias")
        only(Linear, 'bias')
    """

    def __init__(self, module: nn.Module, patterns: tuple[str, ...]) -> None:
        self.module = module
        self.patterns = patterns

    def __repr__(self) -> str:
        return f"only({type(self.module).__name__}, {', '.join(map(repr, self.patterns))})"

    def _binary(self, fn: Callable[[Any, Any], Any], other: Any, reflected: bool = False) -> Any:
        return binary(fn, self, other.module if isinstance(other, Only) else other, reflected)

    def _unary(self, fn: Callable[[Any], Any]) -> Any:
        return unary(fn, self)

    def _inplace(self, fn: Callable[[Any, Any], Any], other: Any) -> Self:
        return self if change(fn, self, other.module if isinstance(other, Only) else other) else NotImplemented


keep_from_tracing(Only._binary, Only._unary, Only._inplace)


# -- other modules around parameters -----------------------------------------------------------------------------------


def rebuild(
    module: nn.Module,
    exchanged: dict[int, Any] | None = None,
    buffers: dict[str, Tensor] | None = None,
    copies: bool = False,
) -> Any:
    """Return a particle of the same structure with the same parameter objects as another one, some of them replaced.

    Args:
        module: The particle.
        exchanged: Parameters by the `id` of those that they replace.
        buffers: Buffers by name, instead of copies.
        copies: Whether to copy all parameters instead.
    """
    left = Operand(module, wrapped=True, live=True)
    with LeafMode():
        buffer_values = result_buffers(left)
        own: list[Any] = [clone_param(t) for t in left.tensors] if copies else left.tensors  # type: ignore[arg-type]
    for place, entry in enumerate(left.layout.buffers):
        buffer_values[place] = (buffers or {}).get(entry.name, buffer_values[place])
    tensors = [(exchanged or {}).get(id(tensor), tensor) for tensor in own]
    particle = make_shell(_make_pending(left, tensors, buffer_values, 1, False, True))
    build(particle)
    return particle
