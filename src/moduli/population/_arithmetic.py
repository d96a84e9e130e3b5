"""Arithmetic of populations: whole-matrix operations with as few passes over memory as written-out code would make."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any, Self

import torch
from torch import Tensor, nn

from moduli.particles._operand import _mode, refuse_graph

from ._core import Core
from ._deferred import Recipe, Term, accumulate, deferrable, negated, scaled, summed, terms_of
from ._operands import broadcast, check_dtype, matched, rows, scalar
from ._values import Values, deferred, fresh, wrap

__all__ = ["Arithmetic"]

_OUT: dict[Any, Callable[..., Tensor]] = {
    operator.add: torch.add,
    operator.sub: torch.sub,
    operator.mul: torch.mul,
    operator.truediv: torch.div,
    operator.pow: torch.pow,
    operator.floordiv: torch.floor_divide,
    operator.mod: torch.remainder,
}


def graphing() -> bool:
    """Whether operations keep a history, or are followed by a transform such as `torch.func.grad`."""
    return _mode.graph or torch._C._functorch.peek_interpreter_stack() is not None


def _binary(fn: Any, reflected: bool = False) -> Any:
    def method(self: Any, other: Any) -> Any:
        return self._combined(fn, other, reflected, getrefcount(self), getrefcount(other))

    name = "__" + ("r" if reflected else "") + fn.__name__ + "__"
    method.__name__ = name
    return method


def _changing(fn: Any) -> Any:
    def method(self: Any, other: Any) -> Any:
        return self._change(fn, other)

    method.__name__ = f"__i{fn.__name__}__"
    return method


# What torch calls when a tensor is the left operand.
_TORCH: dict[Any, Any] = {Tensor.add: operator.add, Tensor.sub: operator.sub, Tensor.mul: operator.mul}


def _from_torch(
    cls: type[Any], func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Take an operator over from a tensor on its left, which otherwise takes long to find out that it has no rule."""
    fn = _TORCH.get(func)
    if fn is None or kwargs or len(args) != 2 or not isinstance(args[1], cls) or not isinstance(args[0], Tensor):
        return NotImplemented
    return args[1]._combined(fn, args[0], True, getrefcount(args[1]), -1)


class _Probe:
    """Finds out how many references there are to operands that nothing else refers to."""

    __add__ = _binary(operator.add)
    __rmul__ = _binary(operator.mul, True)
    __torch_function__ = classmethod(_from_torch)

    def _combined(self, fn: Any, other: Any, reflected: bool, ours: int, theirs: int) -> Any:
        return ours, theirs


def _temporaries() -> tuple[int, int, int, int]:
    """The counts of operands that exist only inside an expression: a left one, a right one, and one of a reflected operator.

    The last is that of a reflected operator with a tensor on the left.

    Zero where they cannot be told from operands with a name.
    """
    left, right = named = _Probe(), _Probe()
    alone: Any = _Probe() + _Probe()
    with_names: Any = left + right
    reflected: Any = (3.0 * _Probe())[0]
    reflected_named: Any = (3.0 * left)[0]
    tensor: Any = torch.ones(())
    by_torch: Any = (tensor * _Probe())[0]
    by_torch_named: Any = (tensor * left)[0]
    del named
    return (
        alone[0] if with_names[0] > alone[0] else 0,
        alone[1] if with_names[1] > alone[1] else 0,
        reflected if reflected_named > reflected else 0,
        by_torch if by_torch_named > by_torch else 0,
    )


_LEFT, _RIGHT, _REFLECTED, _BY_TORCH = _temporaries()


