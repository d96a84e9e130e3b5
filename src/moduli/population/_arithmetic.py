"""Arithmetic of populations: whole-matrix operations with as few passes over memory as written-out code would make."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from moduli._torch import in_transform
from moduli.particles import InPlaceOperators, count_operand, is_differentiable, refuse_graph

from ._core import Core
from ._members import repeat_buffers
from ._operands import OUT, check_match, defer, make_buffer_operation, operate, read_operand
from ._values import Values, accumulate, allocate, deferrable, negate_terms


def keeps_history() -> bool:
    """Whether operations keep a history, or are followed by a transform such as `torch.func.grad`."""
    return is_differentiable() or in_transform()


class Arithmetic(InPlaceOperators, Core):
    """The operators of populations."""

    __slots__ = ()

    # -- results -----------------------------------------------------------------------------------------------------

    def _binary(self, fn: Any, other: Any, reflected: bool = False) -> Any:
        counts = count_operand(self), count_operand(other)
        self._check_members()
        graph = keeps_history() or self._graph or (isinstance(other, Core) and other._graph)
        made: Values | None = None
        if isinstance(other, Core) and not graph:
            check_match(self, other)
            made = defer(self, fn, other, reflected, counts)
        if made is None:
            values = read_operand(self, other, fn, graph)
            if values is None:
                return NotImplemented
            if graph:
                pairs = zip(self._plain(), values, strict=True)
                matrices = [fn(y, x) if reflected else fn(x, y) for x, y in pairs]
                return self._keep_graph(matrices, other if reflected else None)
            if not isinstance(other, Core):
                made = defer(self, fn, values, reflected, counts)
            made = made or operate(self, fn, values, reflected)
        on_buffers = make_buffer_operation(fn, other, reflected) if self._buffers else None
        return self._finish_result(made, on_buffers, other if reflected and isinstance(other, nn.Module) else None)

    def _unary(self, fn: Any) -> Self:
        return self._map_tensors(OUT[fn])

    def _map_tensors(self, fn: Callable[..., Tensor]) -> Self:
        """A function of every value."""
        self._check_members()
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
        if values.recipe is None:
            self._restore(values, self._inert())
        if not self._buffers:
            buffers = {}
        elif module is not None:
            buffers = repeat_buffers(module, self._count)
        else:
            buffers = self._keep_buffers(buffer)
        return self._make_alike(values, self._count, buffers)

    def _keep_graph(self, matrices: list[Tensor], module: Any = None) -> Self:
        """A result that keeps its history."""
        values = Values([m.to(g.dtype) for m, g in zip(matrices, self.layout.groups, strict=True)])
        buffers = repeat_buffers(module, self._count) if isinstance(module, nn.Module) else self._copy_buffers()
        made = self._make_alike(values, self._count, buffers)
        made._graph = True
        return made

    def _inplace(self, fn: Any, other: Any) -> Any:
        refuse_graph()
        if self._graph:
            raise RuntimeError("a population that keeps its history cannot be changed in place: write a = a + b")
        self._check_members()
        if isinstance(other, Core) and fn in (operator.add, operator.sub):
            check_match(self, other)
            if self._add_later(fn, other):
                return self
        values = read_operand(self, other, fn)
        if values is None:
            return NotImplemented
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
