"""The scalar part of a graph: numbers for the whole call, computed on the host before the pass over the elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from .._torch import run_outside
from ._graph import Graph, Node, Ref
from ._memory import Memory
from ._operations import PYTHON, NoFormError, write_node


def find_placed(graph: Graph, tensors: Sequence[bool]) -> frozenset[int]:
    """Return the scalar nodes that are computed from scalars which are tensors on a device."""
    placed: set[int] = set()
    for index in graph.find_needed() if any(tensors) else ():
        node = graph.nodes[index]
        own = node.op == "scalar" and tensors[dict(node.args)["position"]]
        if own or (not node.vector and placed.intersection(node.refs())):
            placed.add(index)
    return frozenset(placed)


class ScalarPart:
    """The scalar nodes of a graph in order; those that are not computed on a device as Python expressions."""

    def __init__(self, graph: Graph, indices: Sequence[int], placed: frozenset[int] = frozenset()) -> None:
        self._placed = placed
        self._steps = [(index, graph.nodes[index], _compile(graph, graph.nodes[index])) for index in indices]

    def evaluate(self, scalars: Sequence[Any], memory: Memory | None = None) -> dict[int, Any]:
        """Return the values: Python numbers, and 0-d tensors for those computed on a device.

        With `memory` these tensors are its buffers, which the next call with it overwrites.
        """
        values: dict[int, Any] = {}
        for index, node, code in self._steps:
            args = dict(node.args)
            if node.op == "scalar":
                value = scalars[args["position"]]
            elif node.op in ("constant", "cast"):
                source = args["value" if node.op == "constant" else "self"]
                value = values[source.index] if isinstance(source, Ref) else source
                if isinstance(value, torch.Tensor):
                    value = value if node.dtype is torch.float64 else value.to(node.dtype)
                elif node.dtype is not torch.float64:
                    value = run_outside(_round_number, value, node.dtype)
            elif index in self._placed:
                value = apply_node(node, values.__getitem__, None if memory is None else memory.get(index))
                if memory is not None:
                    memory[index] = value
            else:
                value = _compute(code, node, values)
            values[index] = value
        return values


def _compile(graph: Graph, node: Node) -> Any:
    """Return an operation as Python code; None if it can't be expressed."""
    try:
        return compile(write_node(PYTHON, graph, node), f"<{node.op}>", "eval") if node.overload is not None else None
    except NoFormError:
        return None


def _compute(code: Any, node: Node, values: dict[int, Any]) -> Any:
    try:
        if code is not None:
            return eval(code, {"math": math}, {f"t{index}": values[index] for index in node.refs()})
    except (ArithmeticError, ValueError):
        pass  # errors of Python, such as a division by zero, have a result in torch
    return run_outside(apply_node, node, values.__getitem__).item()


def _round_number(value: Any, dtype: torch.dtype) -> Any:
    return torch.tensor(value, dtype=dtype, device="cpu").item()


def apply_node(node: Node, read: Callable[[int], Any], out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the result of one operation of the graph by torch.

    Args:
        node: The node.
        read: Returns the value of an operand.
        out: The buffer for the result, if the operation takes one.
    """
    arguments = dict(node.args)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    function: Any = node.overload
    into: Any = None if out is None else _find_out(node.overload)
    for argument in node.overload._schema.arguments:
        if argument.name not in arguments:
            continue
        value = arguments[argument.name]
        if isinstance(value, Ref):
            value = read(value.index)
            if "Tensor" in str(argument.type):
                if not isinstance(value, torch.Tensor):
                    value = torch.tensor(value, dtype=torch.float64, device="cpu")
            elif isinstance(value, torch.Tensor):
                if value.device.type == "cpu":
                    value = value.item()
                else:
                    function = into = getattr(torch, node.op)  # it chooses the overload for tensors
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            positional.append(value)
    if out is not None and into is not None:
        function, keywords = into, {**keywords, "out": out}
    result: Any = function(*positional, **keywords)
    tensor: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return tensor


@cache
def _find_out(overload: Any) -> Any:
    """Return the overload with the same arguments and `out`; None if there is none."""
    wanted = [(argument.name, str(argument.type)) for argument in overload._schema.arguments]
    for name in overload.overloadpacket.overloads():
        candidate = getattr(overload.overloadpacket, name)
        arguments = [(a.name, str(a.type)) for a in candidate._schema.arguments if not a.is_out]
        if arguments == wanted and len(candidate._schema.arguments) == len(arguments) + 1:
            return candidate
    return None