class Arithmetic(Core):
    """The operators of populations."""

    __slots__ = ()

    __torch_function__ = classmethod(_from_torch)
    __add__ = _binary(operator.add)
    __radd__ = _binary(operator.add, True)
    __sub__ = _binary(operator.sub)
    __rsub__ = _binary(operator.sub, True)
    __mul__ = _binary(operator.mul)
    __rmul__ = _binary(operator.mul, True)
    __truediv__ = _binary(operator.truediv)
    __rtruediv__ = _binary(operator.truediv, True)
    __pow__ = _binary(operator.pow)
    __rpow__ = _binary(operator.pow, True)
    __floordiv__ = _binary(operator.floordiv)
    __rfloordiv__ = _binary(operator.floordiv, True)
    __mod__ = _binary(operator.mod)
    __rmod__ = _binary(operator.mod, True)
    __iadd__ = _changing(operator.add)
    __isub__ = _changing(operator.sub)
    __imul__ = _changing(operator.mul)
    __itruediv__ = _changing(operator.truediv)
    __ipow__ = _changing(operator.pow)
    __ifloordiv__ = _changing(operator.floordiv)
    __imod__ = _changing(operator.mod)

    def __neg__(self) -> Self:
        return self._mapped(torch.neg)

    def __pos__(self) -> Self:
        return self._mapped(torch.clone)

    def __abs__(self) -> Self:
        return self._mapped(torch.abs)

    # -- results -----------------------------------------------------------------------------------------------------

    def _combined(self, fn: Any, other: Any, reflected: bool, ours: int, theirs: int) -> Any:
        if self._members:
            self._members.check()
        if isinstance(other, Core):
            matched(self, other)
            if graphing() or self._graph or other._graph:
                return self._graphed([fn(x, y) for x, y in zip(self._plain(), other._plain(), strict=True)])
            there = other._buffers
            waiting = _later_pair(self, other, fn, ours <= _LEFT, theirs <= _RIGHT)
            return self._finished(
                fn,
                waiting or _pair(self, other, fn, ours <= _LEFT, theirs <= _RIGHT),
                ours <= _LEFT,
                lambda name, held: fn(held, there[name]),
            )
        graph = graphing() or self._graph
        if isinstance(other, nn.Module):
            values: list[Any] = list(rows(self, other, graph))
        else:
            value = scalar(other)
            if value is None:
                return NotImplemented
            values = broadcast(self, value) if isinstance(value, Tensor) else [value] * len(self.layout.groups)
        inert = self._inert()
        for group, each in zip(self.layout.groups, values, strict=True):
            if not inert or not self._left_out(group):
                check_dtype(self.layout, group, fn, each)
        if graph:
            pairs = zip(self._plain(), values, strict=True)
            return self._graphed([fn(y, x) if reflected else fn(x, y) for x, y in pairs], other if reflected else None)
        spare = 0 < ours <= (_LEFT if not reflected else _BY_TORCH if theirs < 0 else _REFLECTED)
        from_module = other if reflected and isinstance(other, nn.Module) else None
        made = _later(self, fn, values, reflected, spare)
        on_buffers = _operated(fn, other, reflected) if self._buffers else None
        if made is not None:
            return self._finished(fn, made, spare, on_buffers, from_module)
        if fn is operator.mul and spare and self._spare() and _is_factor(values):
            # Nobody else has these values: the factor waits for the next operation.
            self._values.pending = _times(self._values.pending, values)
            return self
        made = _with_values(self, fn, values, reflected, spare)
        return self._finished(fn, made, spare, on_buffers, from_module)

    def _mapped(self, fn: Callable[..., Tensor]) -> Self:
        """A function of every value."""
        if self._members:
            self._members.check()
        if graphing() or self._graph:
            return self._graphed([fn(x) for x in self._plain()])
        with torch.no_grad(), torch.inference_mode(False):
            values = fresh(self.layout, self._count)
            for out, matrix in zip(values.matrices, self._values.settle(), strict=True):
                out.copy_(matrix) if fn is torch.clone else fn(matrix, out=out)
        return self._finished(fn, values, False, lambda _, held: fn(held))

    def _finished(
        self,
        fn: Any,
        values: Values,
        spare: bool,
        buffer: Callable[[str, Tensor], Tensor] | None = None,
        module: nn.Module | None = None,
    ) -> Self:
        """The result of an operation: values, with buffers according to their policies."""
        inert = self._inert() if values.recipe is None else ()
        if inert:
            ours = self.layout.views(self._values.settle())
            with torch.no_grad():
                for place, view in enumerate(self.layout.views(values.matrices)):
                    if place in inert:
                        view.copy_(ours[place])
        if not self._buffers:
            buffers = {}
        elif module is not None:
            buffers = {n: b.detach().expand(self._count, *b.shape).clone() for n, b in module.named_buffers()}
        else:
            buffers = self._kept_buffers(spare, buffer)
        return self._made(values, self._count, buffers)

    def _graphed(self, matrices: list[Tensor], module: Any = None) -> Self:
        """A result that keeps its history."""
        made = self._made(
            wrap([m.to(g.dtype) for m, g in zip(matrices, self.layout.groups, strict=True)]), self._count, {}
        )
        made._graph = True
        with torch.no_grad():
            if isinstance(module, nn.Module):
                made._buffers = {n: b.detach().expand(self._count, *b.shape).clone() for n, b in module.named_buffers()}
            else:
                made._buffers = {name: held.clone() for name, held in self._buffers.items()}
        return made

    def _change(self, fn: Any, other: Any) -> Any:
        refuse_graph()
        if self._graph:
            raise RuntimeError("a population that keeps its history cannot be changed in place: write a = a + b")
        if self._members:
            self._members.check()
        count = len(self.layout.groups)
        pending: Any = None
        if isinstance(other, Core):
            matched(self, other)
            if other._values.pending is not None and fn not in (operator.add, operator.sub):
                other._values.settle()
            pending = other._values.pending
            if fn in (operator.add, operator.sub) and self._add_later(fn, other):
                return self
            values: list[Any] = [matrix.detach() for matrix in other._values.matrices]
        elif isinstance(other, nn.Module):
            values = list(rows(self, other))
        else:
            value = scalar(other)
            if value is None:
                return NotImplemented
            values = broadcast(self, value) if isinstance(value, Tensor) else [value] * count
        for group, each in zip(self.layout.groups, values, strict=True):
            if not self._left_out(group):
                check_dtype(self.layout, group, fn, each)
        inert = self._inert()
        with torch.no_grad():
            matrices = self._values.settle()
            kept = {p: v.clone() for p, v in enumerate(self.layout.views(matrices)) if p in inert} if inert else {}
            for group, matrix, value in zip(self.layout.groups, matrices, values, strict=True):
                if self._left_out(group):
                    continue
                value = value.detach() if isinstance(value, Tensor) else value
                if pending is not None:
                    _accumulate(matrix, value, pending, 1.0 if fn is operator.add else -1.0)
                else:
                    _OUT[fn](matrix, value, out=matrix)
            for place, held in kept.items():
                self.layout.views(matrices)[place].copy_(held)
        self._changed()
        return self

    def _add_later(self, fn: Any, other: Core) -> bool:
        """Add something that nobody has computed yet, if that is what the other operand is."""
        theirs, recipe = other._values, other._values.recipe
        if recipe is None or theirs is self._values or not deferrable(self):
            return False
        with torch.no_grad():
            self._values.settle() if self._values.pending is not None else self._values.compute()
            if theirs.recipe is None:
                return False
            if len(recipe.terms) == 1 and not any(operand is self._values for operand in recipe.terms[0][1:]):
                # A multiple is added without being made.
                accumulate(self._values.matrices[0], recipe.terms if fn is operator.add else negated(recipe.terms))
            else:
                # Computed and added block by block: what it reads here is read before it changes.
                self._values.serve(theirs)
                theirs.compute(self._values.held[0], 1.0 if fn is operator.add else -1.0)
        self._changed()
        return True


