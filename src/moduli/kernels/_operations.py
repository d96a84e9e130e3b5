"""The table of operations: each is one formula, from which code in every language is generated.

A formula is Python over the arguments of a node, which are text (`ExpressionText`), so that it writes an expression: in C, in
Triton, or in Python for scalars on the host. An operation that is not here runs as torch runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ._graph import COMPUTE, Graph, Node, Ref

#: Functions of libm, of libdevice and of Python's `math`, most of them under the names of aten.
FUNCTIONS_1 = ["exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan", "asin", "acos"]
FUNCTIONS_1 += ["atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "floor", "ceil", "trunc"]
_FUNCTIONS_2 = ["fmod", "hypot", "atan2", "copysign"]


class NoFormError(Exception):
    """A graph that can't be expressed in a language; the message says which part."""


@dataclass(frozen=True, slots=True)
class Language:
    """The syntax of types, numbers, functions and choices in one language, as text templates."""

    types: dict[torch.dtype, str]
    cast: str  # a value in another type that is not the one of truth values
    narrow: str  # rounded to a dtype of two bytes and widened again
    stochastic: str  # rounded by chance to a dtype of two bytes and widened again; empty where there is no position
    choice: str
    write_number: Callable[[Any, str], str]
    write_call: Callable[[str, str, str], str]

    def name_type(self, dtype: torch.dtype) -> str:
        """Return the type in which values of this dtype are computed."""
        if COMPUTE.get(dtype) not in self.types:
            raise NoFormError(f"values of dtype {str(dtype).removeprefix('torch.')}")
        return self.types[COMPUTE[dtype]]

    def convert(self, graph: Graph, index: int, kind: str) -> str:
        """Return the value of a node in another type, as text.

        Args:
            graph: The graph.
            index: The position of the node.
            kind: The type.
        """
        if self.name_type(graph.nodes[index].dtype) == kind:
            return f"t{index}"
        return f"(t{index} != 0)" if kind == self.types[torch.bool] else self.cast.format(f"t{index}", kind)

    def read(self, graph: Graph, value: Any, kind: str) -> ExpressionText:
        """Return the value of a node, or a number, for a formula.

        Args:
            graph: The graph.
            value: A reference to the node, or a number.
            kind: The type.
        """
        text = self.convert(graph, value.index, kind) if isinstance(value, Ref) else self.write_number(value, kind)
        return ExpressionText(self, kind, text)

    def take(self, value: Any, kind: str) -> str:
        """Return the text of a term, or of a number in a formula."""
        if isinstance(value, ExpressionText):
            return value.text
        if kind == self.types[torch.bool] and not isinstance(value, bool):
            raise NoFormError("arithmetic of bool values")
        return self.write_number(value, kind)

    def call(self, name: str, kind: str, *args: Any) -> ExpressionText:
        """Return a call of one of the functions."""
        arguments = ", ".join(self.take(value, kind) for value in args)
        return ExpressionText(self, kind, self.write_call(name, kind, arguments))

    def round_by_chance(self, dtype: torch.dtype | None, kind: str, *args: Any) -> ExpressionText:
        """Return a value rounded stochastically to a dtype, from the value, a salt, a seed and a step."""
        if not self.stochastic:
            raise NoFormError("stochastic rounding of numbers of the host")
        arguments = ", ".join(self.take(value, kind) for value in args)
        return ExpressionText(self, kind, self.stochastic.format(str(dtype).removeprefix("torch."), arguments))

    def choose(self, kind: str, *values: Any) -> ExpressionText:
        """Return one of two values, by a condition."""
        return ExpressionText(self, kind, self.choice.format(*(self.take(value, kind) for value in values)))


def _operator(sign: str, *, reverse: bool = False) -> Any:
    def write(term: ExpressionText, other: Any) -> ExpressionText:
        texts = [term.text, term.language.take(other, term.kind)]
        return ExpressionText(term.language, term.kind, f"({f' {sign} '.join(reversed(texts) if reverse else texts)})")

    return write


