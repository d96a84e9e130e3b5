"""Arithmetic of populations: whole-matrix operations with as few passes over memory as written-out code would make."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from moduli._torch import count_references, in_transform
from moduli.particles import is_differentiable, refuse_graph

from ._core import Core
from ._deferred import accumulate, deferrable, negate_terms
from ._members import repeat_buffers
from ._operands import broadcast, check_dtype, check_match, rows, scalar
from ._results import OUT, defer, defer_pair, make_buffer_operation, operate_with_values, pair
from ._values import Values, allocate


def keeps_history() -> bool:
    """Whether operations keep a history, or are followed by a transform such as `torch.func.grad`."""
    return is_differentiable() or in_transform()


def _binary(fn: Any, reflected: bool = False) -> Any:
    def method(self: Any, other: Any) -> Any:
        return self._combine_with(fn, other, reflected, count_references(self), count_references(other))

    name = "__" + ("r" if reflected else "") + fn.__name__ + "__"
    method.__name__ = name
    return method


def _make_in_place(fn: Any) -> Any:
    def method(self: Any, other: Any) -> Any:
        return self._change(fn, other)

    method.__name__ = f"__i{fn.__name__}__"
    return method


# What torch calls when a tensor is the left operand.
_TORCH: dict[Any, Any] = {Tensor.add: operator.add, Tensor.sub: operator.sub, Tensor.mul: operator.mul}


def _take_over_operator(
    cls: type[Any], func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Take an operator over from a tensor on its left, which otherwise takes long to find out that it has no rule."""
    fn = _TORCH.get(func)
    if fn is None or kwargs or len(args) != 2 or not isinstance(args[1], cls) or not isinstance(args[0], Tensor):
        return NotImplemented
    return args[1]._combine_with(fn, args[0], True, count_references(args[1]), -1)


