"""The graph of a pointwise function, written by the tracer and read by every form; and its contraction to fewer operations.

For the form that runs operations one by one a product by a number is merged into the operation that uses it: `x + s*y` is one
foreach operation, `x + s*(a/b)` and `x + s*(a*b)` are, and `x - r*(y + d*x)`, a step with decoupled weight decay, is two.
Compiled forms need none of this: there an operation costs no pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

aten = torch.ops.aten

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
        """Return the positions of the nodes that this one reads."""
        return [value.index for _, value in self.args if isinstance(value, Ref)]


@dataclass(frozen=True, slots=True)
class Graph:
    """A traced function: its nodes, its outputs and its return values.

    `outputs` are the values that leave it, each with the role it overwrites or None: first the `mutated` roles that the
    function changes itself, then what it returns. `results` gives for each returned value the output it is, or the role,
    where a role was changed in place and then returned.
    """

    nodes: tuple[Node, ...]
    roles: int
    scalars: int
    outputs: tuple[tuple[int, int | None], ...]
    mutated: int
    results: tuple[tuple[str, int], ...]
    single: bool
    role_dtypes: tuple[torch.dtype, ...]

    def roots(self) -> set[int]:
        """Return the nodes whose values leave the graph, and those that are summed."""
        return {node for node, _ in self.outputs} | {i for i, node in enumerate(self.nodes) if node.op == "sum_square"}

    def count_squares(self) -> int:
        """Return the number of sums of squares that the graph computes for each tensor."""
        slots = [dict(node.args)["slot"] for node in self.nodes if node.op == "sum_square"]
        return max(slots, default=-1) + 1

    def reads_positions(self) -> bool:
        """Return whether a value depends on the position of an element, so that tensors can't be split or concatenated."""
        return any(node.op == "stochastic_round" for node in self.nodes)

    def find_needed(self) -> list[int]:
        """Return the nodes that are needed, in order."""
        needed: set[int] = set()
        stack = list(self.roots())
        while stack:
            index = stack.pop()
            if index not in needed:
                needed.add(index)
                stack.extend(self.nodes[index].refs())
        return sorted(needed)


def lift_numbers(graph: Graph) -> tuple[Graph, tuple[float, ...]]:
    """Return the graph with its floats as further scalars, and these numbers: another number needs no other kernel.

    An exponent stays, since powers such as squares have special formulas.
    """
    shift = sum(_is_free(name, value) for node in graph.nodes for name, value in node.args)
    nodes = [
        Node("scalar", (("position", graph.scalars + k),), torch.float64, torch.float64, vector=False)
        for k in range(shift)
    ]
    numbers: list[float] = []
    for node in graph.nodes:
        args = []
        for name, value in node.args:
            if _is_free(name, value):
                args.append((name, Ref(len(numbers))))
                numbers.append(value)
            else:
                args.append((name, Ref(value.index + shift) if isinstance(value, Ref) else value))
        nodes.append(replace(node, args=tuple(args)))
    lifted = replace(
        graph,
        nodes=tuple(nodes),
        scalars=graph.scalars + shift,
        outputs=tuple((node + shift, role) for node, role in graph.outputs),
    )
    return lifted, tuple(numbers)


def _is_free(name: str, value: Any) -> bool:
    return type(value) is float and name != "exponent"


def contract(graph: Graph, placed: frozenset[int]) -> Graph:
    """Return the same function in fewer operations. `placed` are scalars on a device: they can't be keyword arguments."""
    return _Contraction(graph, placed).run()