@dataclass(slots=True, eq=False)
class ExpressionText:
    """An expression as text; arithmetic with it writes a longer one."""

    language: Language
    kind: str
    text: str

    def __neg__(self) -> ExpressionText:
        return ExpressionText(self.language, self.kind, f"(-{self.text})")

    __add__, __radd__ = _operator("+"), _operator("+", reverse=True)
    __sub__, __rsub__ = _operator("-"), _operator("-", reverse=True)
    __mul__, __rmul__ = _operator("*"), _operator("*", reverse=True)
    __truediv__, __rtruediv__ = _operator("/"), _operator("/", reverse=True)
    __lt__, __le__, __gt__, __ge__ = map(_operator, ("<", "<=", ">", ">="))
    __eq__, __ne__ = map(_operator, ("==", "!="))
    __and__, __or__, __xor__ = map(_operator, ("&", "|", "^"))


def _write_c_number(value: Any, kind: str) -> str:
    number = float(value)
    if math.isnan(number):
        return f"({kind})NAN"
    return f"({kind})({'-' * (number < 0)}INFINITY)" if math.isinf(number) else f"({kind})({number.hex()})"


def _write_python_number(value: Any, kind: str) -> str:
    number = bool(value) if kind in ("bool", "tl.int1") else float(value)
    return repr(number) if math.isfinite(number) else f'float("{number}")'


def _write_python_call(name: str, kind: str, args: str) -> str:
    return f"{kind}({ {'abs': 'abs', 'rint': 'round'}.get(name, f'math.{name}') }({args}))"


C = Language(
    types={torch.float64: "double", torch.float32: "float", torch.bool: "int"},
    cast="(({1}){0})",
    narrow="m_from_{1}(m_to_{1}({0}))",
    stochastic="m_stochastic_{0}({1}, (uint32_t)k)",
    choice="({0} ? {1} : {2})",
    write_number=_write_c_number,
    write_call=lambda name, kind, args: f"{'f' * (name == 'abs')}{name}{'f' * (kind == 'float')}({args})",
)
# For numbers of the host, in double.
PYTHON = Language(
    types={torch.float64: "float", torch.bool: "bool"},
    cast="{1}({0})",
    narrow="{0}",
    stochastic="",
    choice="({1} if {0} else {2})",
    write_number=_write_python_number,
    write_call=_write_python_call,
)
TRITON = Language(
    types={torch.float64: "tl.float64", torch.float32: "tl.float32", torch.bool: "tl.int1"},
    cast="{0}.to({1})",
    narrow="({0}).to(tl.{1}).to(tl.float32)",
    stochastic="stochastic_{0}({1}, at)",
    choice="tl.where({0}, {1}, {2})",
    # A bare number would be one of float32.
    write_number=lambda value, kind: f"tl.full((), {_write_python_number(value, kind)}, {kind})",
    write_call=lambda name, kind, args: f"{'tl' if name == 'abs' else 'lib'}.{name}({args})",
)


def write_node(language: Language, graph: Graph, node: Node) -> str:
    """Return the expression of a constant, a cast or an operation, in the type of its own dtype.

    Args:
        language: The language.
        graph: The graph.
        node: The node.
    """
    args, own = dict(node.args), language.name_type(node.dtype)
    if node.op in ("constant", "cast"):
        source = args["value" if node.op == "constant" else "self"]
        if not isinstance(source, Ref):
            return language.write_number(source, own)
        text = language.convert(graph, source.index, own)
        # An explicit narrowing is part of the function: it rounds, although the sums around it stay in float32.
        narrow = node.dtype in (torch.float16, torch.bfloat16) and graph.nodes[source.index].dtype is not node.dtype
        name = str(node.dtype).removeprefix("torch.")
        return language.narrow.format(text, name) if narrow and node.op == "cast" else text
    if node.op not in OPERATIONS:
        raise NoFormError(f"aten.{node.op}")
    text = OPERATIONS[node.op](NodeArguments(language, graph, node)).text
    return text if node.compute is node.dtype or node.dtype is torch.bool else language.cast.format(f"({text})", own)


