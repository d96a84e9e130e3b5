"""Operations on whole modules: the values of a result, one list of tensors, and the particle that has them."""

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
from ._operand import Operand, broadcast, check_kept, pair, read_number
from ._operators import InPlaceOperators
from ._record import LeafMode, Pending, ShellState, build, is_composing, record_nothing, refuse_graph
from ._skeleton import PENDING, select_plain_attributes, unwrap_kind
from ._species import require
from .base import NytoModuleBase
from .edits import clone_param
from .errors import StructureError

# Functions that torch applies to all tensors by one call, `torch._foreach_add` and the like (clone: since 2.13).
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


# From this many elements on a sum may be written over an operand that exists only inside the expression.
_LARGE = 1 << 20


def may_overwrite(x: Any) -> bool:
    """Whether the values of an operand are large, and those of a result that shares them with no other."""
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
    """A function of the values of a particle and of another particle, a number or a tensor.

    Args:
        fn: The function.
        x: The particle, or a part of one.
        other: The other operand.
        reflected: Whether the other operand is the left one.
        spare: Whether either exists only inside the expression, so that its values may be written over if they are large.
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
            # The factor waits for a sum, which applies it as `alpha`.
            return derive(left, left.tensors, closed=True, scale=left.scale * value, source=left.held)  # type: ignore[arg-type]
        return derive(left, apply(fn, value, left.values()) if reflected else apply(fn, left.values(), value))


def _list_spares(x: Any, other: Any, spare: tuple[bool, bool]) -> list[list[Tensor]]:
    """Return the values that may be written over."""
    pairs = zip((x, other), spare, strict=True)
    return [each.__dict__[PENDING].tensors for each, temporary in pairs if temporary and may_overwrite(each)]


def unary(fn: Callable[[Any], Any], x: Any) -> Any:
    """A function of the values of a particle, or of a part of one."""
    with record_nothing():
        left = Operand(x)
        return derive(left, apply(fn, left.values()))


def _read_given(left: Operand, other: Any) -> Any:
    """A number, or a tensor in the shape of everything that takes part; None for what is neither."""
    if isinstance(other, nn.Module) and not isinstance(other, InPlaceOperators):
        require(other)
    value = read_number(other)
    return broadcast(left, value) if isinstance(value, Tensor) and value.dim() > 0 else value


def apply(fn: Callable[..., Any], *operands: Any) -> Sequence[Tensor]:
    """A function of lists of tensors, and of numbers, tensor by tensor; the results are new tensors."""
    if fn in (operator.add, operator.mul) and type(operands[0]) is not list:
        operands = operands[::-1]
    count = len(next(each for each in operands if type(each) is list))
    columns = [each if type(each) is list else [each] * count for each in operands]
    sharded = any(map(any_sharded, columns))
    if count and not (sharded or is_composing()) and type(operands[0]) is list:
        foreach = _find_foreach(fn, operands[-1])
        if foreach is not None:
            return foreach(*operands)  # type: ignore[no-any-return]
    made: list[Tensor] = []
    for row in zip(*columns, strict=True):
        # Element by element means on what this process holds; the result has pieces like theirs.
        local = [each.to_local() if is_sharded(each) else each for each in row] if sharded else row
        new = fn(*local)
        new = new.clone() if any(new is old for old in local) else new
        made.append(piece_like(new, next(filter(is_sharded, row), None)) if sharded else new)
    return made


def _find_foreach(fn: Any, given: Any, suffix: str = "") -> Any:
    """What applies a function to all tensors by one call, given a list or number in the last place, or None."""
    name = _FOREACH.get(fn)
    if name is None or isinstance(given, complex):
        return None
    if not isinstance(given, Tensor):
        return getattr(torch, f"_foreach_{name}{suffix}", None)
    if given.device.type == "cpu" or name not in ("add", "mul", "div"):
        return None
    # Given a number on a device, the functions above would read it back.
    return getattr(torch.ops.aten, f"_foreach_{name}{suffix}").Tensor


def _add(x: Operand, y: Operand, sign: int, spares: list[list[Tensor]]) -> Sequence[Tensor]:
    """Return x + sign y, with the factors that are still to be applied to either.

    Args:
        x: An operand.
        y: Another one.
        sign: 1 or -1.
        spares: The values of those operands that may be written over.
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
    """Make a particle like an operand, with other values.

    Args:
        left: The operand.
        values: The values of its entries, each a tensor of its own.
        closed: Whether the values have the shapes and dtypes of the operand for sure.
        scale: A number that they are still to be multiplied with.
        source: The result whose tensors the values are, too.
    """
    tensors, shared = values if type(values) is list else list(values), False
    if left.sharded:
        # What was made whole, such as random numbers, is the same in every process: each keeps its piece.
        tensors = [cut_like(made, held) for made, held in zip(tensors, left.unscaled(), strict=True)]
    if not closed:
        tensors = [fit(e.name, e.shape, e.dtype, made) for e, made in zip(left.entries, tensors, strict=True)]
    if left.places is not None:
        given = dict(zip(left.places, tensors, strict=True))
        for place, config in left.inert.items():
            given[place] = left.parameters()[place].detach().clone()
            if not config.clone:
                # The result shares the parameter itself.
                build(left.module)
                given[place], shared = Operand(left.module, wrapped=True).tensors[place], True
        tensors = [given[place] for place in range(len(given))]
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
    """Return the module of a result, to be built when it is looked into.

    Plain attributes are there at once, because those of the class would be found in their place.
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
    """The result of an operation in the dtype of the parameter.

    Raises:
        StructureError: If it has another shape.
        TypeError: If it holds another kind of number.
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
    """Change a particle, or a part of one, in place; False if `other` is no operand."""
    with Guard(deferred=True) as guard:
        return _change(fn, x, other, guard)


