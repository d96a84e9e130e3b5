"""Elementwise operations: operators, and any torch function that treats every element alike."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from ._axes import SCALAR, Axes, unnamed
from ._join import join as scope
from ._pairing import align, apply_step, check_sizes, current_plan
from ._tensor import RULES, Tensor, finish

__all__ = ["elementwise"]

Function = Callable[..., torch.Tensor]

_new: Final = object.__new__
_SCALARS: Final = (float, int, bool, complex)


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
        if type(first) is Tensor and type(second) is Tensor:
            return _pairwise(function, first, second, options)
    values: list[Any] = []
    placed: list[int] = []
    axes: list[Axes] = []
    for at, operand in enumerate(operands):
        value, its = _operand(operand)
        values.append(value)
        if its is not None:
            placed.append(at)
            axes.append(its)
    if not axes:
        return finish(function(*values, **options), unnamed(0))
    if len(axes) == 1:
        return finish(function(*values, **options), axes[0])
    plan = current_plan(axes[0], tuple(axes[1:]))
    tensors = [values[at] for at in placed]
    check_sizes(plan, tensors)
    for at, step in zip(placed, plan.steps, strict=True):
        if step is not None:
            values[at] = apply_step(values[at], step, plan.fill)
    return finish(function(*values, **options), plan.axes)


def refuse_out(function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Labelled results are made, not written into storage that has no labels."""
    if options.get("out") is not None:
        raise TypeError(
            f"{getattr(function, '__name__', function)} of labelled tensors takes no out=; write into t.data"
        )
    options.pop("out", None)


def _pairwise(function: Function, first: Tensor, second: Tensor, options: dict[str, Any]) -> Tensor:
    axes = first._axes
    x, y = first._data, second._data
    if second._axes is not axes or not (axes.firm or x.shape == y.shape):
        axes, x, y = align(axes, second._axes, x, y)
    return finish(function(x, y, **options), axes)


def _operand(value: Any) -> tuple[Any, Axes | None]:
    """The data of an operand, and its axes; None for a number."""
    if type(value) is Tensor:
        return value._data, value._axes
    if isinstance(value, torch.Tensor):
        return (value, unnamed(value.ndim)) if value.ndim else (value, None)
    if type(value) in _SCALARS:
        return value, None
    if isinstance(value, np.ndarray):
        data = torch.as_tensor(value)
        return data, unnamed(data.ndim)
    return as_number(value), None


def as_number(value: Any) -> complex:
    """Any number (NumPy's, a Fraction, a symbolic constant) as one that torch understands."""
    if isinstance(value, np.generic):
        return value.item()  # type: ignore[no-any-return]
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, (str, bytes)) or hasattr(value, "__len__"):
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
        if type(other) is Tensor:
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
        try:
            return elementwise(function, self, other)
        except TypeError as error:
            if _operable(other):
                raise
            return _not_implemented(error)  # type: ignore[no-any-return]

    apply.__name__ = apply.__qualname__ = name
    return apply


def _reflected(function: Function, name: str) -> Callable[[Tensor, Any], Tensor]:
    def apply(self: Tensor, other: Any) -> Tensor:
        if type(other) is float or type(other) is int:
            return finish(function(other, self._data), self._axes)
        try:
            return elementwise(function, other, self)
        except TypeError as error:
            if _operable(other):
                raise
            return _not_implemented(error)  # type: ignore[no-any-return]

    apply.__name__ = apply.__qualname__ = name
    return apply


def _operable(other: Any) -> bool:
    return isinstance(other, (Tensor, torch.Tensor, np.ndarray, numbers.Number))


def _not_implemented(error: TypeError) -> Any:
    """Let Python try the other operand, then raise its own TypeError (or compare by identity for == and !=)."""
    return NotImplemented


