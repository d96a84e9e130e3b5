"""The foreach function of torch for a node of the graph, and its operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ._graph import COMPUTE, Graph, Node, Ref


class ForeachCall(NamedTuple):
    """A foreach function of torch with the name of the operation.

    `lists` are the arguments that have to be lists, `number` the last one where it has to be a number, `either` where it may
    be both, `keyword` one by name. Where it `commutes` the first two may change places; where it is `placed` the last
    argument may be a 0-d tensor on the device of the lists.
    """

    lists: tuple[str, ...] = ("self",)
    number: str | None = None
    either: str | None = None
    keyword: str | None = None
    commutes: bool = False
    placed: bool = False

    @property
    def last(self) -> str | None:
        """The name of the last argument where it may be a number."""
        return self.number or self.either

    @property
    def names(self) -> list[str]:
        """The arguments by position."""
        return [*self.lists, *([self.last] if self.last else [])]


_UNARY = ["neg", "abs", "sqrt", "exp", "reciprocal", "sign", "log", "tanh", "sigmoid", "floor", "ceil", "round"]
_UNARY += ["trunc", "frac", "erf", "expm1", "log1p", "rsqrt"]
#: The foreach functions of torch.
FOREACH: dict[str, ForeachCall] = {name: ForeachCall() for name in _UNARY}
FOREACH |= {
    "add": ForeachCall(either="other", keyword="alpha", commutes=True, placed=True),
    "sub": ForeachCall(either="other", keyword="alpha"),
    "mul": ForeachCall(either="other", commutes=True, placed=True),
    "div": ForeachCall(either="other", placed=True),
    "maximum": ForeachCall(("self", "other"), commutes=True),
    "minimum": ForeachCall(("self", "other"), commutes=True),
    "lerp": ForeachCall(("self", "end"), number="weight"),
    "pow": ForeachCall(number="exponent"),
    "addcmul": ForeachCall(("self", "tensor1", "tensor2"), keyword="value"),
    "addcdiv": ForeachCall(("self", "tensor1", "tensor2"), keyword="value"),
    "clamp_min": ForeachCall(number="min"),
    "clamp_max": ForeachCall(number="max"),
}


def find_call(
    graph: Graph, node: Node, alias: dict[int, int], last: dict[int, int]
) -> tuple[str, tuple[Any, ...], tuple[str, Any] | None] | None:
    """Return a node as a foreach function: its name, operands and keyword; None if torch has none for it.

    Args:
        graph: The graph.
        node: The node.
        alias: For each vector the node whose value it is.
        last: For each vector the node that reads it last.
    """
    if node.overload is None or not _is_floating(graph, node):
        return None
    args = dict(node.args)
    args |= {name: Ref(alias.get(value.index, value.index)) for name, value in node.args if isinstance(value, Ref)}
    name = _choose_name(node.op, args)
    call = FOREACH.get(name)
    # An argument without a counterpart may be a rounding mode, say.
    if call is None or any(args[other] not in (None, 0) for other in args.keys() - {*call.names, call.keyword}):
        return None
    factor = args.get(call.keyword or "", 1)
    plain = factor == 1 and not isinstance(factor, Ref)
    operands = _order_operands(graph, call, [args[each] for each in call.names], plain, last)
    if not _fit(graph, node, call, operands, plain):
        return None
    keyword = None if call.keyword is None or (plain and call.keyword == "alpha") else (call.keyword, factor)
    return name, tuple(operands), keyword


def _is_floating(graph: Graph, node: Node) -> bool:
    dtypes = [node.dtype, *(graph.nodes[j].dtype for j in node.refs())]
    return all(COMPUTE[dtype].is_floating_point for dtype in dtypes)


def _choose_name(op: str, args: dict[str, Any]) -> str:
    """Return the name of the foreach function; for a clamp with one bound, the name of that bound's function."""
    bounds = [bound for bound in ("min", "max") if args.get(bound) is not None]
    return f"clamp_{bounds[0]}" if op == "clamp" and len(bounds) == 1 else op


def _is_vector(graph: Graph, value: Any) -> bool:
    return isinstance(value, Ref) and graph.nodes[value.index].vector


def _order_operands(
    graph: Graph, call: ForeachCall, operands: list[Any], plain: bool, last: dict[int, int]
) -> list[Any]:
    """Return the operands with a list first; of two lists the one that is read last, since it is overwritten."""
    if not (call.commutes and plain):
        return operands
    first, second = operands
    if not _is_vector(graph, first):
        return [second, first]
    later = _is_vector(graph, second) and last.get(first.index, -1) > last.get(second.index, -1)
    return [second, first] if later else operands


def _fit(graph: Graph, node: Node, call: ForeachCall, operands: Sequence[Any], plain: bool) -> bool:
    """Return whether operands are lists where they must be, of the dtype of the result, and numbers where they must be."""
    vectors = [_is_vector(graph, operand) for operand in operands]
    dtypes = {COMPUTE[graph.nodes[each.index].dtype] for each, vector in zip(operands, vectors, strict=True) if vector}
    if not all(vectors[: len(call.lists)]) or dtypes != {COMPUTE[node.dtype]}:
        return False
    return not (call.number and vectors[-1]) and (vectors[-1] or plain or not call.either)


def takes_scalars(name: str, operands: Sequence[Any], keyword: dict[str, Any]) -> bool:
    """Return whether the foreach function takes these scalars: a scalar on a device only in some positions.

    Args:
        name: The name of the function.
        operands: Its operands.
        keyword: Its keyword argument.
    """
    scalars = [*keyword.values(), *(() if FOREACH[name].placed else operands)]
    return not any(isinstance(value, torch.Tensor) for value in scalars)
