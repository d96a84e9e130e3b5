"""Rules for torch's elementwise functions: which of them there are, and which of their arguments are paired."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from ._axes import SCALAR
from ._elementwise import COMPARISONS, OPERATORS, Function, elementwise, refuse_out
from ._tensor import RULES, Tensor, finish

_new: Final = object.__new__


def unary_rule(function: Function) -> Callable[..., Tensor]:
    """Every axis stays."""

    def rule(input: Any, *args: Any, **options: Any) -> Tensor:
        if not isinstance(input, Tensor):
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
    register(getattr(torch, _name), make_paired_rule(getattr(torch, _name), 2))
for _name in TERNARY:
    if _name not in ("where", "clamp", "clip"):
        register(getattr(torch, _name), make_paired_rule(getattr(torch, _name), 3))
for _name, _function in OPERATORS.items():
    for _form, _order in ((f"__{_name}__", False), (f"__r{_name}__", True)):
        _twin = getattr(torch.Tensor, _form, None)
        if _twin is not None and _twin not in RULES:
            RULES[_twin] = (
                (lambda f: lambda x, y: elementwise(f, y, x))(_function) if _order else make_paired_rule(_function, 2)
            )
for _name, _function in COMPARISONS.items():
    RULES.setdefault(getattr(torch.Tensor, f"__{_name}__"), make_paired_rule(_function, 2))
