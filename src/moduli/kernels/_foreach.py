"""The form without a compiler: the graph, operation by operation, through torch's foreach functions.

On an accelerator each operation is one launch for all tensors, and values lie in buffers that are reused: after
the first call nothing is allocated. On the CPU the lists are split into groups that stay in the cache between operations.
Nothing is read back: a scalar on a device stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import _cuts
from ._cuts import Cut, Lists
from ._foreach_call import find_call, takes_scalars
from ._forms import Form, Outputs, Situation, Work
from ._graph import COMPUTE, Graph, Node, Ref, contract
from ._memory import Memory
from ._plain import PlainForm
from ._scalars import ScalarPart, apply_node, find_placed

if TYPE_CHECKING:
    from ._plan import PlanState


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation: its node, the foreach function (or None), its operands, whether it overwrites the first, its buffer."""

    index: int
    node: Node
    function: str | None
    operands: tuple[Any, ...]
    keyword: tuple[str, Any] | None
    in_place: bool
    slot: tuple[torch.dtype, int] | None


class ForeachForm(Form):
    """The graph as torch's foreach operations: one sequence of them for each choice of scalars that live on a device."""

    name = "foreach"
    sentence = "torch's foreach operations"

    @classmethod
    def find_problem(cls, graph: Graph, situation: Situation) -> str | None:
        """Return why lists can't be split and concatenated: values depend on positions, or are summed per tensor."""
        if graph.count_squares():
            return "sums of squares are found for each tensor"
        return "what is rounded by chance depends on positions in whole tensors" if graph.reads_positions() else None

    def __init__(self, graph: Graph, outputs: Outputs, why: str) -> None:
        super().__init__(graph, outputs, why)
        self._sequences: dict[tuple[bool, ...], _Sequence] = {}
        self.fallback = PlainForm(graph, outputs, "a list is read and written at once")

    def run(self, work: Work) -> bool:
        """Run the operations; return False if a role that is read is written through another one."""
        if work.state is not None and work.state.exact:
            return False
        lists, targets = ([work.choose(each) for each in every] for every in (work.request.roles, work.targets))
        if not lists[0]:
            return True
        tensors = tuple([isinstance(value, torch.Tensor) for value in work.scalars])
        sequence = self._sequences.get(tensors)
        if sequence is None:
            placed = find_placed(self.graph, tensors)
            sequence = self._sequences[tensors] = _Sequence(contract(self.graph, placed), self.outputs, placed)
        cuts = work.piece.cache.get("cuts")  # read once: other threads fill it too
        if cuts is None:
            cuts = work.piece.cache["cuts"] = _cuts.cut_lists([*lists, *targets])
        if cuts:  # otherwise every tensor is empty
            sequence.run(lists, targets, work.scalars, cuts)
        return True

    def find_running(self, state: PlanState | None) -> tuple[Form, str]:
        """Return the plain form if a list is read and written at once."""
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
        # The location of a node's value: a role that is overwritten anyway, or None for a buffer.
        self._home: dict[int, int | None] = {}
        self._slots: dict[int, tuple[torch.dtype, int]] = {}
        self._written = {role for _, role in self._outputs if role is not None}
        self._steps = []
        for i in vectors:
            self._steps.append(self._step(i))
            for j in self._refs(nodes[i]):
                if self._last[j] == i:  # its buffer is free for later nodes
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
        call = find_call(self.graph, node, self._alias, self._last)
        if call is None:
            return _Step(index, node, None, (), None, in_place=False, slot=None)
        name, operands, keyword = call
        in_place = self._may_overwrite(index, operands)
        if in_place:
            first = operands[0].index
            self._home[index] = self._home[first]
            if first in self._slots:
                self._slots[index] = self._slots[first]
        function = name if hasattr(torch, f"_foreach_{name}_") else None
        slot = None if in_place or function is None else self._take_slot(index)
        return _Step(index, node, function, operands, keyword, in_place, slot)

    def _may_overwrite(self, index: int, operands: Sequence[Any]) -> bool:
        """Return whether a node is the last to read its first operand, whose memory then takes the result."""
        first, others = operands[0].index, [ref.index for ref in operands[1:] if isinstance(ref, Ref)]
        nodes, home = self.graph.nodes, self._home[first]
        if self._last[first] != index or first in others:
            return False
        # A role that is overwritten anyway may take the result once its value is not needed.
        return COMPUTE[nodes[first].dtype] is COMPUTE[nodes[index].dtype] and (home is None or home in self._written)

    def _take_slot(self, index: int) -> tuple[torch.dtype, int]:
        """Return a buffer without a value that is still to be read."""
        dtype, used = COMPUTE[self.graph.nodes[index].dtype], set(self._slots.values())
        free = next(i for i in range(len(used) + 1) if (dtype, i) not in used)
        self._slots[index] = (dtype, free)
        return dtype, free

    # ------------------------------------------------------------------ running

    def run(self, lists: Lists, targets: Lists, scalars: Sequence[Any], cuts: Sequence[Cut]) -> None:
        """Run over lists of disjoint tensors; those at a position are contiguous or of one shape.

        Args:
            lists: The roles.
            targets: The tensors that each output goes to: those of a role that it overwrites.
            scalars: The scalars.
            cuts: The parts in which the lists are processed.
        """
        first = lists[0][0]
        with nullcontext() if _cuts.is_on_host(first.device) else cuts[0].buffers.open(first) as memory:
            numbers = self._scalars.evaluate(scalars, memory)
            for cut in cuts:
                for group in cut.follow([*lists, *targets]):
                    run = self._run_stacked if cut.stacked else self._group
                    run(group[: len(lists)], group[len(lists) :], numbers, memory)

    def _run_stacked(self, lists: Lists, targets: Lists, numbers: dict[int, Any], memory: Memory | None) -> None:
        """Run on one stack of tensors for each list, and copy the results back: each operation is one call, not one a tensor."""
        stacks = [[torch.stack(list(tensors))] for tensors in lists]
        results = [
            [torch.empty_like(stacks[0][0], dtype=target[0].dtype)] if role is None else stacks[role]
            for (_, role), target in zip(self._outputs, targets, strict=True)
        ]
        self._group(stacks, results, numbers, memory)
        for target, (result,) in zip(targets, results, strict=True):
            torch.unbind_copy(result, out=list(target))

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
            if step.function is not None and takes_scalars(step.function, operands, keyword):
                values[step.index] = _run_step(step, operands, keyword, memory)
            else:
                if memory is None:
                    result = [self._single(node, values, i, lists[0][i]) for i in range(len(lists[0]))]
                else:
                    result = self._run_joined(node, values, lists[0], step.index, memory)
                if step.in_place:
                    torch._foreach_copy_(operands[0], result)
                    result = operands[0]
                values[step.index] = result
        self._store(values, targets, memory)

    def _run_joined(
        self, node: Node, values: dict[int, Any], like: Sequence[torch.Tensor], index: int, memory: Memory
    ) -> list[torch.Tensor]:
        """Return the result of an operation without a foreach function, run on all tensors concatenated, in one launch."""
        sizes = [tensor.numel() for tensor in like]
        vectors: dict[int, list[torch.Tensor]] = {}
        for j in self._refs(node):
            flat = [tensor.reshape(-1) for tensor in values[j]]
            key = ("joined", len(vectors), flat[0].dtype)
            out = memory.get(key)
            memory[key] = torch.cat(flat) if out is None else torch.cat(flat, out=out)
            vectors[j] = [memory[key]]
        out = memory.get(index)
        whole: Any = out
        if vectors:
            whole = next(iter(vectors.values()))[0]
        elif out is None:
            whole = like[0].new_empty(sum(sizes))
        result = memory[index] = self._single(node, {**values, **vectors}, 0, whole, out)
        parts = zip(torch.split(result, sizes), like, strict=True)
        return [part.view(tensor.shape) for part, tensor in parts]

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
        """Return the result of one operation on one tensor of each list, shaped like `like`; written to `out` if possible."""
        args = dict(node.args)
        if node.op in ("constant", "cast"):
            source = args["value"] if node.op == "constant" else args["self"]
            value: Any = values[self._alias.get(source.index, source.index)] if isinstance(source, Ref) else source
            if isinstance(value, list | tuple):
                narrow = node.dtype in (torch.float16, torch.bfloat16)
                source_tensor: torch.Tensor = value[i].to(node.dtype) if narrow else value[i]
                if out is None:
                    return source_tensor.to(COMPUTE[node.dtype])
                torch._foreach_copy_([out], [source_tensor])
                return out
            result = torch.empty_like(like, dtype=COMPUTE[node.dtype]) if out is None else out
            result.fill_(value)
            return result

        def read(index: int) -> Any:
            value = values[self._alias.get(index, index)]
            return value[i] if self.graph.nodes[index].vector else value

        return apply_node(node, read, out)


