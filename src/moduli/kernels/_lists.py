"""The eager form for tensors of middling size: torch's foreach operations, on as many tensors as fill a block.

Joining such tensors into a block would cost as much as the arithmetic; taking them one by one from Python, more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._graph import COMPUTE, Graph, Ref

__all__ = ["Lists", "lists_of"]

_UNARY = {"neg", "abs", "sqrt", "exp", "reciprocal", "sign", "log", "tanh", "sigmoid", "floor", "ceil", "round"}
_BINARY = {"add", "sub", "mul", "div", "maximum", "minimum"}
_NAMED = {"lerp": ("self", "end", "weight"), "addcmul": ("self", "tensor1", "tensor2"), "pow": ("self", "exponent")}
_NAMED["addcdiv"] = _NAMED["addcmul"]


class _Unsupported(Exception):
    """This graph has no form over lists."""


def _step(graph: Graph, index: int) -> tuple[str, list[Any], str | None, Any]:
    """(name, operands, name of a keyword, its value) of a node as a foreach operation."""
    node = graph.nodes[index]
    args = dict(node.args)

    def vector(value: Any) -> bool:
        return isinstance(value, Ref) and graph.nodes[value.index].vector

    if node.op in _UNARY and not args.get("decimals"):
        return node.op, [args["self"]], None, None
    if node.op in _NAMED:
        operands = [args[name] for name in _NAMED[node.op]]
        last = operands[-1]
        if not vector(operands[0]) or (node.op in ("lerp", "pow") and vector(last)):
            raise _Unsupported
        return node.op, operands, *(("value", args["value"]) if "value" in args else (None, None))
    if node.op in _BINARY and args.get("rounding_mode") is None:
        first, second = args["self"], args["other"]
        if not vector(first):
            if node.op not in ("add", "mul") or args.get("alpha", 1) != 1:
                raise _Unsupported
            first, second = second, first
        alpha = args.get("alpha", 1)
        if not vector(first) or (not vector(second) and (alpha != 1 or node.op in ("maximum", "minimum"))):
            raise _Unsupported
        return node.op, [first, second], *(("alpha", alpha) if alpha != 1 else (None, None))
    raise _Unsupported


class Lists:
    """A graph as foreach operations, in place wherever an operand is used for the last time."""

    def __init__(self, graph: Graph, outputs: Sequence[tuple[int, torch.dtype, int | None]], direct: Any) -> None:
        self.outputs = outputs
        nodes = graph.nodes
        vectors = [i for i in graph.live() if nodes[i].vector]
        self.roles = [(i, dict(nodes[i].args)["position"]) for i in vectors if nodes[i].op == "role"]
        if len({nodes[i].dtype for i in vectors} | {dtype for _, dtype, _ in outputs}) != 1:
            raise _Unsupported
        if any(COMPUTE[nodes[i].dtype] is not nodes[i].dtype or nodes[i].dtype is torch.bool for i in vectors):
            raise _Unsupported
        last: dict[int, int] = {}
        for i in vectors:
            last.update(dict.fromkeys(nodes[i].refs(), i))
        last.update(dict.fromkeys((node for node, _, _ in outputs), len(nodes)))
        self.in_place: set[int] = set()  # outputs that need no copy
        self.steps: list[tuple[int, Callable[..., Any], list[Any], str | None, Any, bool]] = []
        for i in vectors:
            if nodes[i].op == "role":
                continue
            name, operands, keyword, value = _step(graph, i)
            first = operands[0].index
            over = nodes[first].op == "role"
            mine = i in direct and over and outputs[direct[i]][2] == dict(nodes[first].args)["position"]
            # A temporary that dies here, or the very role that this value overwrites.
            reuse = mine or (not over and last[first] == i and first not in self.in_place)
            if mine:
                self.in_place.add(i)
            function = getattr(torch, f"_foreach_{name}{'_' * reuse}", None)
            if function is None:
                raise _Unsupported
            self.steps.append((i, function, operands, keyword, value, reuse))

    def run(
        self, lists: Sequence[list[torch.Tensor]], targets: Sequence[list[torch.Tensor]], numbers: dict[int, Any]
    ) -> None:
        """Run over lists that fill about one block."""
        values: dict[int, Any] = dict(numbers)
        for index, position in self.roles:
            values[index] = lists[position]

        def read(value: Any) -> Any:
            if isinstance(value, Ref):
                value = values[value.index]
            return value.item() if isinstance(value, torch.Tensor) else value

        for index, function, operands, keyword, value, reuse in self.steps:
            arguments = [read(operand) for operand in operands]
            keywords = {} if keyword is None else {keyword: read(value)}
            result = function(*arguments, **keywords)
            values[index] = arguments[0] if reuse else result
        for target, (index, _, _) in zip(targets, self.outputs, strict=True):
            if index not in self.in_place:
                torch._foreach_copy_(target, values[index])


def lists_of(graph: Graph, outputs: Sequence[tuple[int, torch.dtype, int | None]], direct: Any) -> Lists | None:
    """The form over lists, where the graph has one."""
    try:
        return Lists(graph, outputs, direct)
    except _Unsupported:
        return None