# -- results that wait -------------------------------------------------------------------------------------------------


def _later_pair(left: Core, right: Core, fn: Any, left_spare: bool, right_spare: bool) -> Values | None:
    """A sum or difference of two populations that is computed later, or None if it has to be computed now."""
    if fn not in (operator.add, operator.sub) or not deferrable(left) or right._graph:
        return None
    ours, theirs = terms_of(left, left_spare), terms_of(right, right_spare)
    terms = None if ours is None or theirs is None else summed(fn, ours, theirs)
    return None if terms is None else deferred(Recipe(left.layout, left._count, terms))


def _later(left: Core, fn: Any, values: list[Any], reflected: bool, spare: bool) -> Values | None:
    """An operation with numbers or a row that is computed later, or None if it has to be computed now."""
    if fn not in (operator.add, operator.sub, operator.mul) or not deferrable(left):
        return None
    value = values[0]
    if isinstance(value, Tensor):
        # What the tensor holds may change before it is read.
        value = value.detach().clone()
    if fn is operator.mul:
        ours = terms_of(left, spare) if _is_factor(values) else None
        terms = None if ours is None else scaled(ours, value if isinstance(value, Tensor) else float(value))
    elif isinstance(value, Tensor) and value.numel() == left.layout.numel:
        ours, theirs = terms_of(left, spare), [Term(1.0, value.reshape(-1), None)]
        terms = None if ours is None else summed(fn, theirs, ours) if reflected else summed(fn, ours, theirs)
    else:
        return None
    return None if terms is None else deferred(Recipe(left.layout, left._count, terms))


