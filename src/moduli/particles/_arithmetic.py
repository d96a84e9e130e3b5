"""Operations on whole modules: the values of a result, one list of tensors, and the particle that has them."""

from __future__ import annotations

import mmap
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moduli.layout import any_sharded, cut_like, is_sharded, piece_like, piece_of

from ._config import result_buffers
from ._mode import LeafMode, is_composing, record_nothing, refuse_graph
from ._operand import Operand, broadcast, check_kept, pair, read_number
from ._record import ParticleRecord, Pending, adorn, build
from ._skeleton import PENDING, RECORD, assemble, facts_of, select_plain_attributes, unwrap_kind
from .base import NytoModuleBase
from .errors import StructureError

Values = Sequence[Tensor]
# One call for all tensors. The other functions are called tensor by tensor.
_FOREACH: dict[Any, Callable[..., Any] | None] = {
    operator.add: torch._foreach_add,
    operator.sub: torch._foreach_sub,
    operator.mul: torch._foreach_mul,
    operator.truediv: torch._foreach_div,
    operator.neg: torch._foreach_neg,
    operator.abs: torch._foreach_abs,
    torch.sqrt: torch._foreach_sqrt,
    torch.exp: torch._foreach_exp,
    torch.lerp: torch._foreach_lerp,
    operator.pos: getattr(torch, "_foreach_clone", None),  # since torch 2.13
}
# The same with a number that lies on a device, from which torch would read it back.
_BY_NUMBER = {operator.add: "_foreach_add", operator.mul: "_foreach_mul", operator.truediv: "_foreach_div"}
_IN_PLACE: dict[Any, Callable[..., Any]] = {
    operator.add: torch._foreach_add_,
    operator.sub: torch._foreach_sub_,
    operator.mul: torch._foreach_mul_,
    operator.truediv: torch._foreach_div_,
}
# What gives tensors of the dtype and shape of its operands, if both have one.
_CLOSED = frozenset((operator.add, operator.sub, operator.mul))
_SIGNS = {operator.add: 1, operator.sub: -1}
# Fresh memory costs more than the arithmetic on it: the system hands it out in pages of 4 KB, each at the price of a fault. An
# allocator keeps what was freed for the next result, but not where a whole model was freed at once. One mapping in huge pages
# has a five-hundredth of the faults.
# From this many elements on results have memory of their own.
_LARGE = 1 << 23

_ALIGNMENT = 64
_PAGE = 1 << 21
_HUGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


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
    left = Operand(module, scope, spare=temporary[0])
    if isinstance(other, NytoModuleBase):
        left, right = pair(left, Operand(other, spare=temporary[1]))
        first, second = (right, left) if reflected else (left, right)
        closed = fn in _CLOSED and not left.acting
        if fn in _SIGNS and not is_composing() and not left.sharded:
            return derive(left, lambda places: _add(first, second, _SIGNS[fn], places), closed)
        return derive(
            left, lambda places: apply(fn, pick(first.values(), places), pick(second.values(), places)), closed
        )
    value = read_number(other)
    if value is None:
        return NotImplemented
    if left.spare and fn is operator.mul and type(value) in (int, float) and not (left.acting or left.config()):
        return _scale(left, value)
    parts = broadcast(left, value) if isinstance(value, Tensor) and value.dim() > 0 else None

    def act(places: list[int] | None) -> Values:
        held = pick(left.values(), places)
        given = value if parts is None else pick(parts, places)
        return apply(fn, given, held) if reflected else apply(fn, held, given)

    return derive(left, act)


def unary(fn: Callable[[Any], Any], module: nn.Module, scope: tuple[str, ...] | None = None) -> nn.Module:
    """A function of the values of a particle."""
    left = Operand(module, scope)
    return derive(left, lambda places: apply(fn, pick(left.values(), places)))


def pick(values: list[Any], places: list[int] | None) -> list[Any]:
    """The values at some places, or all of them."""
    return values if places is None else [values[place] for place in places]


