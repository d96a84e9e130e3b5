"""The Triton form of each operation, keyed by its aten name. An operation that is not here runs through foreach functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ._graph import COMPUTE, Graph, Node, Ref

__all__ = ["EMIT_TRITON", "NoTritonFormError", "TritonArguments", "describe_number", "name_type"]

_TYPES = {torch.float64: "tl.float64", torch.float32: "tl.float32", torch.bool: "tl.int1"}
_LARGEST = {"tl.float32": torch.finfo(torch.float32).max, "tl.float64": torch.finfo(torch.float64).max}


class NoTritonFormError(Exception):
    """A graph that can't be written in Triton; the message says which part."""


def name_type(dtype: torch.dtype) -> str:
    """The type in which values of this dtype are computed."""
    if dtype not in COMPUTE:
        raise NoTritonFormError(f"values of dtype {str(dtype).removeprefix('torch.')}")
    return _TYPES[COMPUTE[dtype]]


def describe_number(value: Any, kind: str) -> str:
    """A number as a 0-d value of a type: a bare number would be one of float32."""
    if isinstance(value, complex):
        raise NoTritonFormError("complex numbers")
    if kind == "tl.int1":
        return f"tl.full((), {bool(value)}, tl.int1)"
    number = float(value)
    text = repr(number) if math.isfinite(number) else f'float("{number}")'
    return f"tl.full((), {text}, {kind})"


