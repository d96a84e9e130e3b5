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
    """The scalar nodes that follow from scalars which are tensors on a device."""
    placed: set[int] = set()
    for index in graph.find_needed() if any(tensors) else ():
        node = graph.nodes[index]
        own = node.op == "scalar" and tensors[dict(node.args)["position"]]
        if own or (not node.vector and placed.intersection(node.refs())):
            placed.add(index)
    return frozenset(placed)


class ScalarPart:
    """Scalar nodes of a graph in order, those that are not placed on a device as Python expressions."""

    def __init__(self, graph: Graph, indices: Sequence[int], placed: frozenset[int] = frozenset()) -> None:
        self._placed = placed
        self._steps = [(index, graph.nodes[index], _compile(graph, graph.nodes[index])) for index in indices]

    def evaluate(self, scalars: Sequence[Any], memory: Memory | None = None) -> dict[int, Any]:
        """The values: Python numbers, and 0-d tensors where they are placed on a device.

        Those lie in `memory`, if it is given, and are overwritten by the next call that is given it.
        """
        values: dict[int, Any] = {}
        for index, node, code in self._steps:
            args = dict(node.args)
            if node.op == "scalar":
                found = scalars[args["position"]]
            elif node.op in ("constant", "cast"):
                source = args["value" if node.op == "constant" else "self"]
                found = values[source.index] if isinstance(source, Ref) else source
                if isinstance(found, torch.Tensor):
                    found = found if node.dtype is torch.float64 else found.to(node.dtype)
                elif node.dtype is not torch.float64:
                    found = run_outside(_round_number, found, node.dtype)
            elif index in self._placed:
                found = apply_node(node, values.__getitem__, None if memory is None else memory.get(index))
                if memory is not None:
                    memory[index] = found
            else:
                found = _compute(code, node, values)
            values[index] = found
        return values


def _compile(graph: Graph, node: Node) -> Any:
    """An operation as Python; None where it has no word for it."""
    try:
        return compile(write_node(PYTHON, graph, node), f"<{node.op}>", "eval") if node.overload is not None else None
    except NoFormError:
        return None


def _compute(code: Any, node: Node, values: dict[int, Any]) -> Any:
    try:
        if code is not None:
            return eval(code, {"math": math}, {f"t{index}": values[index] for index in node.refs()})
    except (ArithmeticError, ValueError):
        pass  # what Python refuses, a division by zero, is done as torch does it
    return run_outside(apply_node, node, values.__getitem__).item()


def _round_number(value: Any, dtype: torch.dtype) -> Any:
    return torch.tensor(value, dtype=dtype, device="cpu").item()


def apply_node(node: Node, read: Callable[[int], Any], out: torch.Tensor | None = None) -> torch.Tensor:
    """One operation of the graph by torch, with the values that `read` gives for its operands; into `out`, if it can."""
    given = dict(node.args)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    function: Any = node.overload
    into: Any = None if out is None else _find_out(node.overload)
    for argument in node.overload._schema.arguments:
        if argument.name not in given:
            continue
        value = given[argument.name]
        if isinstance(value, Ref):
            value = read(value.index)
            if "Tensor" in str(argument.type):
                if not isinstance(value, torch.Tensor):
                    value = torch.tensor(value, dtype=torch.float64, device="cpu")
            elif isinstance(value, torch.Tensor):
                if value.device.type == "cpu":
                    value = value.item()
                else:
                    function = into = getattr(torch, node.op)  # of the overloads it takes the one for tensors
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            positional.append(value)
    if out is not None and into is not None:
        function, keywords = into, {**keywords, "out": out}
    result: Any = function(*positional, **keywords)
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


@cache
def _find_out(overload: Any) -> Any:
    """The overload that takes the same arguments and memory for its result; None where there is none."""
    wanted = [(argument.name, str(argument.type)) for argument in overload._schema.arguments]
    for name in overload.overloadpacket.overloads():
        found = getattr(overload.overloadpacket, name)
        arguments = [(a.name, str(a.type)) for a in found._schema.arguments if not a.is_out]
        if arguments == wanted and len(found._schema.arguments) == len(arguments) + 1:
            return found
    return None
