"""The operators of particles, products and populations."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self


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
    """The operators in terms of two methods: `_binary(fn, other, reflected)` and `_unary(fn)`."""

    __slots__ = ()

    # NumPy's arrays and scalars then call the reflected operator here instead of applying theirs element by element.
    __array_ufunc__: None = None

    def _binary(self, fn: Callable[[Any, Any], Any], other: Any, reflected: bool = False) -> Any:
        raise TypeError(f"{type(self).__name__} has no arithmetic")

    def _unary(self, fn: Callable[[Any], Any]) -> Any:
        raise TypeError(f"{type(self).__name__} has no arithmetic")

    if TYPE_CHECKING:  # the result is of the class of the operand, which functions made in a loop can't say

        def __add__(self, other: Any, /) -> Self: ...
        def __radd__(self, other: Any, /) -> Self: ...
        def __sub__(self, other: Any, /) -> Self: ...
        def __rsub__(self, other: Any, /) -> Self: ...
        def __mul__(self, other: Any, /) -> Self: ...
        def __rmul__(self, other: Any, /) -> Self: ...
        def __truediv__(self, other: Any, /) -> Self: ...
        def __rtruediv__(self, other: Any, /) -> Self: ...
        def __pow__(self, other: Any, /) -> Self: ...
        def __rpow__(self, other: Any, /) -> Self: ...
        def __floordiv__(self, other: Any, /) -> Self: ...
        def __rfloordiv__(self, other: Any, /) -> Self: ...
        def __mod__(self, other: Any, /) -> Self: ...
        def __rmod__(self, other: Any, /) -> Self: ...
        def __pos__(self) -> Self: ...
        def __neg__(self) -> Self: ...
        def __abs__(self) -> Self: ...
    else:
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
    """The operators, and those in place in terms of `_inplace(fn, other)`."""

    __slots__ = ()

    def _inplace(self, fn: Callable[[Any, Any], Any], other: Any) -> Any:
        raise TypeError(f"{type(self).__name__} has no arithmetic in place")

    if TYPE_CHECKING:

        def __iadd__(self, other: Any, /) -> Self: ...
        def __isub__(self, other: Any, /) -> Self: ...
        def __imul__(self, other: Any, /) -> Self: ...
        def __itruediv__(self, other: Any, /) -> Self: ...
        def __ipow__(self, other: Any, /) -> Self: ...
        def __ifloordiv__(self, other: Any, /) -> Self: ...
        def __imod__(self, other: Any, /) -> Self: ...
    else:
        __iadd__ = _make_in_place(operator.add)
        __isub__ = _make_in_place(operator.sub)
        __imul__ = _make_in_place(operator.mul)
        __itruediv__ = _make_in_place(operator.truediv)
        __ipow__ = _make_in_place(operator.pow)
        __ifloordiv__ = _make_in_place(operator.floordiv)
        __imod__ = _make_in_place(operator.mod)