class NodeArguments:
    """The arguments of one node, for its formula: `e["self"]`, `e.exp(x)`, `e.choose(condition, a, b)`."""

    def __init__(self, language: Language, graph: Graph, node: Node) -> None:
        self.node = node
        self.given = {name: value for name, value in node.args if value is not None}
        self._language, self._graph = language, graph
        self._kind = language.name_type(node.compute)
        self.choose = partial(language.choose, self._kind)
        self.round_by_chance = partial(language.round_by_chance, self.given.get("dtype"), self._kind)

    def __getitem__(self, name: str) -> Any:
        """Return an argument in the type that the node computes in."""
        return self._read(name, self._kind)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._language.call, name, self._kind)

    @property
    def x(self) -> Any:
        """The argument `self`."""
        return self["self"]

    @property
    def y(self) -> Any:
        """The argument `other`."""
        return self["other"]

    def truth(self, name: str) -> Any:
        """Return an argument as a truth value."""
        return self._read(name, self._language.name_type(torch.bool))

    def _read(self, name: str, kind: Any) -> Any:
        value = self.given.get(name)
        if not isinstance(value, Ref | int | float):
            raise NoFormError(f"aten.{self.node.op} with {name}={value!r}")
        return self._language.read(self._graph, value, kind)

    def constant(self, name: str) -> Any:
        """Return the argument itself if it is a constant, otherwise None."""
        value = self.given.get(name)
        return None if isinstance(value, Ref) else value

    def max(self, a: Any, b: Any) -> Any:
        """Return the larger of two values; NaN if one is."""
        return self.choose((a > b) | (a != a), a, b)

    def min(self, a: Any, b: Any) -> Any:
        """Return the smaller of two values; NaN if one is."""
        return self.choose((a < b) | (a != a), a, b)


# ---------------------------------------------------------------------- the table


def _scale_other(e: Any) -> Any:
    return e.y if e.constant("alpha") == 1 else e.y * e["alpha"]


def _add(e: Any) -> Any:
    return e.truth("self") | e.truth("other") if e.node.compute is torch.bool else e.x + _scale_other(e)


def _mul(e: Any) -> Any:
    return e.truth("self") & e.truth("other") if e.node.compute is torch.bool else e.x * e.y


def _find_remainder(e: Any) -> tuple[Any, Any]:
    """Return the remainder with the sign of the dividend, and whether that differs from the sign of the divisor."""
    rest = e.fmod(e.x, e.y)
    return rest, (rest != 0) & ((e.y < 0) != (rest < 0))


def _remainder(e: Any) -> Any:
    rest, other_sign = _find_remainder(e)
    return e.choose(other_sign, rest + e.y, rest)


def _floor_divide(e: Any) -> Any:
    a, b = e.x, e.y
    rest, other_sign = _find_remainder(e)
    lower = (a - rest) / b - e.choose(other_sign, 1, 0)
    floored = e.floor(lower)
    nearest = e.choose(lower - floored > 0.5, floored + 1, floored)
    return e.choose(b == 0, a / b, e.choose(lower == 0, e.copysign(a * 0, a / b), nearest))


def _div(e: Any) -> Any:
    mode = e.constant("rounding_mode")
    if mode == "floor":
        return _floor_divide(e)
    return e.trunc(e.x / e.y) if mode == "trunc" else e.x / e.y


def _round(e: Any) -> Any:
    if e.constant("decimals"):
        raise NoFormError("rounding to decimals")
    return e.rint(e.x)  # halves to even, as torch does


def _pow(e: Any) -> Any:
    base, power = e["self"], e.constant("exponent")
    # The powers that torch computes without pow(), so that results agree and loops vectorise.
    short = {
        0.5: lambda: e.sqrt(base),
        1: lambda: base,
        2: lambda: base * base,
        3: lambda: base * base * base,
        -0.5: lambda: 1 / e.sqrt(base),
        -1: lambda: 1 / base,
        -2: lambda: 1 / (base * base),
    }
    return short[power]() if power in short else e.pow(base, e["exponent"])


def _clamp(e: Any) -> Any:
    value = e.x
    if "min" in e.given:
        value = e.max(value, e["min"])
    return e.min(value, e["max"]) if "max" in e.given else value


