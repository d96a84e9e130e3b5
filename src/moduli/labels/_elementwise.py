"""Elementwise operations: operators, and any torch function that treats every element alike."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from ._axes import SCALAR, Axes, make_unnamed
from ._join import join as scope
from ._pairing import align, align_all, current_plan, refuse_itself
from ._tensor import Tensor, finish, refuse_out

Function = Callable[..., torch.Tensor]

_new: Final = object.__new__
_SCALARS: Final = (float, int, bool, complex)
_OPERANDS: Final = (Tensor, torch.Tensor, np.ndarray, numbers.Number)


def elementwise(function: Function, *operands: Any, **options: Any) -> Tensor:
    """Apply a torch function to operands whose axes and labels are paired first.

    Operands may be labelled tensors, plain tensors and arrays (positional axes without names), or numbers. What is not
    an operand (``alpha``, ``rounding_mode``) is passed on as an option.

    Args:
        function: An elementwise function of torch tensors.
        operands: The operands, in the order the function takes them.
        options: Keyword arguments of the function.

    Returns:
        The labelled result.

    Raises:
        ValueError: If names, labels or sizes can't be paired.

    Example:
        >>> import torch, moduli as mo
        >>> a = mo.tensor([1.0, 2.0], x=["a", "b"])
        >>> b = mo.tensor([2.0, 1.0], x=["b", "a"])
        >>> mo.labels.elementwise(torch.hypot, a, b)
        Tensor(x: a=1.4142, b=2.8284)
    """
    refuse_out(function, options)
    if len(operands) == 2:
        first, second = operands
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            axes, x, y = first._axes, first._data, second._data
            if second._axes is not axes or not (axes.firm or x.shape == y.shape):
                axes, x, y = align(axes, second._axes, x, y)
            return finish(function(x, y, **options), axes)
    values: list[Any] = []
    placed: list[int] = []
    every: list[Axes] = []
    for at, operand in enumerate(operands):
        value, its = _operand(operand)
        values.append(value)
        if its is not None:
            placed.append(at)
            every.append(its)
    if len(every) < 2:
        return finish(function(*values, **options), every[0] if every else SCALAR)
    plan = current_plan(every[0], tuple(every[1:]))
    tensors = [values[at] for at in placed]
    if plan.permutes:
        refuse_itself(plan, tensors)
    for at, aligned in zip(placed, align_all(plan, tensors), strict=True):
        values[at] = aligned
    return finish(function(*values, **options), plan.axes)


def _operand(value: Any) -> tuple[Any, Axes | None]:
    """The data of an operand, and its axes; None for a number."""
    if isinstance(value, Tensor):
        return value._data, value._axes
    if isinstance(value, torch.Tensor):
        return (value, make_unnamed(value.ndim)) if value.ndim else (value, None)
    if type(value) in _SCALARS:
        return value, None
    if isinstance(value, np.ndarray):
        data = torch.as_tensor(value)
        return data, make_unnamed(data.ndim)
    return as_number(value), None


def as_number(value: Any) -> complex:
    """Any number (NumPy's, a Fraction, a symbolic constant) as one that torch understands."""
    if isinstance(value, np.generic):
        return value.item()  # type: ignore[no-any-return]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, (str, bytes)) or hasattr(value, "__len__") or hasattr(value, "__torch_function__"):
        raise TypeError(f"a labelled tensor can't be combined with a {type(value).__name__}")
    for convert in (float, complex):
        if hasattr(value, f"__{convert.__name__}__"):
            try:
                return convert(value)
            except TypeError:  # a symbolic number that is complex refuses float()
                continue
    raise TypeError(f"a labelled tensor can't be combined with a {type(value).__name__}")


# -- operators ---------------------------------------------------------------------------------------------------------


def _binary(function: Function, name: str) -> Callable[[Tensor, Any], Tensor]:
    def apply(self: Tensor, other: Any) -> Tensor:
        if isinstance(other, Tensor):
            axes = self._axes
            x, y = self._data, other._data
            if other._axes is not axes or not (axes.firm or x.shape == y.shape):
                axes, x, y = align(axes, other._axes, x, y)
            if axes is SCALAR:
                return finish(function(x, y), axes)
            made = _new(Tensor)
            made._data = function(x, y)
            made._axes = axes
            return made
        if type(other) is float or type(other) is int:
            return finish(function(self._data, other), self._axes)
        return _try_elementwise(function, self, other)  # type: ignore[no-any-return]

    apply.__name__ = apply.__qualname__ = name
    return apply


def _make_reflected(function: Function, name: str) -> Callable[[Tensor, Any], Tensor]:
    def apply(self: Tensor, other: Any) -> Tensor:
        if type(other) is float or type(other) is int:
            return finish(function(other, self._data), self._axes)
        return _try_elementwise(function, other, self)  # type: ignore[no-any-return]

    apply.__name__ = apply.__qualname__ = name
    return apply


def _try_elementwise(function: Function, first: Any, second: Any) -> Any:
    try:
        return elementwise(function, first, second)
    except TypeError:
        if isinstance(first, _OPERANDS) and isinstance(second, _OPERANDS):
            raise
        # Python tries the other operand, then raises its own TypeError (or compares by identity for == and !=).
        return NotImplemented


OPERATORS: Final[dict[str, Function]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": torch.floor_divide,
    "mod": operator.mod,
    "pow": operator.pow,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}
COMPARISONS: Final[dict[str, Function]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}

for _name, _function in OPERATORS.items():
    setattr(Tensor, f"__{_name}__", _binary(_function, f"__{_name}__"))
    setattr(Tensor, f"__r{_name}__", _make_reflected(_function, f"__r{_name}__"))
for _name, _function in COMPARISONS.items():
    setattr(Tensor, f"__{_name}__", _binary(_function, f"__{_name}__"))


def apply_with_policy(function: Function, *operands: Any, join: str | None, fill: complex, **options: Any) -> Tensor:
    """`elementwise` under a join policy chosen for this call."""
    if join is None:
        return elementwise(function, *operands, **options)
    with scope(join, fill):
        return elementwise(function, *operands, **options)