class TritonArguments:
    """The arguments of one node as text, brought to the type the node computes in."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self._graph = graph
        self._args: dict[str, Any] = dict(node.args)
        self.type = name_type(node.compute)

    def names(self) -> list[str]:
        """Names of the arguments."""
        return list(self._args)

    def given(self, name: str) -> bool:
        """Whether the argument is there and not None."""
        return self._args.get(name) is not None

    def constant(self, name: str) -> Any:
        """The argument itself if it is a constant, otherwise None."""
        value = self._args.get(name)
        return None if isinstance(value, Ref) else value

    def number(self, value: float) -> str:
        """A number in the type of this node."""
        if self.type == "tl.int1":
            raise NoTritonFormError("arithmetic of bool values")
        return describe_number(value, self.type)

    def __getitem__(self, name: str) -> str:
        value = self._args[name]
        if isinstance(value, Ref):
            return self.cast(value.index, self.type)
        if not isinstance(value, int | float):
            raise NoTritonFormError(f"an argument {name}={value!r}")
        return describe_number(value, self.type)

    def truth(self, name: str) -> str:
        """The argument as a truth value."""
        value = self._args[name]
        return self.cast(value.index, "tl.int1") if isinstance(value, Ref) else describe_number(value, "tl.int1")

    def cast(self, index: int, to: str) -> str:
        """The value of a node in another type."""
        if name_type(self._graph.nodes[index].dtype) == to:
            return f"t{index}"
        return f"(t{index} != 0)" if to == "tl.int1" else f"t{index}.to({to})"


EMIT_TRITON: dict[str, Callable[[TritonArguments], str]] = {}

# Functions of libdevice (NVIDIA's, AMD's, Intel's), most of them under the names of aten.
_SAME_1 = ["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan"]
_SAME_1 += ["sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "floor", "ceil", "trunc"]
_SAME_2 = ["fmod", "hypot", "atan2", "copysign", "nextafter"]
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGIC = {"logical_and": "&", "logical_or": "|", "bitwise_and": "&", "bitwise_or": "|", "logical_xor": "^"}
_LOGIC |= {"bitwise_xor": "^"}


def largest(a: str, b: str) -> str:
    """The larger of two values; a NaN wins."""
    return f"tl.where(({a} > {b}) | ({a} != {a}), {a}, {b})"


def smallest(a: str, b: str) -> str:
    """The smaller of two values; a NaN wins."""
    return f"tl.where(({a} < {b}) | ({a} != {a}), {a}, {b})"


def _write(template: str) -> Callable[[TritonArguments], str]:
    """An expression: `[x]` is argument x, `<1.5>` a number of the type."""

    def emit(e: TritonArguments) -> str:
        text = template
        for name in e.names():
            if f"[{name}]" in text:
                text = text.replace(f"[{name}]", e[name])
        while "<(" in text:
            before, rest = text.split("<(", 1)
            value, after = rest.split(")>", 1)
            text = f"{before}{e.number(float(value))}{after}"
        return f"({text})"

    return emit


def _combine(sign: str) -> Callable[[TritonArguments], str]:
    return lambda e: f"({e.truth('self')} {sign} {e.truth('other')})"


for _name in _SAME_1:
    EMIT_TRITON[_name] = _write(f"lib.{_name}([self])")
for _name in _SAME_2:
    EMIT_TRITON[_name] = _write(f"lib.{_name}([self], [other])")
for _name, _sign in _COMPARE.items():
    EMIT_TRITON[_name] = _write(f"[self] {_sign} [other]")
for _name, _sign in _LOGIC.items():
    EMIT_TRITON[_name] = _combine(_sign)
for _name in ("logical_not", "bitwise_not"):
    EMIT_TRITON[_name] = lambda e: f"({e.truth('self')} == 0)"

_SIGN = "tl.where([self] > 0, <(1)>, tl.where([self] < 0, <(-1)>, <(0)>))"
_BOUNDED = smallest(f"({largest('([self] + <(3)>)', '<(0)>')})", "<(6)>")

EMIT_TRITON |= {
    "neg": _write("-[self]"),
    "abs": _write("tl.abs([self])"),
    "sign": _write(_SIGN),
    "sgn": _write(_SIGN),
    "reciprocal": _write("<(1)> / [self]"),
    "rsqrt": _write("<(1)> / lib.sqrt([self])"),
    "frac": _write("[self] - lib.trunc([self])"),
    "sigmoid": _write("<(1)> / (<(1)> + lib.exp(-[self]))"),
    "silu": _write("[self] / (<(1)> + lib.exp(-[self]))"),
    "mish": _write("[self] * lib.tanh(lib.log1p(lib.exp([self])))"),
    "relu": _write(largest("[self]", "<(0)>")),
    "leaky_relu": _write("tl.where([self] > 0, [self], [self] * [negative_slope])"),
    "hardtanh": _write(smallest(f"({largest('[self]', '[min_val]')})", "[max_val]")),
    "hardsigmoid": _write(f"({_BOUNDED}) / <(6)>"),
    "hardswish": _write(f"[self] * ({_BOUNDED}) / <(6)>"),
    "softplus": _write("tl.where([self] * [beta] > [threshold], [self], lib.log1p(lib.exp([self] * [beta])) / [beta])"),
    "elu": _write("tl.where([self] < 0, lib.expm1([self] * [input_scale]) * ([alpha] * [scale]), [self] * [scale])"),
    "celu": _write("tl.where([self] > 0, [self], [alpha] * lib.expm1([self] / [alpha]))"),
    "log_sigmoid_forward": _write(f"({smallest('[self]', '<(0)>')}) - lib.log1p(lib.exp(-tl.abs([self])))"),
    "threshold": _write("tl.where([self] <= [threshold], [value], [self])"),
    "heaviside": _write("tl.where([self] == 0, [values], tl.where([self] > 0, <(1)>, <(0)>))"),
    "rad2deg": _write("[self] * <(57.295779513082320876798154814105170332)>"),
    "deg2rad": _write("[self] * <(0.017453292519943295769236907684886)>"),
    "sinc": _write(
        "tl.where([self] == 0, <(1)>, lib.sin([self] * <(3.14159265358979323846)>) / ([self] * <(3.14159265358979323846)>))"
    ),
    "rsub": _write("[other] - [self] * [alpha]"),
    "lerp": _write(
        "tl.where(tl.abs([weight]) < <(0.5)>, [self] + [weight] * ([end] - [self]), "
        "[end] - ([end] - [self]) * (<(1)> - [weight]))"
    ),
    "addcmul": _write("[self] + [value] * [tensor1] * [tensor2]"),
    "addcdiv": _write("[self] + [value] * [tensor1] / [tensor2]"),
    "maximum": _write(largest("[self]", "[other]")),
    "minimum": _write(smallest("[self]", "[other]")),
    "fmax": _write("tl.where(([self] >= [other]) | ([other] != [other]), [self], [other])"),
    "fmin": _write("tl.where(([self] <= [other]) | ([other] != [other]), [self], [other])"),
    "isnan": _write("[self] != [self]"),
    "isinf": _write("tl.abs([self]) == <(inf)>"),
    "isposinf": _write("[self] == <(inf)>"),
    "isneginf": _write("[self] == <(-inf)>"),
    "signbit": _write("lib.copysign(tl.where([self] == [self], <(1)>, <(1)>), [self]) < 0"),
    "xlogy": _write("tl.where([other] != [other], [other], tl.where([self] == 0, <(0)>, [self] * lib.log([other])))"),
    "logaddexp": _write(
        "tl.where((tl.abs([self]) == <(inf)>) & ([self] == [other]), [self], "
        f"({largest('[self]', '[other]')}) + lib.log1p(lib.exp(-tl.abs([self] - [other]))))"
    ),
    "where": lambda e: f"tl.where({e.truth('condition')}, {e['self']}, {e['other']})",
    "masked_fill": lambda e: f"tl.where({e.truth('mask')}, {e['value']}, {e['self']})",
    "clamp_min": _write(largest("[self]", "[min]")),
    "clamp_max": _write(smallest("[self]", "[max]")),
}


def _emit(function: Callable[[TritonArguments], str]) -> Callable[[TritonArguments], str]:
    EMIT_TRITON[function.__name__.strip("_")] = function
    return function


def _scaled(e: TritonArguments) -> str:
    return e["other"] if e.constant("alpha") == 1 else f"{e['other']} * {e['alpha']}"


@_emit
def _add(e: TritonArguments) -> str:
    if e.type == "tl.int1":
        return f"({e.truth('self')} | {e.truth('other')})"
    return f"({e['self']} + {_scaled(e)})"


@_emit
def _sub(e: TritonArguments) -> str:
    return f"({e['self']} - {_scaled(e)})"


@_emit
def _mul(e: TritonArguments) -> str:
    if e.type == "tl.int1":
        return f"({e.truth('self')} & {e.truth('other')})"
    return f"({e['self']} * {e['other']})"


def _floor_quotient(a: str, b: str, e: TritonArguments) -> str:
    zero, one = e.number(0.0), e.number(1.0)
    rest = f"lib.fmod({a}, {b})"
    exact = f"(({a} - {rest}) / {b})"
    lower = f"({exact} - tl.where(({rest} != 0) & (({b} < 0) != ({rest} < 0)), {one}, {zero}))"
    floored = f"lib.floor({lower})"
    nearest = f"tl.where({lower} - {floored} > {e.number(0.5)}, {floored} + {one}, {floored})"
    signed = f"tl.where({lower} == 0, lib.copysign({zero} * {a}, {a} / {b}), {nearest})"
    return f"tl.where({b} == 0, {a} / {b}, {signed})"


@_emit
def _floor_divide(e: TritonArguments) -> str:
    return _floor_quotient(e["self"], e["other"], e)


@_emit
def _remainder(e: TritonArguments) -> str:
    a, b = e["self"], e["other"]
    rest = f"lib.fmod({a}, {b})"
    return f"tl.where(({rest} != 0) & (({b} < 0) != ({rest} < 0)), {rest} + {b}, {rest})"


@_emit
def _div(e: TritonArguments) -> str:
    mode = e.constant("rounding_mode")
    if mode == "floor":
        return _floor_quotient(e["self"], e["other"], e)
    quotient = f"({e['self']} / {e['other']})"
    return f"lib.trunc({quotient})" if mode == "trunc" else quotient


@_emit
def _round(e: TritonArguments) -> str:
    if e.constant("decimals"):
        raise NoTritonFormError("rounding to decimals")
    return f"lib.rint({e['self']})"


@_emit
def _pow(e: TritonArguments) -> str:
    base, power = e["self"], e.constant("exponent")
    one = e.number(1.0)
    # The powers that torch computes without pow().
    short = {
        0.5: f"lib.sqrt({base})",
        1: base,
        2: f"({base} * {base})",
        3: f"({base} * {base} * {base})",
        -0.5: f"({one} / lib.sqrt({base}))",
        -1: f"({one} / {base})",
        -2: f"({one} / ({base} * {base}))",
    }
    if isinstance(power, int | float) and power in short:
        return short[power]
    return f"lib.pow({base}, {e['exponent']})"


@_emit
def _clamp(e: TritonArguments) -> str:
    text = e["self"]
    if e.given("min"):
        text = f"({largest(text, e['min'])})"
    if e.given("max"):
        text = f"({smallest(text, e['max'])})"
    return text


@_emit
def _gelu(e: TritonArguments) -> str:
    x, half, one = e["self"], e.number(0.5), e.number(1.0)
    if e.constant("approximate") == "tanh":
        inner = f"{e.number(math.sqrt(2 / math.pi))} * ({x} + {e.number(0.044715)} * ({x} * {x} * {x}))"
        return f"({half} * {x} * ({one} + lib.tanh({inner})))"
    return f"({half} * {x} * ({one} + lib.erf({x} * {e.number(math.sqrt(0.5))})))"


@_emit
def _logit(e: TritonArguments) -> str:
    x, one = e["self"], e.number(1.0)
    if e.given("eps"):
        eps = e["eps"]
        x = f"({smallest(f'({largest(x, eps)})', f'({one} - {eps})')})"
    return f"lib.log({x} / ({one} - {x}))"


@_emit
def _nan_to_num(e: TritonArguments) -> str:
    x, top = e["self"], _LARGEST.get(e.type, 0.0)
    nan = e["nan"] if e.given("nan") else e.number(0.0)
    high = e["posinf"] if e.given("posinf") else e.number(top)
    low = e["neginf"] if e.given("neginf") else e.number(-top)
    inf, under = e.number(math.inf), e.number(-math.inf)
    return f"tl.where({x} != {x}, {nan}, tl.where({x} == {inf}, {high}, tl.where({x} == {under}, {low}, {x})))"