# -- numbers -----------------------------------------------------------------------------------------------------------


def _is_factor(values: list[Any]) -> bool:
    """Whether operands are numbers, or one number per member."""
    return bool(values) and all(
        isinstance(v, int | float) or (isinstance(v, Tensor) and (v.dim() == 0 or v.shape[-1:] == (1,))) for v in values
    )


def _times(pending: Any, values: list[Any]) -> Any:
    # All groups were given the same numbers; that of the highest precision is kept.
    factor = max(values, key=lambda v: v.element_size() if isinstance(v, Tensor) else 0)
    return factor if pending is None else pending * factor


def _accumulate(target: Tensor, source: Tensor, factor: Any, sign: float) -> Tensor:
    """Add sign * factor * source, in one pass."""
    if factor is None:
        # Without a factor these are faster than with the factor 1.
        return target.add_(source) if sign == 1.0 else target.sub_(source)
    if isinstance(factor, Tensor):
        return target.addcmul_(source, factor.to(target.dtype), value=sign)
    return target.add_(source, alpha=sign * factor)


def _pair(left: Core, right: Core, fn: Any, left_spare: bool, right_spare: bool) -> Values:
    """An operation on two populations, written over one of them if nobody can read it afterwards."""
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
            _OUT[fn](a, b, out=target)
        return out


def _sum(left: Core, x: Values, y: Values, sign: float, left_spare: bool, right_spare: bool) -> Values:
    """The sum x + sign y, with factors that wait folded in: one pass, or two where both operands have a factor."""
    a, b = x.pending, y.pending
    if left_spare and a is not None and right_spare and b is None and sign == 1.0:
        x, y, a, b = y, x, b, a
        left_spare, right_spare = right_spare, left_spare
    if left_spare:
        for target, source in zip(x.settle(), y.matrices, strict=True):
            _accumulate(target, source, b, sign)
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
            _accumulate(target, source, a, 1.0)
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
            _accumulate(out, q, b, sign)
    return values


def _with_values(left: Core, fn: Any, values: list[Any], reflected: bool, spare: bool) -> Values:
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
            _OUT[fn](value, matrix, out=target) if reflected else _OUT[fn](matrix, value, out=target)
        return out


def _floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _operated(fn: Any, other: Any, reflected: bool) -> Callable[[str, Tensor], Tensor] | None:
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