def apply(fn: Callable[..., Any], *operands: Any) -> Values:
    """A function of lists of tensors, and of numbers, tensor by tensor; the results are new tensors."""
    lists = [each for each in operands if type(each) is list]
    if not lists[0]:
        return []
    if any(map(any_sharded, lists)):
        return [_apply_to_pieces(fn, row) for row in zip(*_columns(operands, len(lists[0])), strict=True)]
    foreach = None if is_composing() else _FOREACH.get(fn)
    if foreach is not None and type(operands[0]) is list and not isinstance(operands[-1], Tensor | complex):
        return foreach(*operands)  # type: ignore[no-any-return]
    if foreach is not None and fn in _BY_NUMBER:
        held, given = operands if fn is operator.truediv or type(operands[0]) is list else operands[::-1]
        if type(held) is list and _is_number_elsewhere(given):
            return getattr(torch.ops.aten, _BY_NUMBER[fn]).Tensor(held, given)  # type: ignore[no-any-return]
    columns = _columns(operands, len(lists[0]))
    made = [fn(*row) for row in zip(*columns, strict=True)]
    return [new.clone() if any(new is old for old in row) else new for new, *row in zip(made, *columns, strict=True)]


def _is_number_elsewhere(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0 and value.device.type != "cpu"


def _columns(operands: Sequence[Any], count: int) -> list[list[Any]]:
    return [each if type(each) is list else [each] * count for each in operands]


def _apply_to_pieces(fn: Callable[..., Any], row: Sequence[Any]) -> Any:
    """A function of tensors element by element, on what this process holds of them; the result has pieces like theirs."""
    like = next((each for each in row if is_sharded(each)), None)
    local = [each.to_local() if is_sharded(each) else each for each in row]
    new = fn(*local)
    new = new.clone() if any(new is old for old in local) else new
    return new if like is None else piece_like(new, like)


def _add(x: Operand, y: Operand, sign: int, places: list[int] | None) -> Values:
    """The sum x + sign y, with the numbers that are still to be multiplied in, over an operand that is not needed again."""
    first, second = pick(x.unscaled(), places), pick(y.unscaled(), places)
    a, b = x.scale, sign * y.scale
    if not first:
        return []
    if x.spare and a == 1:
        torch._foreach_add_(first, second, alpha=b)
        return first
    if y.spare and b == 1:
        torch._foreach_add_(second, first, alpha=a)
        return second
    if a != 1:
        if b != 1:
            made = list(torch._foreach_mul(first, a))
            torch._foreach_add_(made, second, alpha=b)
            return made
        x, y, a, b, first, second = y, x, b, a, second, first
    large = y.layout.numel >= _LARGE and _is_large(second)
    if y.spare and large:
        return [torch.add(p, q, alpha=b, out=q) for p, q in zip(first, second, strict=True)]
    if large:
        rows = zip(first, second, _allocate_like(first), strict=True)
        return [torch.add(p, q, alpha=b, out=made) for p, q, made in rows]
    return torch._foreach_sub(first, second) if b == -1 else torch._foreach_add(first, second, alpha=b)


def _is_large(tensors: Sequence[Tensor]) -> bool:
    """Whether copies of tensors are better in a mapping of their own: many bytes of plain numbers on the CPU."""
    return (
        _HUGE is not None
        and sum(map(Tensor.numel, tensors)) >= _LARGE
        and all(t.device.type == "cpu" and t.is_floating_point() and t.layout is torch.strided for t in tensors)
    )


def _allocate_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Uninitialised contiguous tensors of the shapes and dtypes of others.

    Each has a storage of its own, so saving one of them writes that part only, and a version counter of its own. The
    mapping goes with the last of them.
    """
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = mmap.mmap(-1, end + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _HUGE is not None:
        memory.madvise(_HUGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _PAGE
    made = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        if not tensor.numel():
            made.append(torch.empty_like(tensor))
            continue
        part = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start + offset)
        made.append(part.view(tensor.shape))
    return made


def _scale(left: Operand, value: float) -> nn.Module:
    """A multiple of a result that exists only inside the expression: its tensors, with a number still to be multiplied in."""
    with LeafMode():
        buffers = result_buffers(left) if left.buffers else []
    made = Pending(
        left.structure, left.states(), left.tensors, left.flags(), buffers, left.version([]), left.scale * value
    )
    made.kinds = left.kinds()
    return _make_shell(made)


# -- results -----------------------------------------------------------------------------------------------------------


def derive(left: Operand, compute: Callable[[list[int] | None], Values], closed: bool = False) -> nn.Module:
    """Make a particle like an operand, with other values.

    Args:
        left: The operand.
        compute: Gives the values at some places of the operand's entries, or at all for None; each a tensor of its own.
            Buffers that it gives no values for are copied.
        closed: Whether the values have the shapes and dtypes of the operand for sure.
    """
    graph = is_composing()
    with record_nothing():
        kinds, states = left.kinds(), left.states()
        version = left.version(states)
        inert = {place: config for place, config in left.config().items() if not config.operational}
        places: list[int] | None = None
        if inert:
            values = left.values()
            places = [place for place in range(len(values)) if place not in inert]
            made = dict(zip(places, compute(places), strict=False)) if places else {}
            tensors = [made[p] if p in made else values[p].detach().clone() for p in range(len(values))]
        else:
            tensors = list(compute(None))
        if left.sharded:
            # What was made whole, such as random numbers, is the same in every process: each keeps its piece.
            tensors = [cut_like(made, held) for made, held in zip(tensors, left.unscaled(), strict=False)]
        if not closed:
            entries = left.entries
            for place in range(len(tensors)) if places is None else places:
                entry = entries[place]
                tensors[place] = fit(entry.name, entry.shape, entry.dtype, tensors[place])
        shared = False
        for place, config in inert.items():
            if not config.clone:
                tensors[place], shared = left.parameter(place), True
        buffers = []
        if left.buffers:
            count = len(left.layout)
            buffers, tensors = result_buffers(left, tensors[count:]), tensors[:count]
        result = Pending(left.structure, states, tensors, left.flags(), buffers, version)
        result.graph, result.kinds, result.shared = graph, kinds, shared
        return _make_shell(result)


def _make_shell(pending: Pending) -> nn.Module:
    """The module of a result, to be built when it is looked into.

    Plain attributes are there at once, because those of the class would be found in their place.
    """
    kind = unwrap_kind(pending.structure.modules[0].kind)
    shell: nn.Module = object.__new__(kind)
    plain, linked = select_plain_attributes(pending.states[0])
    shell.__dict__.update(plain)
    shell.__dict__[PENDING] = pending
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


def change(fn: Any, module: nn.Module, other: Any, scope: tuple[str, ...] | None = None) -> bool:
    """Change a particle in place; False if `other` is no operand."""
    refuse_graph()
    left = Operand(module, scope, live=True)
    if isinstance(other, NytoModuleBase):
        left, right = pair(left, Operand(other))
        given: Any = right.values()
    else:
        given = read_number(other)
        if given is None:
            return False
        given = broadcast(left, given) if isinstance(given, Tensor) and given.dim() > 0 else given
    overwrite(left, lambda tensors, values: _change(fn, tensors, values), given, fn is operator.truediv)
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
    """
    held, places = left.values(), [place for place in left.places() if left.entries[place].numel]
    for place in places:
        entry = left.entries[place]
        check_kept(entry.name, entry.dtype, given[place] if isinstance(given, list) else given, divides)
    tensors = pick(held, places)
    values = pick(given, places) if isinstance(given, list) else given
    if left.sharded:
        tensors = list(map(piece_of, tensors))
        values = list(map(piece_of, values)) if isinstance(values, list) else values
    if tensors:
        with torch.no_grad():
            act(tensors, values)


def _change(fn: Any, tensors: list[Tensor], given: Any) -> None:
    if fn in _IN_PLACE and not (isinstance(given, Tensor) and given.dim() == 0):
        _IN_PLACE[fn](tensors, given)
    elif fn in _BY_NUMBER and _is_number_elsewhere(given):
        getattr(torch.ops.aten, _BY_NUMBER[fn] + "_").Tensor(tensors, given)
    else:
        act = getattr(operator, f"i{fn.__name__}")
        for tensor, value in zip(tensors, given if isinstance(given, list) else [given] * len(tensors), strict=True):
            act(tensor, value)


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
    with LeafMode():
        held = result_buffers(left)
    for place, entry in enumerate(left.layout.buffers):
        held[place] = (buffers or {}).get(entry.name, held[place])
    made: nn.Module = object.__new__(unwrap_kind(left.structure.modules[0].kind))
    record = made.__dict__[RECORD] = ParticleRecord(version, states[0].get(RECORD, ()))
    modules = {0: made}
    assemble(modules, left.structure, states, parameters, held)
    adorn(modules, states, facts_of(left.structure).particles)
    if left.reading is not None:
        record.saw(left.reading._replace(modules=[modules[place] for place in range(len(modules))]), states)
    version.data.species.members.add(made)
    return made


def duplicate(module: nn.Module) -> Any:
    """A particle with copies of all values, whatever the configurations say."""
    left = Operand(module, wrapped=True, live=True)
    with LeafMode():
        parameters = {id(t): nn.Parameter(t.detach().clone(), requires_grad=t.requires_grad) for t in left.tensors}
    return rebuild(module, parameters)
