"""Elementwise operations: operators, and any torch function that treats every element alike."""

from __future__ import annotations

import contextlib
import numbers
import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from ._axes import SCALAR, Axes, make_unnamed
from ._pairing import align, align_all, current_plan, refuse_transpose
from ._tensor import RULES, Tensor, finish, refuse_out

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
    if plan.transposes:
        refuse_transpose(plan)
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
    if not (isinstance(value, (str, bytes)) or hasattr(value, "__len__") or hasattr(value, "__torch_function__")):
        for convert in (operator.index, float, complex):
            with contextlib.suppress(TypeError):  # a symbolic number that is complex refuses float()
                return convert(value)
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
            made = _new(Tensor)  # `wrap` without the call
            made._data, made._axes = function(x, y), axes
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


OPERATORS: Final = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
COMPARISONS: Final = ("eq", "ne", "lt", "le", "gt", "ge")

for _name in (*OPERATORS, *COMPARISONS):
    setattr(Tensor, f"__{_name}__", _binary(getattr(operator, f"__{_name}__"), f"__{_name}__"))
for _name in OPERATORS:
    setattr(Tensor, f"__r{_name}__", _make_reflected(getattr(operator, f"__{_name}__"), f"__r{_name}__"))


# -- torch's elementwise functions beside those of `_maths` ------------------------------------------------------------


def unary_rule(function: Function) -> Callable[..., Tensor]:
    """Every axis stays."""

    def rule(input: Any, *args: Any, **options: Any) -> Tensor:
        if not isinstance(input, Tensor):
            raise TypeError(f"{function.__name__} takes labelled tensors as its first argument only")
        if not (args or options):
            return finish(function(input._data), input._axes)
        return finish(function(input._data, *args, **options), input._axes)

    rule.__name__ = function.__name__
    return rule


def make_paired_rule(function: Function, operands: int) -> Callable[..., Tensor]:
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


def _exchange_operands(function: Function) -> Callable[..., Tensor]:
    return lambda x, y: elementwise(function, y, x)


def register(function: Callable[..., Any], rule: Callable[..., Any]) -> None:
    """Give a torch function, and the method of the same name, a rule."""
    RULES[function] = rule
    name = getattr(function, "__name__", "")
    # Calls from torch's own operators arrive as methods of torch.Tensor.
    twin = getattr(torch.Tensor, name, None) if getattr(torch, name, None) is function else None
    if twin is not None and twin not in RULES:
        RULES[twin] = rule


def derive_rule(function: Callable[..., Any]) -> Callable[..., Tensor] | None:
    """The rule of a function that torch itself marks as pointwise: its tensors are paired, the rest are options."""
    name = getattr(function, "__name__", "_")
    packet: Any = None if name.endswith("_") else getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if hasattr(packet, "overloads") else []
    schemas = [
        each._schema for each in overloads if torch.Tag.pointwise in each.tags and len(each._schema.returns) == 1
    ]
    if not schemas:
        return None
    operands = max(
        sum(str(argument.type) == "Tensor" and not argument.kwarg_only for argument in schema.arguments)
        for schema in schemas
    )
    return unary_rule(function) if operands == 1 else make_paired_rule(function, operands)


# What torch does not mark: other names of marked functions, compositions, random numbers.
_UNARY: Final = (
    *("absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctanh", "fix", "isreal", "negative"),
    *("bernoulli", "conj", "detach", "resolve_conj", "resolve_neg"),
)
_UNARY_F: Final = (
    "alpha_dropout",
    "dropout",
    "hardswish",
    "leaky_relu",
    "logsigmoid",
    "softsign",
    "tanhshrink",
    "threshold",
)
_BINARY: Final = (
    *("arctan2", "divide", "floor_divide", "multiply", "rsub", "subtract"),
    *("greater", "greater_equal", "less", "less_equal", "not_equal"),
)

for _name in ("neg", "pos", "abs", "invert"):
    setattr(Tensor, f"__{_name}__", unary_rule(getattr(operator, _name)))
for _name in _UNARY:
    register(getattr(torch, _name), unary_rule(getattr(torch, _name)))
for _name in _UNARY_F:
    RULES[getattr(torch.nn.functional, _name)] = unary_rule(getattr(torch.nn.functional, _name))
for _name in _BINARY:
    register(getattr(torch, _name), make_paired_rule(getattr(torch, _name), 2))
# Operators of plain tensors that meet a labelled one arrive as methods of torch.Tensor.
for _name in (*OPERATORS, *COMPARISONS):
    RULES.setdefault(getattr(torch.Tensor, f"__{_name}__"), make_paired_rule(getattr(operator, f"__{_name}__"), 2))
for _name in OPERATORS:
    if hasattr(torch.Tensor, f"__r{_name}__"):
        RULES.setdefault(getattr(torch.Tensor, f"__r{_name}__"), _exchange_operands(getattr(operator, f"__{_name}__")))