def _run_step(step: _Step, operands: list[Any], keyword: dict[str, Any], memory: Memory | None) -> Any:
    """Return the result of one foreach function; a value that overwrites nothing goes to a reused buffer, by a copy."""
    in_place = step.in_place
    if memory is not None and step.slot is not None:
        operands, in_place = [_copy(operands[0], step.slot[0], step.slot, memory), *operands[1:]], True
    name = f"_foreach_{step.function}{'_' if in_place else ''}"
    function = getattr(torch, name)
    if isinstance(operands[-1], torch.Tensor):  # by this overload, or torch would read it back as a number
        function = getattr(torch.ops.aten, name).Tensor
    result = function(*operands, **keyword)
    return operands[0] if in_place else result


def _fit(operand: Any, dtype: torch.dtype, key: Any, memory: Memory | None) -> Any:
    """Return a scalar on a device in the dtype of the list beside it: otherwise each tensor would need its own launch."""
    if not isinstance(operand, torch.Tensor) or operand.dtype is dtype:
        return operand
    return _copy([operand], dtype, key, memory)[0]


def _origin(graph: Graph, index: int) -> int:
    """Return the node whose value this one has: a cast that changes nothing has none."""
    node = graph.nodes[index]
    while node.op == "cast" and node.vector:
        source = dict(node.args)["self"].index
        before = graph.nodes[source]
        narrow = node.dtype in (torch.float16, torch.bfloat16) and before.dtype is not node.dtype
        if narrow or not before.vector or COMPUTE.get(before.dtype) is not COMPUTE.get(node.dtype):
            break
        index, node = source, before
    return index


def _copy(tensors: Sequence[torch.Tensor], dtype: torch.dtype, key: Any, memory: Memory | None) -> list[torch.Tensor]:
    """Return tensors copied to another location or dtype; to the same buffers at every call if there is a memory."""
    copies: list[torch.Tensor] | None = None if memory is None else memory.get(key)
    if copies is None:
        copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if memory is not None:
        memory[key] = copies
    torch._foreach_copy_(copies, list(tensors))
    return copies
