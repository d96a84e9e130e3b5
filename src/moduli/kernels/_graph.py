"""The graph of a pointwise function: what the tracer writes and every form reads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch

#: The dtypes a compiled kernel loads and stores, and the dtype each one computes in.
COMPUTE: dict[torch.dtype, torch.dtype] = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.bool,
}


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of another node, by its position in the graph."""

    index: int


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of the graph.

    `op` is `"role"`, `"scalar"`, `"constant"`, `"cast"` or the name of an aten operation. `args` are its arguments by
    schema name. `dtype` is the dtype torch gives the result, `compute` the one its operands are brought to, and
    `vector` is False where the value is one number for the whole call.
    """

    op: str
    args: tuple[tuple[str, Any], ...]
    dtype: torch.dtype
    compute: torch.dtype
    vector: bool
    overload: Any = field(default=None, compare=False)

    def refs(self) -> list[int]:
        """Positions of the nodes this one reads."""
        return [value.index for _, value in self.args if isinstance(value, Ref)]


@dataclass(frozen=True, slots=True)
class Graph:
    """A traced function: its nodes, what it returns and which roles it changes.

    `returned` gives for each returned value the node, and `same` the role it *is* (a role changed in place and then
    returned) or None. `mutated` maps the positions of roles that the function changes itself to their last value.
    """

    nodes: tuple[Node, ...]
    roles: int
    scalars: int
    returned: tuple[int, ...]
    same: tuple[int | None, ...]
    mutated: tuple[tuple[int, int], ...]
    single: bool
    role_dtypes: tuple[torch.dtype, ...]

    def roots(self) -> set[int]:
        """Nodes whose values leave the graph."""
        return set(self.returned) | {node for _, node in self.mutated}

    def find_needed(self) -> list[int]:
        """Nodes that are needed, in order."""
        needed: set[int] = set()
        stack = list(self.roots())
        while stack:
            index = stack.pop()
            if index not in needed:
                needed.add(index)
                stack.extend(self.nodes[index].refs())
        return sorted(needed)


def find_changed_numbers(graph: Graph, other: Graph) -> frozenset[tuple[int, str]] | None:
    """Where two graphs have other floats, as nodes and their arguments; None where they differ in anything else."""
    if len(graph.nodes) != len(other.nodes) or replace(graph, nodes=()) != replace(other, nodes=()):
        return None
    found = set()
    for index, (node, its) in enumerate(zip(graph.nodes, other.nodes, strict=True)):
        args = dict(its.args)
        for name, value in node.args:
            if type(value) is float and type(args.get(name)) is float and value != args[name]:
                found.add((index, name))
                args[name] = value
        if node != replace(its, args=tuple(args.items())):
            return None
    return frozenset(found)


def lift_numbers(graph: Graph, places: Collection[tuple[int, str]]) -> tuple[Graph, tuple[float, ...]]:
    """The graph with the numbers at these places as further scalars, and the numbers: others are no other kernel."""
    order = {place: k for k, place in enumerate(sorted(places))}
    shift = len(order)
    nodes = [
        Node("scalar", (("position", graph.scalars + k),), torch.float64, torch.float64, vector=False)
        for k in range(shift)
    ]
    numbers = [0.0] * shift
    for index, node in enumerate(graph.nodes):
        args = []
        for name, value in node.args:
            if (index, name) in order:
                numbers[order[index, name]] = value
                value = Ref(order[index, name])
            elif isinstance(value, Ref):
                value = Ref(value.index + shift)
            args.append((name, value))
        nodes.append(replace(node, args=tuple(args)))
    lifted = replace(
        graph,
        nodes=tuple(nodes),
        scalars=graph.scalars + shift,
        returned=tuple(node + shift for node in graph.returned),
        mutated=tuple((role, node + shift) for role, node in graph.mutated),
    )
    return lifted, tuple(numbers)