def _change(fn: Any, x: Any, other: Any, guard: Guard) -> bool:
    left = Operand(x, live=True)
    if isinstance(other, NytoModuleBase):
        left, right = pair(left, Operand(other))
        given: Any = right.values()
    else:
        given = _read_given(left, other)
        if given is None:
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

    overwrite(left, act, given, fn is operator.truediv)
    return True


def overwrite(left: Operand, act: Callable[[list[Tensor], Any], Any], given: Any, divides: bool = False) -> None:
    """Change the values of an operand in place, all or none.

    Args:
        left: The operand.
        act: Changes a list of tensors, given another list or a number.
        given: One tensor per entry of the operand, or one number.
        divides: Whether the values become fractions, even of whole numbers.

    Raises:
        TypeError: If a parameter would have to become of another kind.
        ValueError: If elements of a parameter share memory.
    """
    refuse_graph()
    tensors = left.values()
    for place, entry in enumerate(left.entries):
        check_kept(entry.name, entry.dtype, given[place] if isinstance(given, list) else given, divides)
        if is_expanded(tensors[place]):
            raise ValueError(
                f"{entry.name!r} is expanded: its elements share memory, so it can't be changed; clone() it"
            )
    if left.sharded:
        tensors = list(map(piece_of, tensors))
        given = list(map(piece_of, given)) if isinstance(given, list) else given
    if tensors:
        with Guard(deferred=True, grad=False):
            # Torch's foreach functions refuse lazily conjugated and negated tensors; copies are written back.
            resolved = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
            act(resolved, given)
            for tensor, changed in zip(tensors, resolved, strict=True):
                if changed is not tensor:
                    tensor.copy_(changed)


class Only(InPlaceOperators):
    """Some of the parameters of a particle. Made by `only`.

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
    """A particle with the very parameters of another one, or those given in their place by `id`.

    Args:
        module: The particle.
        exchanged: Parameters by the `id` of those that they take the place of.
        buffers: Buffers by name, instead of copies.
        copies: Whether to copy all parameters, whatever the configurations say.
    """
    left = Operand(module, wrapped=True, live=True)
    with LeafMode():
        held = result_buffers(left)
        own: list[Any] = [clone_param(t) for t in left.tensors] if copies else left.tensors  # type: ignore[arg-type]
    for place, entry in enumerate(left.layout.buffers):
        held[place] = (buffers or {}).get(entry.name, held[place])
    tensors = [(exchanged or {}).get(id(tensor), tensor) for tensor in own]
    made = make_shell(_make_pending(left, tensors, held, 1, False, True))
    build(made)
    return made
