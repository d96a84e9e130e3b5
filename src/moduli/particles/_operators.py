"""The operators of particles and products."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


class Operators:
    """The operators, each told by the function that does it: `_binary(fn, other, reflected)` and `_unary(fn)`."""

    # NumPy's arrays and scalars leave the operation to us instead of applying it to us element by element.
    __array_ufunc__ = None

    def _binary(self, fn: Callable[[Any, Any], Any], other: Any, reflected: bool = False) -> Any:
        raise TypeError(f"{type(self).__name__} has no arithmetic")

    def _unary(self, fn: Callable[[Any], Any]) -> Any:
        raise TypeError(f"{type(self).__name__} has no arithmetic")

    def __add__(self, other: Any) -> Any:
        return self._binary(operator.add, other)

    def __radd__(self, other: Any) -> Any:
        return self._binary(operator.add, other, True)

    def __sub__(self, other: Any) -> Any:
        return self._binary(operator.sub, other)

    def __rsub__(self, other: Any) -> Any:
        return self._binary(operator.sub, other, True)

    def __mul__(self, other: Any) -> Any:
        return self._binary(operator.mul, other)

    def __rmul__(self, other: Any) -> Any:
        return self._binary(operator.mul, other, True)

    def __truediv__(self, other: Any) -> Any:
        return self._binary(operator.truediv, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._binary(operator.truediv, other, True)

    def __pow__(self, other: Any) -> Any:
        return self._binary(operator.pow, other)

    def __rpow__(self, other: Any) -> Any:
        return self._binary(operator.pow, other, True)

    def __floordiv__(self, other: Any) -> Any:
        return self._binary(operator.floordiv, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._binary(operator.floordiv, other, True)

    def __mod__(self, other: Any) -> Any:
        return self._binary(operator.mod, other)

    def __rmod__(self, other: Any) -> Any:
        return self._binary(operator.mod, other, True)

    def __pos__(self) -> Any:
        return self._unary(operator.pos)

    def __neg__(self) -> Any:
        return self._unary(operator.neg)

    def __abs__(self) -> Any:
        return self._unary(operator.abs)
