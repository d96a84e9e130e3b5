"""Rules for torch's elementwise functions beside those of `_maths`, and which of their arguments are paired."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import torch

from ._axes import SCALAR
from ._elementwise import COMPARISONS, OPERATORS, Function, elementwise
from ._tensor import RULES, Tensor, finish

_new: Final = object.__new__


def unary_rule(function: Function) -> Callable[..., Tensor]:
    """Every axis stays."""

    def rule(input: Any, *args: Any, **options: Any) -> Tensor:
        if not isinstance(input, Tensor):
            raise TypeError(f"{function.__name__} takes labelled tensors as its first argument only")
        if args or options:
            return finish(function(input._data, *args, **options), input._axes)
        axes = input._axes
        if axes is SCALAR:
            return finish(function(input._data), axes)
        made = _new(Tensor)
        made._data = function(input._data)
        made._axes = axes
        return made

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


def register(function: Callable[..., Any], rule: Callable[..., Any]) -> None:
    """Give a torch function, and the method of the same name, a rule."""
    RULES[function] = rule
    name = getattr(function, "__name__", "")
    # Calls from torch's own operators arrive as methods of torch.Tensor.
    twin = getattr(torch.Tensor, name, None) if getattr(torch, name, None) is function else None
    if twin is not None and twin not in RULES:
        RULES[twin] = rule


UNARY: Final = [
    "absolute",
    "arccos",
    "arccosh",
    "arcsin",
    "arcsinh",
    "arctan",
    "arctanh",
    "bitwise_not",
    "deg2rad",
    "digamma",
    "erfc",
    "erfinv",
    "exp2",
    "fix",
    "frac",
    "i0",
    "isneginf",
    "isposinf",
    "isreal",
    "lgamma",
    "logit",
    "negative",
    "positive",
    "rad2deg",
    "sgn",
    "signbit",
    "sinc",
    "conj_physical",
    "resolve_conj",
    "resolve_neg",
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
    "subtract",
    "multiply",
    "divide",
    "true_divide",
    "floor_divide",
    "fmod",
    "float_power",
    "arctan2",
    "fmax",
    "fmin",
    "copysign",
    "nextafter",
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
TERNARY: Final = ["addcmul", "addcdiv", "lerp"]

for _name in ("neg", "pos", "abs", "invert"):
    setattr(Tensor, f"__{_name}__", unary_rule(getattr(operator, _name)))
for _name in UNARY:
    register(getattr(torch, _name), unary_rule(getattr(torch, _name)))
for _name in UNARY_F:
    RULES[getattr(torch.nn.functional, _name)] = unary_rule(getattr(torch.nn.functional, _name))
for _name in BINARY:
    register(getattr(torch, _name), make_paired_rule(getattr(torch, _name), 2))
for _name in TERNARY:
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
