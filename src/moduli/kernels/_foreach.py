"""The form without a compiler: the graph, operation by operation, through torch's foreach functions.

On an accelerator each operation is one launch for all tensors, and values lie in memory that is kept from call to call: after
the first one nothing is allocated. On the CPU the lists are cut into groups that stay in the cache between operations.
Nothing is read back: a scalar that lives on a device stays there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ._forms import Form, Outputs, Situation, Work
from ._graph import COMPUTE, Graph, Node, Ref, contract
from ._memory import KeptMemory, Memory
from ._operations import FOREACH
from ._plain import PlainForm
from ._scalars import ScalarPart, apply_node, find_placed

if TYPE_CHECKING:
    from ._plan import PlanState

#: Elements in a block of a large tensor, or in a group of small ones: few enough to stay in the cache between operations.
BLOCK = 1 << 18

Lists = Sequence[Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation: its node, the foreach function (or None) and its operands, whether it may overwrite, and its memory."""

    index: int
    node: Node
    function: str | None
    operands: tuple[Any, ...]
    keyword: tuple[str, Any] | None
    in_place: bool
    slot: tuple[torch.dtype, int] | None


class Program:
    """A graph as operations over lists: one sequence of them for each choice of scalars that live on a device."""

    def __init__(self, graph: Graph, outputs: Outputs) -> None:
        """`outputs`: the node, the dtype of its storage, and the role it overwrites or None."""
        self.graph = graph
        self._outputs = outputs
        self._sequences: dict[tuple[bool, ...], _Sequence] = {}

    def run(self, lists: Lists, targets: Lists, scalars: Sequence[Any], cuts: list[_Cut]) -> None:
        """Run over lists of disjoint tensors; those at a position are contiguous or of one shape.

        `targets[j]` are the tensors that output j goes to; where it overwrites a role they are the tensors of this role.
        `cuts` is empty at first, and then says how lists of these shapes are gone through.
        """
        if not lists or not lists[0]:
            return
        tensors = tuple([isinstance(value, torch.Tensor) for value in scalars])
        sequence = self._sequences.get(tensors)
        if sequence is None:
            placed = find_placed(self.graph, tensors)
            sequence = self._sequences[tensors] = _Sequence(contract(self.graph, placed), self._outputs, placed)
        known = tuple(cuts)  # read once: other threads fill it too
        if not known:
            known = tuple(_cut_lists(lists, targets))
            cuts[:] = known
        if known:  # otherwise every tensor is empty
            sequence.run(lists, targets, scalars, known)


class ForeachForm(Form):
    """The graph as torch's foreach operations."""

    name = "foreach"
    sentence = "torch's foreach operations"

    def __init__(self, graph: Graph, outputs: Outputs, why: str) -> None:
        super().__init__(graph, outputs, why)
        self._program = Program(graph, outputs)
        self.fallback = PlainForm(graph, outputs, "a list is read and written at once")

    @classmethod
    def find_problem(cls, graph: Graph, situation: Situation) -> str | None:
        """Return None: what has no foreach function runs tensor by tensor."""
        return None

    def run(self, work: Work) -> bool:
        """Run the operations, unless a role that is read is written through another one."""
        if work.state is not None and work.state.exact:
            return False
        lists = [[work.choose(each) for each in every] for every in (work.request.roles, work.targets)]
        self._program.run(lists[0], lists[1], work.scalars, work.piece.cuts)
        return True

    def find_running(self, state: PlanState | None) -> tuple[Form, str]:
        """Return the plain form where a list is read and written at once."""
        if state is not None and state.exact and self.fallback is not None:
            return self.fallback, self.fallback.why
        return self, self.why


