"""The operators of particles, products and populations, and which of their operands may be written over."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from moduli._torch import count_references


def _make_binary(fn: Callable[[Any, Any], Any], reflected: bool = False) -> Any:
    def method(self: Any, other: Any) -> Any:
        return self._binary(fn, other, reflected)

    return method


def _make_unary(fn: Callable[[Any], Any]) -> Any:
    def method(self: Any) -> Any:
        return self._unary(fn)

    return method


def _make_in_place(fn: Callable[[Any, Any], Any]) -> Any:
    def method(self: Any, other: Any) -> Any:
        return self._inplace(fn, other)

    return method


class Operators:
    """The operators, each told by the function that does it: `_binary(fn, other, reflected)` and `_unary(fn)`."""

    __slots__ = ()

    # NumPy's arrays and scalars leave the operation to us instead of applying it to us element by element.
    __array_ufunc__: None = None

    def _binary(self, fn: Callable[[Any, Any], Any], other: Any, reflected: bool = False) -> Any:
        raise TypeError(f"{type(self).__name__} has no arithmetic")

    def _unary(self, fn: Callable[[Any], Any]) -> Any:
        raise TypeError(f"{type(self).__name__} has no arithmetic")

    __add__ = _make_binary(operator.add)
    __radd__ = _make_binary(operator.add, True)
    __sub__ = _make_binary(operator.sub)
    __rsub__ = _make_binary(operator.sub, True)
    __mul__ = _make_binary(operator.mul)
    __rmul__ = _make_binary(operator.mul, True)
    __truediv__ = _make_binary(operator.truediv)
    __rtruediv__ = _make_binary(operator.truediv, True)
    __pow__ = _make_binary(operator.pow)
    __rpow__ = _make_binary(operator.pow, True)
    __floordiv__ = _make_binary(operator.floordiv)
    __rfloordiv__ = _make_binary(operator.floordiv, True)
    __mod__ = _make_binary(operator.mod)
    __rmod__ = _make_binary(operator.mod, True)
    __pos__ = _make_unary(operator.pos)
    __neg__ = _make_unary(operator.neg)
    __abs__ = _make_unary(operator.abs)


class InPlaceOperators(Operators):
    """The operators, and those that change the left operand: `_inplace(fn, other)`."""

    __slots__ = ()

    def _inplace(self, fn: Callable[[Any, Any], Any], other: Any) -> Any:
        raise TypeError(f"{type(self).__name__} has no arithmetic in place")

    __iadd__ = _make_in_place(operator.add)
    __isub__ = _make_in_place(operator.sub)
    __imul__ = _make_in_place(operator.mul)
    __itruediv__ = _make_in_place(operator.truediv)
    __ipow__ = _make_in_place(operator.pow)
    __ifloordiv__ = _make_in_place(operator.floordiv)
    __imod__ = _make_in_place(operator.mod)


# -- temporaries -------------------------------------------------------------------------------------------------------
# The one shortcut: an operand that exists only inside an expression may be written over, as NumPy elides temporaries. In
# `a + 0.5 * (b - c)` nothing refers to `b - c` but the expression, so the factor waits for the sum, and the sum is written
# over the difference. Whether that is so is read off the count of references. How many of them a call adds depends on the
# interpreter, and on whether tools such as torch.compile watch its frames at this moment, so the count is compared each
# time with that of a value made on the spot; where the interpreter does not count a named value more often than a nameless
# one, the answer is no.


class _ReferenceProbe(Operators):
    """Counts the references to operands as the method of a particle does."""

    __slots__ = ()

    def _binary(self, fn: Any, other: Any, reflected: bool = False) -> tuple[int, int]:
        return count_operand(self), count_operand(other)


def count_operand(operand: Any) -> int:
    """How many references there are to an operand; to be called by `_binary` itself.

    Example:
        >>> from moduli.particles import count_operand
        >>> count_operand(object()) < count_operand(count_operand)
        True
    """
    return count_references(operand)


def is_temporary(count: int, which: int, reflected: bool = False) -> bool:
    """Whether an operand exists only inside the expression that is being computed.

    Args:
        count: The references to it that `_binary` counted.
        which: 0 for the operand whose method is called, 1 for the other one.
        reflected: Whether the method is a reflected one, such as `__rmul__`.

    Example:
        >>> from moduli.particles import count_operand, is_temporary
        >>> named = object()
        >>> is_temporary(count_operand(named) + 8, 0)
        False
    """
    named = _ReferenceProbe()
    if reflected:
        alone, with_name = 1 * _ReferenceProbe(), 1 * named
    elif which == 0:
        alone, with_name = _ReferenceProbe() * 1, named * 1
    else:
        alone, with_name = _ReferenceProbe() * _ReferenceProbe(), _ReferenceProbe() * named
    return bool(count <= alone[which] < with_name[which])