class _Probe:
    """Finds out how many references there are to operands that nothing else refers to."""

    __add__ = _binary(operator.add)
    __rmul__ = _binary(operator.mul, True)
    __torch_function__ = classmethod(_take_over_operator)

    def _combine_with(self, fn: Any, other: Any, reflected: bool, ours: int, theirs: int) -> Any:
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

    __torch_function__ = classmethod(_take_over_operator)
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
    __iadd__ = _make_in_place(operator.add)
    __isub__ = _make_in_place(operator.sub)
    __imul__ = _make_in_place(operator.mul)
    __itruediv__ = _make_in_place(operator.truediv)
    __ipow__ = _make_in_place(operator.pow)
    __ifloordiv__ = _make_in_place(operator.floordiv)
    __imod__ = _make_in_place(operator.mod)

    def __neg__(self) -> Self:
        return self._map_tensors(torch.neg)

    def __pos__(self) -> Self:
        return self._map_tensors(torch.clone)

    def __abs__(self) -> Self:
        return self._map_tensors(torch.abs)

    # -- results -----------------------------------------------------------------------------------------------------

    def _combine_with(self, fn: Any, other: Any, reflected: bool, ours: int, theirs: int) -> Any:
        if self._members:
            self._members.check()
        if isinstance(other, Core):
            check_match(self, other)
            if keeps_history() or self._graph or other._graph:
                return self._keep_graph([fn(x, y) for x, y in zip(self._plain(), other._plain(), strict=True)])
            there = other._buffers
            waiting = defer_pair(self, other, fn, ours <= _LEFT, theirs <= _RIGHT)
            return self._finish_result(waiting or pair(self, other, fn), lambda name, held: fn(held, there[name]))
        graph = keeps_history() or self._graph
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
            return self._keep_graph(
                [fn(y, x) if reflected else fn(x, y) for x, y in pairs], other if reflected else None
            )
        temporary = 0 < ours <= (_LEFT if not reflected else _BY_TORCH if theirs < 0 else _REFLECTED)
        made = defer(self, fn, values, reflected, temporary) or operate_with_values(self, fn, values, reflected)
        on_buffers = make_buffer_operation(fn, other, reflected) if self._buffers else None
        return self._finish_result(made, on_buffers, other if reflected and isinstance(other, nn.Module) else None)

    def _map_tensors(self, fn: Callable[..., Tensor]) -> Self:
        """A function of every value."""
        if self._members:
            self._members.check()
        if keeps_history() or self._graph:
            return self._keep_graph([fn(x) for x in self._plain()])
        with torch.no_grad(), torch.inference_mode(False):
            values = allocate(self.layout, self._count)
            for out, matrix in zip(values.held, self._values.matrices, strict=True):
                out.copy_(matrix) if fn is torch.clone else fn(matrix, out=out)
        return self._finish_result(values, lambda _, held: fn(held))

    def _finish_result(
        self,
        values: Values,
        buffer: Callable[[str, Tensor], Tensor] | None = None,
        module: nn.Module | None = None,
    ) -> Self:
        """The result of an operation: values, with buffers according to their policies."""
        inert = self._inert() if values.recipe is None else ()
        if inert:
            ours = self.layout.views(self._values.matrices)
            with torch.no_grad():
                for place, view in enumerate(self.layout.views(values.matrices)):
                    if place in inert:
                        view.copy_(ours[place])
        if not self._buffers:
            buffers = {}
        elif module is not None:
            buffers = repeat_buffers(module, self._count)
        else:
            buffers = self._keep_buffers(buffer)
        return self._make_alike(values, self._count, buffers)

    def _keep_graph(self, matrices: list[Tensor], module: Any = None) -> Self:
        """A result that keeps its history."""
        made = self._make_alike(
            Values([m.to(g.dtype) for m, g in zip(matrices, self.layout.groups, strict=True)]), self._count, {}
        )
        made._graph = True
        with torch.no_grad():
            if isinstance(module, nn.Module):
                made._buffers = repeat_buffers(module, self._count)
            else:
                made._buffers = self._copy_buffers()
        return made

    def _change(self, fn: Any, other: Any) -> Any:
        refuse_graph()
        if self._graph:
            raise RuntimeError("a population that keeps its history cannot be changed in place: write a = a + b")
        if self._members:
            self._members.check()
        if isinstance(other, Core):
            check_match(self, other)
            if fn in (operator.add, operator.sub) and self._add_later(fn, other):
                return self
            values: list[Any] = [matrix.detach() for matrix in other._values.matrices]
        elif isinstance(other, nn.Module):
            values = list(rows(self, other))
        else:
            value = scalar(other)
            if value is None:
                return NotImplemented
            values = broadcast(self, value) if isinstance(value, Tensor) else [value] * len(self.layout.groups)
        for group, each in zip(self.layout.groups, values, strict=True):
            if not self._left_out(group):
                check_dtype(self.layout, group, fn, each)
        self._write(lambda matrix, value: OUT[fn](matrix, value, out=matrix), values)
        return self

    def _write(self, act: Callable[..., Any], *operands: Sequence[Any]) -> None:
        """Change every matrix in place, together with operands for it; parameters that take no part keep their values."""
        inert = self._inert()
        with torch.no_grad():
            matrices = self._values.matrices
            kept = {p: v.clone() for p, v in enumerate(self.layout.views(matrices)) if p in inert} if inert else {}
            for group, matrix, *given in zip(self.layout.groups, matrices, *operands, strict=True):
                if not self._left_out(group):
                    act(matrix, *[value.detach() if isinstance(value, Tensor) else value for value in given])
            for place, held in kept.items():
                self.layout.views(matrices)[place].copy_(held)
        self._mark_changed()

    def _add_later(self, fn: Any, other: Core) -> bool:
        """Add something that is not computed yet, if that is what the other operand is."""
        theirs, recipe = other._values, other._values.recipe
        if recipe is None or theirs is self._values or not deferrable(self):
            return False
        with torch.no_grad():
            self._values.compute()
            if theirs.recipe is None:
                return False
            if len(recipe.terms) == 1 and not any(operand is self._values for operand in recipe.terms[0][1:]):
                # A multiple is added without being made.
                accumulate(self._values.matrices[0], recipe.terms if fn is operator.add else negate_terms(recipe.terms))
            else:
                # Computed and added block by block: what it reads here is read before it changes.
                self._values.serve(theirs)
                theirs.compute(self._values.held[0], 1.0 if fn is operator.add else -1.0)
        self._mark_changed()
        return True