class _Contraction:
    def __init__(self, graph: Graph, placed: frozenset[int]) -> None:
        self.graph = graph
        self.nodes = list(graph.nodes)
        self.placed = placed
        live = graph.find_needed()
        self.uses = Counter(index for i in live for index in graph.nodes[i].refs())
        self.uses.update(graph.roots())
        self.needed = live

    def run(self) -> Graph:
        for index in self.needed:
            node = self.nodes[index]
            if not node.vector or not COMPUTE.get(node.dtype, torch.bool).is_floating_point:
                continue
            if node.op in ("add", "sub"):
                self._sum(index)
            elif node.op == "addcmul":
                self._product(index)
        return replace(self.graph, nodes=tuple(self.nodes))

    def _sum(self, index: int) -> None:
        """Contract `x + s*y`, `x - s*y`, `x + s*(a/b)`, `x - s*(a/b)`."""
        node = self.nodes[index]
        for first, second in self._orders(node):
            outer, rest = self._split_scale(second, node)
            if self._put_ratio(index, first, rest, outer):
                return
            if outer is not None:
                self.nodes[index] = replace(node, args=(("self", first), ("other", rest), ("alpha", outer)))
                self._decay(index)
                return

    def _put_ratio(self, index: int, first: Ref, rest: Ref, scale: Any) -> bool:
        """Contract `first + scale*rest`, or minus, if the rest is a ratio; return False if it is not."""
        node, ratio = self.nodes[index], self.nodes[rest.index]
        if ratio.op != "div" or len(ratio.args) != 2 or not self._is_used_once(rest, node):
            return False
        over = dict(ratio.args)
        inner, top = self._split_scale(over["self"], node)
        if not self._is_vector(top) or not self._is_vector(over["other"]):
            return False
        value = self._multiply(scale, inner, -1 if node.op == "sub" else None)
        args = (("self", first), ("tensor1", top), ("tensor2", over["other"]), ("value", value))
        self.nodes[index] = replace(node, op="addcdiv", args=args, overload=aten.addcdiv.default)
        return True

    def _decay(self, index: int) -> None:
        """Rewrite `x - r*(y + d*x)` as `(1 - r*d)*x - r*y`."""
        node, args = self.nodes[index], dict(self.nodes[index].args)
        sum_, rate = args["other"], args["alpha"]
        inner = self.nodes[sum_.index]
        if node.op != "sub" or inner.op != "add" or not self._is_used_once(sum_, node):
            return
        below = dict(inner.args)
        decay, same = below["alpha"], below["other"]
        if same != args["self"] or (isinstance(decay, Ref) and decay.index in self.placed):
            return
        # The sum is no longer needed, so its place is free, and it is before this one.
        left = self._subtract_from_one(self._multiply(rate, decay))
        self.nodes[sum_.index] = replace(
            node, op="mul", args=(("self", same), ("other", left)), overload=aten.mul.Tensor
        )
        if not self._put_ratio(index, sum_, below["self"], rate):
            self.nodes[index] = replace(node, args=(("self", sum_), ("other", below["self"]), ("alpha", rate)))

    def _product(self, index: int) -> None:
        """Contract `x + s*(a*b)`."""
        node, args = self.nodes[index], dict(self.nodes[index].args)
        if args.get("value", 1) != 1 or isinstance(args.get("value", 1), Ref):
            return
        for name in ("tensor1", "tensor2"):
            scale, rest = self._split_scale(args[name], node)
            if scale is not None:
                self.nodes[index] = replace(node, args=tuple({**args, name: rest, "value": scale}.items()))
                return

    def _orders(self, node: Node) -> Iterator[tuple[Ref, Ref]]:
        args = dict(node.args)
        first, second, alpha = args["self"], args["other"], args.get("alpha", 1)
        if isinstance(alpha, Ref) or alpha != 1 or not (self._is_vector(first) and self._is_vector(second)):
            return
        both = [(first, second), (second, first)] if node.op == "add" else [(first, second)]
        # A product first: its user may still contract the rest of the sum.
        yield from sorted(both, key=lambda pair: self.nodes[pair[1].index].op != "mul")

    def _is_vector(self, value: Any) -> bool:
        return isinstance(value, Ref) and self.nodes[value.index].vector

    def _is_used_once(self, ref: Ref, user: Node) -> bool:
        """Return whether a value has one use only, and the dtype that its user computes in."""
        node = self.nodes[ref.index]
        return self.uses[ref.index] == 1 and node.dtype is user.dtype

    def _split_scale(self, ref: Any, user: Node) -> tuple[Any, Any]:
        """Return (s, y) if a value is s*y, used once; (None, the value) if it is not."""
        if not self._is_vector(ref) or not self._is_used_once(ref, user) or self.nodes[ref.index].op != "mul":
            return None, ref
        args = dict(self.nodes[ref.index].args)
        for scale, rest in ((args["self"], args["other"]), (args["other"], args["self"])):
            number = isinstance(scale, int | float) and not isinstance(scale, bool)
            named = isinstance(scale, Ref) and not self.nodes[scale.index].vector and scale.index not in self.placed
            if (number or named) and self._is_vector(rest) and self.nodes[rest.index].dtype is user.dtype:
                return scale, rest
        return None, ref

    def _add(self, op: str, overload: Any, *args: tuple[str, Any]) -> Ref:
        """Append a scalar node and return its reference."""
        node = Node(op, args, torch.float64, torch.float64, vector=False, overload=overload)
        self.nodes.append(node)
        return Ref(len(self.nodes) - 1)

    def _multiply(self, *factors: Any) -> Any:
        """Return the product of numbers and scalars; None counts as one."""
        number: Any = 1
        product: Ref | None = None
        for factor in factors:
            if isinstance(factor, Ref):
                product = (
                    factor
                    if product is None
                    else self._add("mul", aten.mul.Tensor, ("self", product), ("other", factor))
                )
            elif factor is not None:
                number = number * factor
        if product is None or number == 1:
            return number if product is None else product
        return self._add("mul", aten.mul.Scalar, ("self", product), ("other", number))

    def _subtract_from_one(self, value: Any) -> Any:
        if not isinstance(value, Ref):
            return 1 - value
        return self._add("rsub", aten.rsub.Scalar, ("self", value), ("other", 1), ("alpha", 1))