_OPERATORS: Final[dict[str, Function]] = {
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
_COMPARISONS: Final[dict[str, Function]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}

for _name, _function in _OPERATORS.items():
    setattr(Tensor, f"__{_name}__", _binary(_function, f"__{_name}__"))
    setattr(Tensor, f"__r{_name}__", _reflected(_function, f"__r{_name}__"))
for _name, _function in _COMPARISONS.items():
    setattr(Tensor, f"__{_name}__", _binary(_function, f"__{_name}__"))


def _unary_operator(function: Function, name: str) -> Callable[[Tensor], Tensor]:
    def apply(self: Tensor) -> Tensor:
        return finish(function(self._data), self._axes)

    apply.__name__ = apply.__qualname__ = name
    return apply


_SIGNS: Final[dict[str, Function]] = {
    "__neg__": operator.neg,
    "__pos__": operator.pos,
    "__abs__": operator.abs,
    "__invert__": operator.invert,
}
for _name, _function in _SIGNS.items():
    setattr(Tensor, _name, _unary_operator(_function, _name))


# -- rules for torch's own functions -----------------------------------------------------------------------------------


def unary_rule(function: Function) -> Callable[..., Tensor]:
    """Every axis stays."""

    def rule(input: Any, *args: Any, **options: Any) -> Tensor:
        if type(input) is not Tensor:
            raise TypeError(f"{function.__name__} takes labelled tensors as its first argument only")
        if args or options:
            refuse_out(function, options)
            return finish(function(input._data, *args, **options), input._axes)
        axes = input._axes
        if axes is SCALAR:
            return finish(function(input._data), axes)
        made = _new(Tensor)
        made._data = function(input._data)
        made._axes = axes
        return made

    return rule


def paired_rule(function: Function, operands: int) -> Callable[..., Tensor]:
    """The first so many arguments are operands to be paired; what follows, and keywords, are options."""

    def rule(*args: Any, **options: Any) -> Tensor:
        for name in ("input", "other", "end", "weight", "tensor1", "tensor2", "exponent"):
            if name in options and len(args) < operands:
                args = (*args, options.pop(name))
        if len(args) > operands:
            tail = args[operands:]
            return elementwise(lambda *values, **rest: function(*values, *tail, **rest), *args[:operands], **options)
        return elementwise(function, *args, **options)

    return rule


def register(function: Callable[..., Any], rule: Callable[..., Any]) -> None:
    """Give a torch function, and the method of the same name, a rule."""
    RULES[function] = rule
    name = getattr(function, "__name__", "")
    # Calls from torch's own operators arrive as methods of torch.Tensor.
    twin = getattr(torch.Tensor, name, None) if getattr(torch, name, None) is function else None
    if twin is not None and twin not in RULES:
        RULES[twin] = rule


UNARY: Final = [
    "abs",
    "absolute",
    "acos",
    "arccos",
    "acosh",
    "arccosh",
    "angle",
    "asin",
    "arcsin",
    "asinh",
    "arcsinh",
    "atan",
    "arctan",
    "atanh",
    "arctanh",
    "bitwise_not",
    "ceil",
    "cos",
    "cosh",
    "deg2rad",
    "digamma",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "fix",
    "floor",
    "frac",
    "i0",
    "isfinite",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "isreal",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "logical_not",
    "logit",
    "nan_to_num",
    "neg",
    "negative",
    "positive",
    "rad2deg",
    "reciprocal",
    "relu",
    "round",
    "rsqrt",
    "sgn",
    "sigmoid",
    "sign",
    "signbit",
    "sin",
    "sinc",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "trunc",
    "conj",
    "conj_physical",
    "resolve_conj",
    "resolve_neg",
    "real",
    "imag",
    "clone",
    "detach",
    "bernoulli",
]
UNARY_F: Final = [
    "relu",
    "relu6",
    "gelu",
    "silu",
    "mish",
    "softplus",
    "elu",
    "selu",
    "celu",
    "leaky_relu",
    "hardtanh",
    "hardsigmoid",
    "hardswish",
    "logsigmoid",
    "softsign",
    "tanhshrink",
    "softshrink",
    "hardshrink",
    "threshold",
    "dropout",
    "alpha_dropout",
    "tanh",
    "sigmoid",
]
BINARY: Final = [
    "add",
    "sub",
    "subtract",
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "floor_divide",
    "remainder",
    "fmod",
    "pow",
    "float_power",
    "atan2",
    "arctan2",
    "hypot",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "copysign",
    "nextafter",
    "logaddexp",
    "logaddexp2",
    "xlogy",
    "ldexp",
    "heaviside",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "not_equal",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
    "isclose",
    "logical_and",
    "logical_or",
    "logical_xor",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "gcd",
    "lcm",
    "rsub",
]
TERNARY: Final = ["where", "lerp", "addcmul", "addcdiv", "clamp", "clip"]

for _name in UNARY:
    register(getattr(torch, _name), unary_rule(getattr(torch, _name)))
for _name in UNARY_F:
    RULES[getattr(torch.nn.functional, _name)] = unary_rule(getattr(torch.nn.functional, _name))
for _name in BINARY:
    register(getattr(torch, _name), paired_rule(getattr(torch, _name), 2))
for _name in TERNARY:
    if _name not in ("where", "clamp", "clip"):
        register(getattr(torch, _name), paired_rule(getattr(torch, _name), 3))
for _name, _function in _OPERATORS.items():
    for _form, _order in ((f"__{_name}__", False), (f"__r{_name}__", True)):
        _twin = getattr(torch.Tensor, _form, None)
        if _twin is not None and _twin not in RULES:
            RULES[_twin] = (
                (lambda f: lambda x, y: elementwise(f, y, x))(_function) if _order else paired_rule(_function, 2)
            )
for _name, _function in _COMPARISONS.items():
    RULES.setdefault(getattr(torch.Tensor, f"__{_name}__"), paired_rule(_function, 2))


def with_policy(function: Function, *operands: Any, join: str | None, fill: complex, **options: Any) -> Tensor:
    """`elementwise` under a join policy chosen for this call."""
    if join is None:
        return elementwise(function, *operands, **options)
    with scope(join, fill):
        return elementwise(function, *operands, **options)
