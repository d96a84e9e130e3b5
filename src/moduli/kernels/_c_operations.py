"""The C form of each operation, keyed by its aten name. An operation that is not here runs eagerly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ._graph import COMPUTE, Graph, Node, Ref

__all__ = ["EMIT", "PRELUDE", "Expr", "NoCFormError", "ctype", "literal"]

_TYPES = {torch.float64: "double", torch.float32: "float", torch.bool: "int"}


class NoCFormError(Exception):
    """A graph that can't be written in C; the message says which part."""


def ctype(dtype: torch.dtype) -> str:
    """The C type in which values of this dtype are computed."""
    if dtype not in COMPUTE:
        raise NoCFormError(f"values of dtype {str(dtype).removeprefix('torch.')}")
    return _TYPES[COMPUTE[dtype]]


def literal(value: float | int | bool) -> str:
    """A number as C reads it back without loss."""
    if isinstance(value, complex):
        raise NoCFormError("complex numbers")
    number = float(value)
    if math.isnan(number):
        return "NAN"
    if math.isinf(number):
        return "INFINITY" if number > 0 else "(-INFINITY)"
    text = number.hex()
    return f"({text})" if text.startswith("-") else text


class Expr:
    """The arguments of one node as C text, brought to the type the node computes in."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self._graph = graph
        self._args: dict[str, Any] = dict(node.args)
        self.type = ctype(node.compute)

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

    def fn(self, name: str) -> str:
        """The name of a function of libm, or of the prelude, for the type of this node."""
        if self.type == "int":
            raise NoCFormError(f"{name} of bool values")
        return f"{name}f" if self.type == "float" else name

    def __getitem__(self, name: str) -> str:
        value = self._args[name]
        if not isinstance(value, Ref):
            if not isinstance(value, int | float):
                raise NoCFormError(f"an argument {name}={value!r}")
            return f"({self.type}){literal(value)}"
        return self.cast(value.index, self.type)

    def truth(self, name: str) -> str:
        """The argument as 0 or 1."""
        value = self._args[name]
        if not isinstance(value, Ref):
            return "1" if value else "0"
        text = f"t{value.index}"
        return text if ctype(self._graph.nodes[value.index].dtype) == "int" else f"({text} != 0)"

    def cast(self, index: int, to: str) -> str:
        """The value of a node in another type."""
        own = ctype(self._graph.nodes[index].dtype)
        if own == to:
            return f"t{index}"
        return f"(t{index} != 0)" if to == "int" else f"(({to})t{index})"


# Written for T in (float, double); F() gives the name of a libm function for the type.
PRELUDE = """
static inline T F(m_max)(T a, T b) { return (a > b || a != a) ? a : b; }
static inline T F(m_min)(T a, T b) { return (a < b || a != a) ? a : b; }
static inline T F(m_sign)(T a) { return (T)((a > 0) - (a < 0)); }
static inline T F(m_remainder)(T a, T b) {
  T r = F(fmod)(a, b);
  return (r != 0 && ((b < 0) != (r < 0))) ? r + b : r;
}
static inline T F(m_floor_divide)(T a, T b) {
  if (b == 0) return a / b;
  T r = F(fmod)(a, b);
  T q = (a - r) / b;
  if (r != 0 && ((b < 0) != (r < 0))) q -= 1;
  if (q == 0) return F(copysign)((T)0, a / b);
  T f = F(floor)(q);
  return (q - f > (T)0.5) ? f + 1 : f;
}
static inline T F(m_logaddexp)(T a, T b) {
  if (F(fabs)(a) == (T)INFINITY && a == b) return a;
  T m = F(m_max)(a, b);
  return m + F(log1p)(F(exp)(-F(fabs)(a - b)));
}
static inline T F(m_xlogy)(T a, T b) { return b != b ? b : a == 0 ? (T)0 : a * F(log)(b); }
static inline T F(m_sinc)(T a) {
  T p = a * (T)3.14159265358979323846;
  return a == 0 ? (T)1 : F(sin)(p) / p;
}
static inline T F(m_nan_to_num)(T a, T n, T p, T m) {
  return a != a ? n : a == (T)INFINITY ? p : a == -(T)INFINITY ? m : a;
}
"""

EMIT: dict[str, Callable[[Expr], str]] = {}

# Operations that are one function of libm or of the prelude, most of them under the same name.
_SAME_1 = ["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan"]
_SAME_1 += ["sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "floor", "ceil", "trunc"]
_SAME_2 = ["fmod", "hypot", "atan2", "copysign", "nextafter", "fmax", "fmin"]
_OURS_2 = ["remainder", "floor_divide", "logaddexp", "xlogy"]
_LIBM_1 = {name: name for name in _SAME_1} | {"abs": "fabs", "sign": "m_sign", "sgn": "m_sign", "sinc": "m_sinc"}
_LIBM_2 = {name: name for name in _SAME_2} | {name: f"m_{name}" for name in _OURS_2}
_LIBM_2 |= {"maximum": "m_max", "minimum": "m_min"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGIC = {"logical_and": "&&", "logical_or": "||", "bitwise_and": "&&", "bitwise_or": "||"}


def _unary(function: str) -> Callable[[Expr], str]:
    return lambda e: f"{e.fn(function)}({e['self']})"


def _binary(function: str) -> Callable[[Expr], str]:
    return lambda e: f"{e.fn(function)}({e['self']}, {e['other']})"


def _infix(sign: str) -> Callable[[Expr], str]:
    return lambda e: f"({e['self']} {sign} {e['other']})"


def _logical(sign: str) -> Callable[[Expr], str]:
    return lambda e: f"({e.truth('self')} {sign} {e.truth('other')})"


def _written(template: str, *functions: str) -> Callable[[Expr], str]:
    """A C expression: `[x]` is argument x, `{f}` the libm function f of the type."""

    def emit(e: Expr) -> str:
        text = template.format(**{name: e.fn(name) for name in functions}, T=e.type)
        for name in e.names():
            if f"[{name}]" in text:
                text = text.replace(f"[{name}]", e[name])
        return f"({text})"

    return emit


for _name, _function in _LIBM_1.items():
    EMIT[_name] = _unary(_function)
for _name, _function in _LIBM_2.items():
    EMIT[_name] = _binary(_function)
for _name, _sign in _COMPARE.items():
    EMIT[_name] = _infix(_sign)
for _name, _sign in _LOGIC.items():
    EMIT[_name] = _logical(_sign)
for _name in ("logical_xor", "bitwise_xor"):
    EMIT[_name] = lambda e: f"({e.truth('self')} != {e.truth('other')})"
for _name in ("logical_not", "bitwise_not"):
    EMIT[_name] = lambda e: f"(!{e.truth('self')})"

EMIT |= {
    "neg": _written("-[self]"),
    "reciprocal": _written("1 / [self]"),
    "rsqrt": _written("1 / {sqrt}([self])", "sqrt"),
    "frac": _written("[self] - {trunc}([self])", "trunc"),
    "sigmoid": _written("1 / (1 + {exp}(-[self]))", "exp"),
    "silu": _written("[self] / (1 + {exp}(-[self]))", "exp"),
    "mish": _written("[self] * {tanh}({log1p}({exp}([self])))", "tanh", "log1p", "exp"),
    "relu": _written("{m_max}([self], 0)", "m_max"),
    "leaky_relu": _written("[self] > 0 ? [self] : [self] * [negative_slope]"),
    "hardtanh": _written("{m_min}({m_max}([self], [min_val]), [max_val])", "m_min", "m_max"),
    "hardsigmoid": _written("{m_min}({m_max}([self] + 3, 0), 6) / 6", "m_min", "m_max"),
    "hardswish": _written("[self] * {m_min}({m_max}([self] + 3, 0), 6) / 6", "m_min", "m_max"),
    "softplus": _written(
        "([self] * [beta] > [threshold]) ? [self] : {log1p}({exp}([self] * [beta])) / [beta]", "log1p", "exp"
    ),
    "elu": _written("[self] < 0 ? {expm1}([self] * [input_scale]) * ([alpha] * [scale]) : [self] * [scale]", "expm1"),
    "log_sigmoid_forward": _written(
        "{m_min}([self], 0) - {log1p}({exp}(-{fabs}([self])))", "m_min", "log1p", "exp", "fabs"
    ),
    "threshold": _written("[self] <= [threshold] ? [value] : [self]"),
    "heaviside": _written("[self] == 0 ? [values] : ({T})([self] > 0)"),
    "rad2deg": _written("[self] * ({T})57.295779513082320876798154814105170332"),
    "deg2rad": _written("[self] * ({T})0.017453292519943295769236907684886"),
    "rsub": _written("[other] - [self] * [alpha]"),
    "lerp": _written(
        "{fabs}([weight]) < ({T})0.5 ? [self] + [weight] * ([end] - [self]) "
        ": [end] - ([end] - [self]) * (1 - [weight])",
        "fabs",
    ),
    "addcmul": _written("[self] + [value] * [tensor1] * [tensor2]"),
    "addcdiv": _written("[self] + [value] * [tensor1] / [tensor2]"),
    "isnan": _written("[self] != [self]"),
    "isinf": _written("{fabs}([self]) == ({T})INFINITY", "fabs"),
    "isposinf": _written("[self] == ({T})INFINITY"),
    "isneginf": _written("[self] == -({T})INFINITY"),
    # Not signbit(): vectorised, it crashes some compilers.
    "signbit": _written("{copysign}(1, [self]) < 0", "copysign"),
    "where": lambda e: f"({e.truth('condition')} ? {e['self']} : {e['other']})",
    "masked_fill": lambda e: f"({e.truth('mask')} ? {e['value']} : {e['self']})",
    "clamp_min": _written("{m_max}([self], [min])", "m_max"),
    "clamp_max": _written("{m_min}([self], [max])", "m_min"),
}


def _emit(function: Callable[[Expr], str]) -> Callable[[Expr], str]:
    EMIT[function.__name__.strip("_")] = function
    return function


def _scaled(e: Expr) -> str:
    return e["other"] if e.constant("alpha") == 1 else f"{e['other']} * {e['alpha']}"


@_emit
def _add(e: Expr) -> str:
    if e.type == "int":
        return f"({e.truth('self')} || {e.truth('other')})"
    return f"({e['self']} + {_scaled(e)})"


@_emit
def _sub(e: Expr) -> str:
    return f"({e['self']} - {_scaled(e)})"


@_emit
def _mul(e: Expr) -> str:
    if e.type == "int":
        return f"({e.truth('self')} && {e.truth('other')})"
    return f"({e['self']} * {e['other']})"


@_emit
def _div(e: Expr) -> str:
    mode = e.constant("rounding_mode")
    if mode == "floor":
        return f"{e.fn('m_floor_divide')}({e['self']}, {e['other']})"
    quotient = f"({e['self']} / {e['other']})"
    return f"{e.fn('trunc')}({quotient})" if mode == "trunc" else quotient


@_emit
def _round(e: Expr) -> str:
    # rint rounds halves to even in the default mode of the FPU, as torch does.
    if e.constant("decimals"):
        raise NoCFormError("rounding to decimals")
    return f"{e.fn('rint')}({e['self']})"


@_emit
def _pow(e: Expr) -> str:
    base, power = e["self"], e.constant("exponent")
    # The powers that torch computes without pow(), so that results agree and loops vectorise.
    short = {
        0.5: f"{e.fn('sqrt')}({base})",
        1: base,
        2: f"({base} * {base})",
        3: f"({base} * {base} * {base})",
        -0.5: f"(1 / {e.fn('sqrt')}({base}))",
        -1: f"(1 / {base})",
        -2: f"(1 / ({base} * {base}))",
    }
    if isinstance(power, int | float) and power in short:
        return short[power]
    return f"{e.fn('pow')}({base}, {e['exponent']})"


@_emit
def _clamp(e: Expr) -> str:
    text = e["self"]
    if e.given("min"):
        text = f"{e.fn('m_max')}({text}, {e['min']})"
    if e.given("max"):
        text = f"{e.fn('m_min')}({text}, {e['max']})"
    return text


@_emit
def _gelu(e: Expr) -> str:
    x, t = e["self"], e.type
    if e.constant("approximate") == "tanh":
        inner = f"({t}){math.sqrt(2 / math.pi).hex()} * ({x} + ({t})0.044715 * ({x} * {x} * {x}))"
        return f"(({t})0.5 * {x} * (1 + {e.fn('tanh')}({inner})))"
    return f"(({t})0.5 * {x} * (1 + {e.fn('erf')}({x} * ({t}){math.sqrt(0.5).hex()})))"


@_emit
def _logit(e: Expr) -> str:
    x = e["self"]
    if e.given("eps"):
        x = f"{e.fn('m_min')}({e.fn('m_max')}({x}, {e['eps']}), 1 - {e['eps']})"
    return f"{e.fn('log')}({x} / (1 - {x}))"


@_emit
def _nan_to_num(e: Expr) -> str:
    big = "FLT_MAX" if e.type == "float" else "DBL_MAX"
    nan = e["nan"] if e.given("nan") else "0"
    top = e["posinf"] if e.given("posinf") else big
    low = e["neginf"] if e.given("neginf") else f"-{big}"
    return f"{e.fn('m_nan_to_num')}({e['self']}, {nan}, {top}, {low})"