def _nan_to_num(e: Any) -> Any:
    top = 0.0 if e.node.compute is torch.bool else torch.finfo(COMPUTE[e.node.compute]).max
    nan, high, low = (
        e[name] if name in e.given else value for name, value in (("nan", 0), ("posinf", top), ("neginf", -top))
    )
    return e.choose(e.x != e.x, nan, e.choose(e.x == math.inf, high, e.choose(e.x == -math.inf, low, e.x)))


def _sign(e: Any) -> Any:
    return e.choose(e.x > 0, 1, e.choose(e.x < 0, -1, 0))


def _lerp(e: Any) -> Any:
    start, end, weight = e.x, e["end"], e["weight"]
    return e.choose(e.abs(weight) < 0.5, start + weight * (end - start), end - (end - start) * (1 - weight))


def _round_stochastically(e: Any) -> Any:
    return e.round_by_chance(e.x, e["salt"], e["seed"], e["step"])


def _call_function(name: str, *arguments: str) -> Callable[[Any], Any]:
    return lambda e: getattr(e, name)(*(e[argument] for argument in arguments))


#: For each operation its formula.
OPERATIONS: dict[str, Callable[[Any], Any]] = {name: _call_function(name, "self") for name in FUNCTIONS_1}
OPERATIONS |= {name: _call_function(name, "self", "other") for name in _FUNCTIONS_2}
OPERATIONS |= {
    "abs": lambda e: e.abs(e.x),
    "neg": lambda e: -e.x,
    "sign": _sign,
    "sgn": _sign,
    "reciprocal": lambda e: 1 / e.x,
    "rsqrt": lambda e: 1 / e.sqrt(e.x),
    "frac": lambda e: e.x - e.trunc(e.x),
    "round": _round,
    "sigmoid": lambda e: 1 / (1 + e.exp(-e.x)),
    "add": _add,
    "sub": lambda e: e.x - _scale_other(e),
    "rsub": lambda e: e.y - e.x * e["alpha"],
    "mul": _mul,
    "div": _div,
    "maximum": lambda e: e.max(e.x, e.y),
    "minimum": lambda e: e.min(e.x, e.y),
    "lerp": _lerp,
    "pow": _pow,
    "addcmul": lambda e: e.x + e["value"] * e["tensor1"] * e["tensor2"],
    "addcdiv": lambda e: e.x + e["value"] * e["tensor1"] / e["tensor2"],
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "fmax": lambda e: e.choose((e.x >= e.y) | (e.y != e.y), e.x, e.y),
    "fmin": lambda e: e.choose((e.x <= e.y) | (e.y != e.y), e.x, e.y),
    "nan_to_num": _nan_to_num,
    "silu": lambda e: e.x / (1 + e.exp(-e.x)),
    "relu": lambda e: e.max(e.x, 0),
    # Predicates and choices.
    "eq": lambda e: e.x == e.y,
    "ne": lambda e: e.x != e.y,
    "lt": lambda e: e.x < e.y,
    "le": lambda e: e.x <= e.y,
    "gt": lambda e: e.x > e.y,
    "ge": lambda e: e.x >= e.y,
    "isnan": lambda e: e.x != e.x,
    "isinf": lambda e: e.abs(e.x) == math.inf,
    "isposinf": lambda e: e.x == math.inf,
    "isneginf": lambda e: e.x == -math.inf,
    "logical_and": lambda e: e.truth("self") & e.truth("other"),
    "logical_or": lambda e: e.truth("self") | e.truth("other"),
    "logical_xor": lambda e: e.truth("self") ^ e.truth("other"),
    "logical_not": lambda e: e.truth("self") ^ True,
    "where": lambda e: e.choose(e.truth("condition"), e.x, e.y),
    "stochastic_round": _round_stochastically,
    "masked_fill": lambda e: e.choose(e.truth("mask"), e["value"], e.x),
}
for _name in ("and", "or", "xor", "not"):  # of truth values; integers run as torch runs them
    OPERATIONS[f"bitwise_{_name}"] = OPERATIONS[f"logical_{_name}"]