class _Sequence:
    """Operations in order, each with the memory it may overwrite."""

    def __init__(self, graph: Graph, outputs: Outputs, placed: frozenset[int]) -> None:
        self.graph = graph
        nodes, live = graph.nodes, graph.find_needed()
        self._alias = {i: _origin(graph, i) for i in live}
        self._outputs = [(self._alias[index], role) for index, _, role in outputs]
        self._scalars = ScalarPart(graph, [i for i in live if not nodes[i].vector], placed)
        vectors = [i for i in live if nodes[i].vector and self._alias[i] == i]
        self._last = {i: i for i in vectors}
        for i in vectors:
            for j in self._refs(nodes[i]):
                self._last[j] = max(self._last[j], i)
        for index, _ in self._outputs:
            self._last[index] = len(nodes)
        # Where the value of a node lies: in a role that is overwritten anyway, or in memory of its own.
        self._home: dict[int, int | None] = {}
        self._slots: dict[int, tuple[torch.dtype, int]] = {}
        self._written = {role for _, role in self._outputs if role is not None}
        self._steps = []
        for i in vectors:
            self._steps.append(self._step(i))
            for j in self._refs(nodes[i]):
                if self._last[j] == i:  # its memory is free for what comes next
                    self._slots.pop(j, None)

    def _refs(self, node: Node) -> list[int]:
        return [self._alias[j] for j in node.refs() if self.graph.nodes[j].vector]

    def _step(self, index: int) -> _Step:
        node = self.graph.nodes[index]
        if node.op == "role":
            position = dict(node.args)["position"]
            self._home[index] = position if COMPUTE[node.dtype] is node.dtype else None
            slot = self._take_slot(index) if self._home[index] is None else None
            return _Step(index, node, None, (position,), None, in_place=False, slot=slot)
        self._home[index] = None
        call = _call(self.graph, node, self._alias, self._last) if node.overload is not None else None
        if call is None:
            return _Step(index, node, None, (), None, in_place=False, slot=None)
        name, operands, keyword = call
        first = operands[0].index
        dies = self._last[first] == index and first not in [ref.index for ref in operands[1:] if isinstance(ref, Ref)]
        kinds = COMPUTE[self.graph.nodes[first].dtype] is COMPUTE[node.dtype]
        home = self._home[first]
        # The memory of a role that is overwritten anyway is as good as any once its value is not needed.
        in_place = dies and kinds and (home is None or home in self._written)
        if in_place:
            self._home[index] = home
            if first in self._slots:
                self._slots[index] = self._slots[first]
        function = name if hasattr(torch, f"_foreach_{name}_") else None
        slot = None if in_place or function is None else self._take_slot(index)
        return _Step(index, node, function, operands, keyword, in_place, slot)

    def _take_slot(self, index: int) -> tuple[torch.dtype, int]:
        """Memory that holds no value which is still to be read."""
        dtype, used = COMPUTE[self.graph.nodes[index].dtype], set(self._slots.values())
        free = next(i for i in range(len(used) + 1) if (dtype, i) not in used)
        self._slots[index] = (dtype, free)
        return dtype, free

    # ------------------------------------------------------------------ running

    def run(self, lists: Lists, targets: Lists, scalars: Sequence[Any], cuts: Sequence[_Cut]) -> None:
        """Run over lists, as told in `Program.run`."""
        first = lists[0][0]
        with nullcontext() if is_on_host(first.device) else cuts[0].kept.open(first) as memory:
            numbers = self._scalars.evaluate(scalars, memory)
            for cut in cuts:
                for group in _follow(cut, [*lists, *targets]):
                    self._group(group[: len(lists)], group[len(lists) :], numbers, memory)

    def _group(self, lists: Lists, targets: Lists, numbers: dict[int, Any], memory: Memory | None) -> None:
        values: dict[int, Any] = dict(numbers)

        def read(operand: Any) -> Any:
            return values[operand.index] if isinstance(operand, Ref) else operand

        for step in self._steps:
            node = step.node
            if node.op == "role":
                role = lists[step.operands[0]]
                values[step.index] = role if step.slot is None else _copy(role, step.slot[0], step.slot, memory)
                continue
            operands = [
                _fit(read(operand), COMPUTE[node.dtype], (step.index, i), memory)
                for i, operand in enumerate(step.operands)
            ]
            keyword = {} if step.keyword is None else {step.keyword[0]: read(step.keyword[1])}
            if step.function is not None and _takes(step.function, operands, keyword):
                values[step.index] = _run_step(step, operands, keyword, memory)
            else:
                if memory is None:
                    made = [self._single(node, values, i, lists[0][i]) for i in range(len(lists[0]))]
                else:
                    made = self._run_joined(node, values, lists[0], step.index, memory)
                if step.in_place:
                    torch._foreach_copy_(operands[0], made)
                    made = operands[0]
                values[step.index] = made
        self._store(values, targets, memory)

    def _run_joined(
        self, node: Node, values: dict[int, Any], like: Sequence[torch.Tensor], index: int, memory: Memory
    ) -> list[torch.Tensor]:
        """One operation that torch has no foreach function for, on all tensors as one vector: launches do not add up."""
        sizes = [tensor.numel() for tensor in like]
        vectors: dict[int, list[torch.Tensor]] = {}
        for j in self._refs(node):
            parts = [tensor.reshape(-1) for tensor in values[j]]
            key = ("joined", len(vectors), parts[0].dtype)
            out = memory.get(key)
            memory[key] = torch.cat(parts) if out is None else torch.cat(parts, out=out)
            vectors[j] = [memory[key]]
        out = memory.get(index)
        whole: Any = out
        if vectors:
            whole = next(iter(vectors.values()))[0]
        elif out is None:
            whole = like[0].new_empty(sum(sizes))
        made = memory[index] = self._single(node, {**values, **vectors}, 0, whole, out)
        pieces = zip(torch.split(made, sizes), like, strict=True)
        return [piece.view(tensor.shape) for piece, tensor in pieces]

    def _store(self, values: dict[int, Any], targets: Lists, memory: Memory | None) -> None:
        waiting = []
        for place, ((index, role), target) in enumerate(zip(self._outputs, targets, strict=True)):
            value, home = values[index], self._home[index]
            if home is not None and home != role and home in self._written:
                value = _copy(value, value[0].dtype, ("store", place), memory)
            if role is None or home != role:
                waiting.append((list(target), list(value)))
        for target, value in waiting:
            torch._foreach_copy_(target, value)

    def _single(
        self, node: Node, values: dict[int, Any], i: int, like: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One operation on one tensor of each list, which are shaped like this one; into `out` where that is possible."""
        args = dict(node.args)
        if node.op in ("constant", "cast"):
            source = args["value"] if node.op == "constant" else args["self"]
            value: Any = values[self._alias.get(source.index, source.index)] if isinstance(source, Ref) else source
            if isinstance(value, list | tuple):
                narrow = node.dtype in (torch.float16, torch.bfloat16)
                found: torch.Tensor = value[i].to(node.dtype) if narrow else value[i]
                if out is None:
                    return found.to(COMPUTE[node.dtype])
                torch._foreach_copy_([out], [found])
                return out
            made = torch.empty_like(like, dtype=COMPUTE[node.dtype]) if out is None else out
            made.fill_(value)
            return made

        def read(index: int) -> Any:
            value = values[self._alias.get(index, index)]
            return value[i] if self.graph.nodes[index].vector else value

        return apply_node(node, read, out)


def _run_step(step: _Step, operands: list[Any], keyword: dict[str, Any], memory: Memory | None) -> Any:
    """One foreach function; a value that overwrites nothing goes to memory that is kept, by way of a copy."""
    in_place = step.in_place
    if memory is not None and step.slot is not None:
        operands, in_place = [_copy(operands[0], step.slot[0], step.slot, memory), *operands[1:]], True
    name = f"_foreach_{step.function}{'_' if in_place else ''}"
    function = getattr(torch, name)
    if isinstance(operands[-1], torch.Tensor):  # named, or torch would read it back as a number
        function = getattr(torch.ops.aten, name).Tensor
    result = function(*operands, **keyword)
    return operands[0] if in_place else result


def _fit(operand: Any, dtype: torch.dtype, key: Any, memory: Memory | None) -> Any:
    """A scalar on a device in the dtype of the list beside it: otherwise each tensor would be a launch of its own."""
    if not isinstance(operand, torch.Tensor) or operand.dtype is dtype:
        return operand
    return _copy([operand], dtype, key, memory)[0]


def _origin(graph: Graph, index: int) -> int:
    """The node whose value this one is: a cast that changes nothing has none of its own."""
    node = graph.nodes[index]
    while node.op == "cast" and node.vector:
        source = dict(node.args)["self"].index
        before = graph.nodes[source]
        narrow = node.dtype in (torch.float16, torch.bfloat16) and before.dtype is not node.dtype
        if narrow or not before.vector or COMPUTE.get(before.dtype) is not COMPUTE.get(node.dtype):
            break
        index, node = source, before
    return index


def _call(
    graph: Graph, node: Node, alias: dict[int, int], last: dict[int, int]
) -> tuple[str, tuple[Any, ...], tuple[str, Any] | None] | None:
    """(name, operands, keyword) of a node as a foreach function; None where torch has none for it."""
    args = {
        name: Ref(alias[value.index]) if isinstance(value, Ref) and value.index in alias else value
        for name, value in node.args
    }
    if node.overload is None or not all(COMPUTE[graph.nodes[j].dtype].is_floating_point for j in node.refs()):
        return None
    if not COMPUTE[node.dtype].is_floating_point:
        return None

    def vector(value: Any) -> bool:
        return isinstance(value, Ref) and graph.nodes[value.index].vector

    def have_one_dtype(*values: Any) -> bool:
        return all(COMPUTE[graph.nodes[v.index].dtype] is COMPUTE[node.dtype] for v in values if vector(v))

    name = node.op
    bounds = [bound for bound in ("min", "max") if args.get(bound) is not None]
    if name == "clamp" and len(bounds) == 1:
        name = f"clamp_{bounds[0]}"
    call = FOREACH.get(name)
    if call is None:
        return None
    last_name = call.number or call.either
    operands = [args[each] for each in (*call.lists, *((last_name,) if last_name else ()))]
    used = {*call.lists, last_name, call.keyword}
    if any(value not in (None, 0) for each, value in args.items() if each not in used):
        return None  # a rounding mode, say
    keyword = (call.keyword, args.get(call.keyword, 1)) if call.keyword else None
    plain = keyword is None or (keyword[1] == 1 and not isinstance(keyword[1], Ref))
    if call.commutes and plain:
        first, second = operands
        # The one that is used for the last time is overwritten.
        later = vector(first) and vector(second) and last.get(first.index, -1) > last.get(second.index, -1)
        if later or not vector(first):
            operands = [second, first]
    lists = len(call.lists)
    if not all(map(vector, operands[:lists])) or not have_one_dtype(*operands):
        return None
    if (call.number and vector(operands[-1])) or (call.either and not vector(operands[-1]) and not plain):
        return None
    return name, tuple(operands), None if plain and call.keyword == "alpha" else keyword


def _takes(name: str, operands: Sequence[Any], keyword: dict[str, Any]) -> bool:
    """Whether the foreach function takes these scalars: a scalar on a device only in some places."""
    given = [*keyword.values(), *(() if FOREACH[name].placed else operands)]
    return not any(isinstance(value, torch.Tensor) for value in given)


def _copy(tensors: Sequence[torch.Tensor], dtype: torch.dtype, key: Any, memory: Memory | None) -> list[torch.Tensor]:
    """Tensors in another place or dtype, the same at every call where memory is kept."""
    made: list[torch.Tensor] | None = None if memory is None else memory.get(key)
    if made is None:
        made = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if memory is not None:
        memory[key] = made
    torch._foreach_copy_(made, list(tensors))
    return made


def preserve_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that torch gives to the result of a pointwise operation: its own, if its elements lie side by side."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor in the order of their addresses."""
    if tensor.dim() == 1:
        return tensor
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Part of the lists that operations go through together: small tensors, or the blocks of a large one."""

    indices: list[int] | None  # None for all of them
    flat: list[bool] | None  # which of them have to be read as vectors; None where none has
    blocks: bool = False
    kept: KeptMemory = field(default_factory=KeptMemory)  # of values on a device


def is_on_host(device: torch.device) -> bool:
    """Whether tensors on a device are gone through in groups that fit the caches, and not all at once."""
    return device.type == "cpu"


Cuts = list[_Cut]


def _cut_lists(lists: Lists, targets: Lists) -> Cuts:
    """On the CPU large tensors are cut into blocks and small ones share a group; elsewhere one launch takes all."""
    every = [*lists, *targets]
    count = len(lists[0])
    sizes = [tensor.numel() for tensor in lists[0]]
    unlike = [any(tensors[i].shape != lists[0][i].shape for tensors in every) for i in range(count)]

    def close(chosen: list[int]) -> _Cut:
        flat = [unlike[i] for i in chosen]
        return _Cut(None if len(chosen) == count else chosen, flat if any(flat) else None)

    if not is_on_host(lists[0][0].device):
        return [close(list(range(count)))]
    found: Cuts = []
    waiting: list[int] = []
    held = 0
    for i, size in enumerate(sizes):
        layouts = {(tensors[i].is_contiguous() or tensors[i].stride()) for tensors in every}
        if size * 4 > BLOCK and len(layouts) == 1 and preserve_strides(lists[0][i]) == lists[0][i].stride():
            found.append(_Cut([i], [True], blocks=True))
        elif size:
            if held + size > BLOCK:
                found.append(close(waiting))
                waiting, held = [], 0
            waiting.append(i)
            held += size
    return [*found, close(waiting)] if waiting else found


def _follow(cut: _Cut, every: Sequence[Sequence[torch.Tensor]]) -> Iterator[Lists]:
    if cut.blocks and cut.indices is not None:
        parts = [torch.split(_flat(tensors[cut.indices[0]]), BLOCK) for tensors in every]
        yield from ([[piece] for piece in pieces] for pieces in zip(*parts, strict=True))
        return
    chosen = every if cut.indices is None else [[tensors[i] for i in cut.indices] for tensors in every]
    if cut.flat is not None:
        chosen = [[_flat(t) if flat else t for t, flat in zip(tensors, cut.flat, strict=True)] for tensors in chosen]
    yield chosen
