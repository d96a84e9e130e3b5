"""Elementwise mathematics by name: ``mo.sin(t)`` and ``t.sin()``, ``mo.add(a, b, join="outer")``, ``where``, ``clamp``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import torch

from ._elementwise import as_number, elementwise, register
from ._errors import OwnTransposeError
from ._join import join as scope
from ._tensor import Tensor, as_tensor, finish, method


class Unary(Protocol):
    """A function of one tensor."""

    def __call__(self, t: Tensor) -> Tensor: ...


class Binary(Protocol):
    """A function of two tensors or numbers, with a join policy for this call."""

    def __call__(self, a: Any, b: Any, *, join: str | None = None, fill: complex | None = None) -> Tensor: ...


def _unary(name: str, what: str) -> Unary:
    function: Callable[..., torch.Tensor] = getattr(torch, name)

    def apply(t: Tensor) -> Tensor:
        t = as_tensor(t)
        return finish(function(t._data), t._axes)

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = f"""{what}, element by element; the axes stay.

    Args:
        t: The tensor.

    Example:
        >>> import torch, moduli as mo
        >>> t = mo.tensor([0.25, 0.5], x=["a", "b"])
        >>> mo.{name}(t).dims == t.dims, torch.allclose(t.{name}().data, torch.{name}(t.data), equal_nan=True)
        (True, True)
    """
    return method(apply)


def _binary(name: str, what: str) -> Binary:
    function: Callable[..., torch.Tensor] = getattr(torch, name)

    def apply(a: Any, b: Any, *, join: str | None = None, fill: complex | None = None) -> Tensor:
        if name in _ARITHMETIC and any_axes(a) != any_axes(b):
            return elementwise(function, a, b)
        with contextlib.nullcontext() if join is None else scope(join, fill):
            return elementwise(function, _operand(a, b), _operand(b, a))

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = f"""{what}, element by element, with axes and labels paired.

    Args:
        a: A tensor or a number.
        b: Another.
        join: A policy for labels that occur on one side only, for this call: see `moduli.join`.
        fill: What stands for a missing entry under that policy; NaN by default, integers need one.

    Raises:
        ValueError: If names, labels or sizes can't be paired.

    Example:
        >>> import torch, moduli as mo
        >>> a, b = mo.tensor([1.0, 2.0], x=["a", "b"]), mo.tensor([4.0, 3.0], x=["b", "a"])
        >>> torch.equal(mo.{name}(a, b).data, torch.{name}(a.data, b.data.flip(0)))
        True
    """
    return method(apply)


_ARITHMETIC: Final = ("add", "sub", "mul", "div", "pow", "remainder")
"""Functions that take Python numbers unmodified, without rounding them to the precision of a tensor first."""


def _operand(value: Any, other: Any) -> Any:
    # Functions such as torch.maximum take tensors only, so numbers become tensors without axes. As in torch, a number has the
    # precision of the tensor beside it.
    if any_axes(value):
        return value
    number = as_number(value)
    if not any_axes(other):
        return torch.as_tensor(number)
    beside = other if isinstance(other, torch.Tensor) else as_tensor(other)._data
    dtype = (torch.zeros(1, dtype=beside.dtype) + number).dtype  # torch.result_type, which compiled code can't call
    return torch.as_tensor(number, dtype=dtype, device=beside.device)


abs: Final = _unary("abs", "The magnitude")
acos: Final = _unary("acos", "The inverse cosine")
acosh: Final = _unary("acosh", "The inverse hyperbolic cosine")
angle: Final = _unary("angle", "The argument of complex numbers")
asin: Final = _unary("asin", "The inverse sine")
asinh: Final = _unary("asinh", "The inverse hyperbolic sine")
atan: Final = _unary("atan", "The inverse tangent")
atanh: Final = _unary("atanh", "The inverse hyperbolic tangent")
ceil: Final = _unary("ceil", "The smallest integer above")
conj: Final = _unary("conj", "The complex conjugate")
cos: Final = _unary("cos", "The cosine")
cosh: Final = _unary("cosh", "The hyperbolic cosine")
erf: Final = _unary("erf", "The error function")
exp: Final = _unary("exp", "The exponential")
expm1: Final = _unary("expm1", "exp(x) - 1, exact near zero")
floor: Final = _unary("floor", "The largest integer below")
isfinite: Final = _unary("isfinite", "Whether a number is finite")
isinf: Final = _unary("isinf", "Whether a number is infinite")
isnan: Final = _unary("isnan", "Whether a number is NaN")
log: Final = _unary("log", "The natural logarithm")
log10: Final = _unary("log10", "The logarithm to base 10")
log1p: Final = _unary("log1p", "log(1 + x), exact near zero")
log2: Final = _unary("log2", "The logarithm to base 2")
logical_not: Final = _unary("logical_not", "Whether a value is false")
nan_to_num: Final = _unary("nan_to_num", "NaN replaced by zero, infinities by the largest numbers")
neg: Final = _unary("neg", "The negative")
reciprocal: Final = _unary("reciprocal", "1/x")
relu: Final = _unary("relu", "max(x, 0)")
round: Final = _unary("round", "The nearest integer, halves to even")
rsqrt: Final = _unary("rsqrt", "1/sqrt(x)")
sigmoid: Final = _unary("sigmoid", "1/(1 + exp(-x))")
sign: Final = _unary("sign", "The sign: -1, 0 or 1")
sin: Final = _unary("sin", "The sine")
sinh: Final = _unary("sinh", "The hyperbolic sine")
sqrt: Final = _unary("sqrt", "The square root")
square: Final = _unary("square", "The square")
tan: Final = _unary("tan", "The tangent")
tanh: Final = _unary("tanh", "The hyperbolic tangent")
trunc: Final = _unary("trunc", "The integer part")

add: Final = _binary("add", "a + b")
sub: Final = _binary("sub", "a - b")
mul: Final = _binary("mul", "a * b")
div: Final = _binary("div", "a / b")
pow: Final = _binary("pow", "a to the power b")
remainder: Final = _binary("remainder", "a modulo b, with the sign of b")
atan2: Final = _binary("atan2", "The angle of the point (b, a)")
hypot: Final = _binary("hypot", "sqrt(a^2 + b^2)")
maximum: Final = _binary("maximum", "The larger of two")
minimum: Final = _binary("minimum", "The smaller of two")
logaddexp: Final = _binary("logaddexp", "log(exp(a) + exp(b)), computed without overflow")
logical_and: Final = _binary("logical_and", "Whether both are true")
logical_or: Final = _binary("logical_or", "Whether one is true")


def real(t: Tensor) -> Tensor:
    """Return the real part; of a real tensor, the tensor itself.

    Args:
        t: The tensor.

    Example:
        >>> import moduli as mo
        >>> mo.real(mo.tensor([1 + 2j], "x"))
        Tensor(x: [1.])
    """
    t = as_tensor(t)
    return finish(torch.real(t._data), t._axes)


def imag(t: Tensor) -> Tensor:
    """Return the imaginary part; zeros for a real tensor.

    Args:
        t: The tensor.

    Example:
        >>> import moduli as mo
        >>> mo.imag(mo.tensor([1 + 2j], "x")), mo.imag(mo.tensor([1.0], "x"))
        (Tensor(x: [2.]), Tensor(x: [0.]))
    """
    t = as_tensor(t)
    return finish(torch.imag(t._data) if t._data.is_complex() else torch.zeros_like(t._data), t._axes)


Tensor.real = property(real, doc=real.__doc__)  # type: ignore[attr-defined,method-assign,assignment,unused-ignore]
Tensor.imag = property(imag, doc=imag.__doc__)  # type: ignore[attr-defined,method-assign,assignment,unused-ignore]


def where(t: Any, a: Any, b: Any) -> Tensor:
    """Return elements of ``a`` where the condition holds, of ``b`` elsewhere, all three paired by axis and label.

    Args:
        t: The condition, of booleans.
        a: A tensor or number.
        b: Another.

    Example:
        >>> import moduli as mo
        >>> t = mo.tensor([1.0, -2.0], x=["a", "b"])
        >>> mo.where(t > 0, t, 0.0)
        Tensor(x: a=1., b=0.)
    """
    return elementwise(torch.where, t, a, b)


@method
def clamp(t: Tensor, min: Any = None, max: Any = None) -> Tensor:
    """Return elements clamped to two bounds.

    Args:
        t: The tensor.
        min: The lower bound: a number, a tensor paired with ``t``, or None.
        max: The upper bound.

    Raises:
        ValueError: If neither bound is given.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([-1.0, 0.5, 3.0], "x").clamp(0.0, 1.0)
        Tensor(x: [0.0000, 0.5000, 1.0000])
    """
    if min is None and max is None:
        raise ValueError("clamp needs a lower or an upper bound")
    tensors = any_axes(min) or any_axes(max)
    if not tensors:
        t = as_tensor(t)
        return finish(torch.clamp(t._data, min, max), t._axes)
    if min is not None:
        t = elementwise(torch.maximum, t, _operand(min, t))
    return t if max is None else elementwise(torch.minimum, t, _operand(max, t))


def any_axes(value: Any) -> bool:
    """Whether an argument is a tensor of any kind."""
    if isinstance(value, np.generic):  # a NumPy scalar
        return False
    return isinstance(value, (Tensor, torch.Tensor)) or hasattr(value, "__array__")


@method
def lerp(t: Tensor, end: Any, weight: Any) -> Tensor:
    """Return t + weight * (end - t), all paired by axis and label.

    Args:
        t: The start.
        end: The end.
        weight: A number, or a tensor.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([0.0, 1.0], "x").lerp(mo.tensor([1.0, 3.0], "x"), 0.5)
        Tensor(x: [0.5000, 2.0000])
    """
    return elementwise(torch.lerp, t, end, weight)


@method
def isclose(t: Tensor, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Tensor:
    """Whether elements agree within a tolerance: |a - b| <= atol + rtol |b|. Mixed dtypes are promoted.

    Args:
        t: The tensor.
        other: A tensor or number.
        rtol: The relative tolerance.
        atol: The absolute tolerance.
        equal_nan: Whether two NaNs agree.

    Example:
        >>> import moduli as mo
        >>> mo.tensor([1.0, 2.0], x=["a", "b"]).isclose(1.0)
        Tensor(x: a=True, b=False)
    """

    def close(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(a.dtype, b.dtype)
        return torch.isclose(a.to(dtype), b.to(dtype), rtol, atol, equal_nan)

    t = as_tensor(t)
    if not any_axes(other):
        other = _operand(other, t)
    return elementwise(close, t, other)


@method
def allclose(t: Tensor, other: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Whether two tensors have the same axes and labels, in any order, and elements that agree within a tolerance.

    Args:
        t: The tensor.
        other: A tensor or number.
        rtol: The relative tolerance.
        atol: The absolute tolerance.
        equal_nan: Whether two NaNs agree.

    Example:
        >>> import moduli as mo
        >>> mo.allclose(mo.tensor([1.0, 2.0], x=["a", "b"]), mo.tensor([2.0, 1.0], x=["b", "a"]))
        True
    """
    return _agree(t, other, lambda a, b: isclose(a, b, rtol, atol, equal_nan))


