"""The eager form: torch operations on blocks that stay in the cache, with results written into kept temporaries."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ._cut import BLOCK, Layout, Pack, Target, chosen, flat_of, layout_of, vector_of
from ._graph import COMPUTE, Graph, Node, Ref
from ._lists import lists_of

__all__ = ["Program", "scalar_values"]

# The same operations under names that parse their arguments faster; arguments and order are those of the schema.
_FAST = {"add", "sub", "mul", "div", "sqrt", "rsqrt", "neg", "abs", "exp", "log", "addcmul", "addcdiv", "lerp"}
_FAST |= {"maximum", "minimum", "reciprocal", "sign", "tanh", "sigmoid", "pow", "where"}


def _out_form(overload: Any) -> tuple[Any, str] | None:
    """The form of an operation that writes to given storage, if torch has one."""
    wanted = [(argument.name, str(argument.type)) for argument in overload._schema.arguments]
    packet = overload.overloadpacket
    for name in packet.overloads():
        candidate = getattr(packet, name)
        arguments = candidate._schema.arguments
        outs = [argument.name for argument in arguments if argument.is_out]
        given = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        if len(outs) == 1 and given == wanted:
            fast = packet.__name__ in _FAST and outs[0] == "out"
            return (getattr(torch, packet.__name__) if fast else candidate), outs[0]
    return None


def _caller(node: Node, function: Any, out: str | None) -> Callable[[dict[int, Any], Any], torch.Tensor]:
    """A call of one operation whose arguments are looked up in the values computed so far.

    The schema is read here, once: reading it costs more than a whole block of arithmetic.
    """
    given = dict(node.args)
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    patches: list[tuple[int | str, int, bool]] = []
    for argument in node.overload._schema.arguments:
        if argument.name not in given:
            continue
        value = given[argument.name]
        at: int | str = argument.name if argument.kwarg_only else len(positional)
        if isinstance(value, Ref):
            patches.append((at, value.index, "Tensor" not in str(argument.type)))
            value = None
        if isinstance(at, str):
            keywords[at] = value
        else:
            positional.append(value)

    def call(values: dict[int, Any], place: Any) -> torch.Tensor:
        args, kwargs = positional.copy(), keywords.copy()
        for at, index, number in patches:
            value = values[index]
            if number:
                value = value.item()
            if isinstance(at, str):
                kwargs[at] = value
            else:
                args[at] = value
        if out is not None:
            kwargs[out] = place
        result: Any = function(*args, **kwargs)
        value_: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return value_

    return call


def scalar_values(graph: Graph, live: Sequence[int], scalars: Sequence[float]) -> dict[int, Any]:
    """The scalar part of a graph, computed in double as 0-d tensors."""
    values: dict[int, Any] = {}
    for index in live:
        node = graph.nodes[index]
        if node.vector:
            continue
        args = dict(node.args)
        if node.op == "scalar":
            values[index] = torch.tensor(scalars[args["position"]], dtype=torch.float64, device="cpu")
        elif node.op == "constant":
            value = args["value"]
            number = values[value.index].item() if isinstance(value, Ref) else value
            values[index] = torch.tensor(number, dtype=node.dtype, device="cpu")
        elif node.op == "cast":
            values[index] = values[args["self"].index].to(node.dtype)
        else:
            values[index] = _caller(node, node.overload, None)(values, None)
    return values


def _folded(graph: Graph) -> Graph:
    """The graph with `x + s * y` as one operation where s is a power of two, so that the product is exact."""
    nodes = list(graph.nodes)
    live = graph.live()
    uses = [0] * len(nodes)
    for i in live:
        for j in nodes[i].refs():
            uses[j] += 1
    for i in graph.roots():
        uses[i] += 1
    for i in live:
        node = nodes[i]
        if node.op not in ("add", "sub") or not node.dtype.is_floating_point or dict(node.args).get("alpha") != 1:
            continue
        args = dict(node.args)
        for name, rest in (("other", "self"), ("self", "other")):
            product, other = args[name], args[rest]
            if not isinstance(product, Ref) or not isinstance(other, Ref) or (name == "self" and node.op == "sub"):
                continue
            found = nodes[product.index]
            if found.op != "mul" or uses[product.index] != 1 or not found.vector or not nodes[other.index].vector:
                continue
            scalar, vector = _factors(nodes, found)
            if scalar is None or vector is None or {nodes[other.index].dtype, vector[1]} != {node.dtype}:
                continue
            nodes[i] = replace(node, args=(("self", other), ("other", vector[0]), ("alpha", scalar)))
            break
    return replace(graph, nodes=tuple(nodes))


def _factors(nodes: list[Node], node: Node) -> tuple[Any, tuple[Ref, torch.dtype] | None]:
    """A product as (a power of two, a vector with its dtype)."""
    scalar, vector = None, None
    for value in dict(node.args).values():
        if isinstance(value, Ref) and nodes[value.index].vector:
            vector = (value, nodes[value.index].dtype)
        elif isinstance(value, float | int) and abs(math.frexp(value)[0]) == 0.5:
            scalar = value
    return scalar, vector


class Program:
    """A graph laid out for blocks: its steps, and a kept temporary for each value that is alive at the same time."""

    def __init__(self, graph: Graph, outputs: Sequence[tuple[int, torch.dtype, int | None]]) -> None:
        """`outputs`: the node, the dtype of its storage, and the role it overwrites or None."""
        graph = _folded(graph)
        self.graph = graph
        self.outputs = outputs
        self.live = graph.live()
        self.roles = {dict(graph.nodes[i].args)["position"]: i for i in self.live if graph.nodes[i].op == "role"}
        self._local = threading.local()
        vector = [i for i in self.live if graph.nodes[i].vector]
        last = {i: i for i in vector}
        for i in vector:
            for j in graph.nodes[i].refs():
                if graph.nodes[j].vector:
                    last[j] = max(last[j], i)
        for index, _, _ in outputs:
            last[index] = len(graph.nodes)
        self.direct = self._direct(vector)
        self.slots: dict[int, int] = {}
        self.kinds: list[torch.dtype] = []
        free: dict[torch.dtype, list[int]] = {}
        for i in vector:
            node = graph.nodes[i]
            dtype = COMPUTE[node.dtype]
            # An operation may write over an operand that is used for the last time: it reads each element first.
            dying = [j for j in set(node.refs()) if last.get(j) == i and j in self.slots]
            for j in dying:
                free.setdefault(self.kinds[self.slots[j]], []).append(self.slots[j])
            if i in self.direct or (node.op == "role" and dtype is node.dtype):
                continue
            stock = free.setdefault(dtype, [])
            if not stock:
                self.kinds.append(dtype)
                stock.append(len(self.kinds) - 1)
            self.slots[i] = stock.pop()
        self.over_lists = lists_of(graph, outputs, self.direct)
        self.steps = [self._step(i, graph.nodes[i]) for i in vector]

    def _direct(self, vector: Sequence[int]) -> dict[int, int]:
        """Outputs that may be computed straight into their storage."""
        found: dict[int, int] = {}
        nodes = [node for node, _, _ in self.outputs]
        for position, (index, dtype, role) in enumerate(self.outputs):
            node = self.graph.nodes[index]
            if node.op == "role" or dtype is not COMPUTE[node.dtype] or nodes.count(index) > 1:
                continue
            load = None if role is None else self.roles.get(role)
            read_later = load is not None and (
                load in nodes or any(load in self.graph.nodes[i].refs() for i in vector if i > index)
            )
            if not read_later:
                found[index] = position
        return found

    def _step(self, index: int, node: Node) -> tuple[Any, ...]:
        """(index, operation, its argument, call, output or None, temporary or None), looked up once."""
        args = dict(node.args)
        argument = args.get("position", args.get("value", args.get("self")))
        return index, node, argument, self._prepare(node), self.direct.get(index), self.slots.get(index)

    @staticmethod
    def _prepare(node: Node) -> Callable[..., torch.Tensor] | None:
        if node.overload is None:
            return None
        form = _out_form(node.overload)
        return _caller(node, node.overload, None) if form is None else _caller(node, *form)

    def _temporaries(self) -> list[torch.Tensor]:
        kept = getattr(self._local, "kept", None)
        if kept is None:
            kept = [torch.empty(BLOCK, dtype=dtype, device="cpu") for dtype in self.kinds]
            self._local.kept = kept
        return kept

    def buffer(self, key: tuple[str, int], dtype: torch.dtype) -> torch.Tensor:
        """A kept buffer of one block, for gathering."""
        store = getattr(self._local, "buffers", None)
        if store is None:
            store = self._local.buffers = {}
        if key not in store or store[key].dtype is not dtype:
            store[key] = torch.empty(BLOCK, dtype=dtype, device="cpu")
        found: torch.Tensor = store[key]
        return found

    def block(
        self, size: int, scalars: dict[int, Any], roles: dict[int, torch.Tensor], out: list[torch.Tensor]
    ) -> None:
        """Run the function on one block: vectors of `size` elements in, vectors of `size` elements out."""
        values = dict(scalars)
        kept = self._temporaries()
        for index, node, argument, run, position, slot in self.steps:
            if node.op == "role":
                values[index] = roles[argument]
                if slot is None:
                    continue
            if position is not None:
                place = out[position]
            else:
                place = kept[slot] if size == BLOCK else kept[slot][:size]
            if run is not None:
                values[index] = run(values, place)
                if position is not None and values[index] is not place:
                    place.copy_(values[index])
                continue
            if node.op == "constant":
                place.fill_(values[argument.index] if isinstance(argument, Ref) else argument)
            elif node.op == "role":
                place.copy_(values[index])
            else:
                source = values[argument.index]
                narrow = node.dtype in (torch.float16, torch.bfloat16)
                place.copy_(source.to(node.dtype) if narrow else source)
            values[index] = place
        for position, (index, _, _) in enumerate(self.outputs):
            if index not in self.direct:
                out[position].copy_(values[index])

    def run(
        self,
        lists: Sequence[list[torch.Tensor]],
        targets: Sequence[Target],
        scalars: Sequence[float],
        layout: Layout | None = None,
    ) -> None:
        """Run over lists of contiguous, disjoint tensors; `targets[j]` is where output j goes."""
        numbers = scalar_values(self.graph, self.live, scalars)
        layout = layout or self.layout(lists, targets)
        for i, size in layout.large:
            self._slices(i, size, lists, targets, numbers)
        for group in layout.middle:
            if self.over_lists is not None:
                places = [chosen(target, group) for target in targets if isinstance(target, list)]
                self.over_lists.run([chosen(tensors, group) for tensors in lists], places, numbers)
        for pack in layout.packs:
            self._packed(pack, lists, targets, numbers)

    def layout(self, lists: Sequence[list[torch.Tensor]], targets: Sequence[Target]) -> Layout:
        """How these lists are cut into blocks; it depends on shapes only, so it can be kept."""
        shapes = {tuple(tensors[i].shape for tensors in lists) for i in range(len(lists[0]))}
        alike = all(len(set(shape)) == 1 for shape in shapes)
        listed = all(isinstance(target, list) for target in targets)
        return layout_of(lists, targets, self.over_lists is not None and alike and listed)

    def _slices(
        self, i: int, size: int, lists: Sequence[list[torch.Tensor]], targets: Sequence[Target], numbers: dict[int, Any]
    ) -> None:
        flats = {role: vector_of(lists[role][i]) for role in self.roles}
        outs = [flat_of(target, i, size) for target in targets]
        if size <= BLOCK:
            self.block(size, numbers, flats, outs)
            return
        cut = {role: torch.split(flat, BLOCK) for role, flat in flats.items()}
        places = [torch.split(flat, BLOCK) for flat in outs]
        for k in range(-(-size // BLOCK)):
            roles = {role: parts[k] for role, parts in cut.items()}
            self.block(min(BLOCK, size - k * BLOCK), numbers, roles, [parts[k] for parts in places])

    def _packed(
        self, pack: Pack, lists: Sequence[list[torch.Tensor]], targets: Sequence[Target], numbers: dict[int, Any]
    ) -> None:
        held = pack.held
        roles = {}
        for role, index in self.roles.items():
            place = self.buffer(("role", role), self.graph.nodes[index].dtype)[:held]
            tail = pack.tails[role]
            parts = chosen(lists[role], pack.indices)
            if tail is None:
                torch.cat([vector_of(part) for part in parts], out=place)
            else:
                torch.cat(parts, out=place.view(-1, *tail) if tail else place)
            roles[role] = place
        outs: list[torch.Tensor] = []
        scatter: list[int] = []
        for position, (_, dtype, over) in enumerate(self.outputs):
            target = targets[position]
            if isinstance(target, tuple):
                first, final = target[1][pack.indices[0]], pack.indices[-1]
                if target[1][final] + pack.sizes[-1] - first == held:
                    outs.append(target[0].narrow(0, first, held))
                    continue
            scatter.append(position)
            if over is not None and over in roles:
                outs.append(roles[over])
            else:
                outs.append(self.buffer(("out", position), dtype)[:held])
        self.block(held, numbers, roles, outs)
        for position in scatter:
            target, source, sizes = targets[position], outs[position], pack.sizes
            tail = pack.tails[len(lists) + position]
            if isinstance(target, tuple) or tail is None:
                into = [flat_of(target, i, size) for i, size in zip(pack.indices, pack.sizes, strict=True)]
            else:
                into = chosen(target, pack.indices)
                if tail:
                    source, width = source.view(-1, *tail), tail.numel()
                    sizes = [size // width for size in sizes]
            torch.split_with_sizes_copy(source, sizes, out=into)
