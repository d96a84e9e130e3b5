"""One node of a graph as seen by the code that writes its C expression."""

from __future__ import annotations

import math
from typing import Any

import torch

from ._graph import COMPUTE, Graph, Node, Ref

__all__ = ["NoCFormError", "Expr", "ctype", "literal"]

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