@method
def equal(t: Tensor, other: Any) -> bool:
    """Whether two tensors have the same axes and labels, in any order, and the same elements.

    Args:
        t: The tensor.
        other: A tensor.

    Example:
        >>> import moduli as mo
        >>> mo.equal(mo.tensor([1.0, 2.0], x=["a", "b"]), mo.tensor([2.0, 1.0], x=["b", "a"]))
        True
        >>> mo.equal(mo.zeros(2), mo.zeros(3))
        False
    """
    return _agree(t, other, lambda a, b: elementwise(torch.eq, a, b))


def _agree(a: Any, b: Any, compare: Callable[[Tensor, Any], Tensor]) -> bool:
    a = as_tensor(a)
    if any_axes(b):
        b = as_tensor(b)
        # Tensors that agree only after broadcasting one of them are not equal.
        if a._data.numel() != b._data.numel() or a._axes.ndim != b._axes.ndim:
            return False
    try:
        with scope("exact"):
            same = compare(a, b)
    except OwnTransposeError:
        raise
    except ValueError:
        return False
    # If only one of them has an axis of some name, the axes differ, whatever the elements are.
    return same.shape.numel() == a._data.numel() and same.ndim == a._data.ndim and bool(same.all())


register(torch.where, lambda condition, input, other: where(condition, input, other))
