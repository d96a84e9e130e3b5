"""The parameters of a population as links see them: N x P matrices whose rows are members.

A **block** is all parameters that links treat alike: of one dtype and device, in one group of the optimizer, with equal
settings and equally far trained. Where that is everything the population has (the usual case), the block *is* the
population's storage. Otherwise it is a copy of some of its columns, written back before each evaluation and at the end of the
step: no kernel takes the columns where they are.

Members are rows and not columns, since members are what is exchanged, copied, ranked and looked at.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import map_tensors
from ._evaluators import MemberEvaluator
from ._members import takes_matrices
from ._needs import keeps_graph
from ._processes import OverProcesses
from ._state import ParamState

if TYPE_CHECKING:
    from .module import Module
    from .objective import Objective
    from .optimizer import Optimizer


class MemberMatrices:
    """The blocks of an optimizer over a population, and the links whose state is kept for them.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if optimizer.population is None:
            raise ValueError("only the parameters of a population are matrices")
        self.population = optimizer.population
        self.binding = optimizer.binding
        self.blocks: list[Block] = []
        self.leaves: list[Tensor] = []
        self._tensors: list[Tensor] = []
        self._known: tuple[list[Tensor], list[bool] | None, list[int]] | None = None
        self._keys: list[Any] = []
        self.relink(optimizer)

    def relink(self, optimizer: Optimizer) -> None:
        """Find the links that take matrices, and have their states show a leaf its columns."""
        self.reduce = optimizer._reduce if isinstance(optimizer._reduce, OverProcesses) else None
        self.used = not keeps_graph(optimizer._needs) and not optimizer.differentiable
        self.links: list[Module] = []
        for top in optimizer.modules:
            if self.used and takes_matrices(top):
                self.links += [link for _, link in top.links()]
        for link in self.links:
            link._state.find = self.find_state

    # ------------------------------------------------------------------ a step

    def begin(self, leaves: list[Tensor], evaluated: bool) -> list[Tensor]:
        """The parameters for one step: those that have a gradient, where it is evaluated, or had one at the last step."""
        present = None
        if evaluated:
            present = [leaf.grad is not None for leaf in leaves]
            present = None if all(present) or not any(present) else present
        elif self._known is not None and self._known[0] is leaves:
            present = self._known[1]
        self.compose(leaves, present)
        self.pull()
        if evaluated:
            self.gather()
        return self._tensors

    def compose(self, leaves: list[Tensor], present: list[bool] | None) -> None:
        """Put the leaves that have gradients into blocks; states follow."""
        local = [link.settings.local for link in self.links if link.settings.local]
        pointers = [matrix.data_ptr() for matrix in self.population.matrices]
        known = self._known
        if known is not None and known[0] is leaves and known[1:] == (present, pointers) and not local:
            return
        chosen = leaves if present is None else [leaf for leaf, here in zip(leaves, present, strict=True) if here]
        groups = {
            id(leaf): entry.group
            for leaf, entry in zip(self.population.parameters(), self.population.layout, strict=True)
        }
        keys = [
            (groups[id(leaf)], self.binding.group_of[leaf], *[_marks(settings.get(leaf)) for settings in local])
            for leaf in chosen
        ]
        # Which settings are shared counts, not which dictionaries they are in.
        order = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        places = [(id(leaf), order[key]) for leaf, key in zip(chosen, keys, strict=True)]
        if places != self._keys or any(leaf in link._state for link in self.links for leaf in chosen):
            self._regroup(chosen, [(key[0], order[key]) for key in keys])
            self._keys = places
        self._known = (leaves, present, pointers)
        for block in self.blocks:
            matrix = self.population.matrices[block.group]
            offsets = [leaf.storage_offset() for leaf in block.leaves]
            block.whole = sum(block.sizes) == matrix.shape[1] and matrix.is_contiguous() and offsets == sorted(offsets)
            moved = block.tensor.shape != matrix.shape or block.tensor.data_ptr() != matrix.data_ptr()
            if block.whole and moved:
                block.tensor.data = matrix

    def _regroup(self, leaves: list[Tensor], keys: Sequence[tuple[int, int]]) -> None:
        self.dissolve()
        found: dict[Any, list[Tensor]] = {}
        for leaf, key in zip(leaves, keys, strict=True):
            # Leaves that were trained for other numbers of steps can't share a matrix.
            traits = tuple(describe_row(link._state.get(leaf) or None) for link in self.links)
            found.setdefault((key, traits), []).append(leaf)
        for (key, _), members in found.items():
            block = Block(members, key[0])
            self.blocks.append(block)
            self.binding.sources[block.tensor] = members[0]
            for link in self.links:
                rows = [link._state.pop(leaf, None) for leaf in members]
                if rows[0]:
                    link._state[block.tensor] = {
                        name: block.join_values([row[name] for row in rows]) for name in rows[0]
                    }
        self._tensors = [block.tensor for block in self.blocks]
        self.leaves = [leaf for block in self.blocks for leaf in block.leaves]

    def dissolve(self) -> None:
        """Give every leaf its own state again."""
        for block in self.blocks:
            self.binding.sources.pop(block.tensor, None)
        for link in self.links:
            states = dict(self.list_states(link))
            for block in self.blocks:
                link._state.pop(block.tensor, None)
            for leaf, row in states.items():
                if leaf not in link._state:
                    link._state[leaf] = row
        self.blocks, self.leaves, self._tensors, self._known, self._keys = [], [], [], None, []

    def list_states(self, link: Module) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """The state of a link by leaf; columns as tensors of their own."""
        blocks: dict[Tensor, Block] = {block.tensor: block for block in self.blocks}
        for param, row in link.state.items():
            if param not in blocks:
                yield param, row
                continue
            for i, leaf in enumerate(blocks[param].leaves):
                columns = {name: blocks[param].column(value, i) for name, value in row.items()}
                yield leaf, map_tensors(columns, Tensor.contiguous)

    def pull(self) -> None:
        """Read the columns of blocks that are not the storage itself."""
        for block in self.blocks:
            if not block.whole:
                block.tensor.data = block.join([leaf.detach() for leaf in block.leaves]).clone()

    def push(self) -> None:
        """Write them back, and let autograd and members know that there are new values."""
        for block in self.blocks:
            if not block.whole:
                with torch.no_grad():
                    for leaf, part in zip(block.leaves, block.split(block.tensor.detach()), strict=True):
                        leaf.copy_(part)
        self.population._mark_changed()

    def gather(self) -> None:
        """Make the gradients of the leaves those of the blocks; the leaves show the columns as theirs from then on."""
        for block in self.blocks:
            known, whole = block.tensor.grad, block.gather()
            old = whole is known and (whole is None or block.reduced == whole._version)
            if not old and whole is not None and self.reduce is not None:
                whole = self.reduce(whole)  # all processes train the same members, each on its own data
            if whole is None or whole is known:
                block.tensor.grad = whole
                continue
            # A tensor of its own and no view, so that its columns are known to be its.
            block.tensor.grad = whole = whole.data
            block.reduced = whole._version
            for leaf, grad in zip(block.leaves, block.split(whole), strict=True):
                leaf.grad = grad

    def has_other_presence(self, leaves: Sequence[Tensor]) -> bool:
        """Whether other leaves have gradients than those in blocks."""
        here = [leaf.grad is not None for leaf in leaves]
        inside = {id(leaf) for leaf in self.leaves}
        return any(here) and here != [id(leaf) in inside for leaf in leaves]

    # ------------------------------------------------------------------ links that need shapes

    def to_leaves(self, objective: Objective) -> None:
        """Show an objective's tensors in the shapes of the parameters; `to_matrices` undoes it."""
        self.push()
        objective.blocks, objective.matrices = None, None
        objective.params = list(self.leaves)
        for key in ("updates", "grads"):
            held = getattr(objective, key)
            if held is not None:
                setattr(objective, key, [part for b, m in zip(self.blocks, held, strict=True) for part in b.split(m)])
        if objective.present is not None:
            objective.present = [here for b, here in zip(self.blocks, objective.present, strict=True) for _ in b.leaves]

    def to_matrices(self, objective: Objective) -> None:
        """Undo `to_leaves`, for whatever links have made of the objective."""
        self.pull()
        objective.blocks = self
        objective.params = self._tensors
        for key in ("updates", "grads"):
            held = getattr(objective, key)
            if held is not None:
                parts = iter(held)
                setattr(objective, key, [b.join(list(itertools.islice(parts, len(b.leaves)))) for b in self.blocks])
        if objective.present is not None:
            flags = iter(objective.present)
            present = [any(list(itertools.islice(flags, len(block.leaves)))) for block in self.blocks]
            objective.present = None if all(present) else present
        evaluator = objective.evaluator
        if evaluator is not None and not isinstance(evaluator, MemberEvaluator):
            objective.evaluator = MemberEvaluator(evaluator, self)

    # ------------------------------------------------------------------ looking and saving

    def describe(self) -> str:
        """The matrices of the last step, in words."""
        if not self.used:
            return "parameters stacked over members"
        if not self.blocks:
            return "the matrix of all members"
        sizes = ", ".join(f"{len(self.population)} x {sum(block.sizes):,}" for block in self.blocks)
        copied = sum(not block.whole for block in self.blocks)
        kind = f" ({copied} of them copied, as some columns only)" if copied else ""
        return f"{len(self.blocks)} matri{'x' if len(self.blocks) == 1 else 'ces'} of {sizes}{kind}"

    def find_state(self, store: Any, key: Any) -> ColumnState | None:
        """What a link keeps for a leaf (or its name), as columns of what it keeps for a block."""
        for block in self.blocks:
            for i, leaf in enumerate(block.leaves):
                if leaf is key or (isinstance(key, str) and self.binding.names.get(leaf) == key):
                    return ColumnState(store[block.tensor], block, i) if block.tensor in store else None
        return None


def _marks(settings: dict[str, Any] | None) -> Any:
    """What settings have to have in common to be those of one block."""
    plain = (int, float, str, type(None))
    return settings and frozenset((k, v if isinstance(v, plain) else id(v)) for k, v in settings.items())


class Block:
    """Parameters that move as one matrix.

    Attributes:
        tensor: The matrix, N x P; its `grad` is their gradient, of which leaves show the columns as theirs.
        leaves: The population's leaves that its columns belong to, in order.
        sizes: How many columns each has.
        group: Which matrix of the population they are in.
        whole: Whether it is that matrix itself.
        reduced: The version of the gradient that is that of all processes, where several train the same members.
    """

    __slots__ = ("group", "leaves", "reduced", "sizes", "tensor", "whole")

    def __init__(self, leaves: list[Tensor], group: int) -> None:
        self.leaves = leaves
        self.sizes = [leaf.shape[1:].numel() for leaf in leaves]
        self.group = group
        self.whole = False
        self.reduced: int | None = None
        self.tensor = torch.nn.Parameter(
            torch.empty(0, dtype=leaves[0].dtype, device=leaves[0].device), requires_grad=leaves[0].requires_grad
        )

    def split(self, matrix: Tensor) -> list[Tensor]:
        """The columns of each leaf, as a view in the leaf's shape."""
        return [
            part.view(leaf.shape) for part, leaf in zip(torch.split(matrix, self.sizes, 1), self.leaves, strict=True)
        ]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """One matrix of tensors in the leaves' shapes."""
        count = len(self.leaves[0])
        rows = [part.reshape(count, size) for part, size in zip(parts, self.sizes, strict=True)]
        return torch.cat(rows, 1) if len(rows) > 1 else rows[0].contiguous()

    def gather(self) -> Tensor | None:
        """The gradient of all columns, from those of the leaves; None where no leaf has one."""
        found = [leaf.grad for leaf in self.leaves]
        whole = self.tensor.grad
        if whole is not None and all(grad is not None and grad._base is whole for grad in found):
            return whole  # they are its columns: what was added to them, or zeroed, is there already
        if all(grad is None for grad in found):
            return None
        return self.join(
            [
                torch.zeros_like(leaf) if grad is None else grad if grad.layout is torch.strided else grad.to_dense()
                for leaf, grad in zip(self.leaves, found, strict=True)
            ]
        )

    # ------------------------------------------------------------------ what links keep

    def column(self, value: Any, i: int) -> Any:
        """What a value of a link's state says about one leaf."""
        start, size, shape = sum(self.sizes[:i]), self.sizes[i], self.leaves[i].shape

        def narrow(tensor: Tensor) -> Tensor:
            if tensor.dim() < 2 or tensor.shape[1] != sum(self.sizes):
                return tensor
            return tensor.narrow(1, start, size).view(*shape, *tensor.shape[2:])

        return map_tensors(value, narrow)

    def join_values(self, values: Sequence[Any]) -> Any:
        """The value of which these are the columns."""
        first = values[0]
        if isinstance(first, Tensor):
            shapes = [leaf.shape for leaf in self.leaves]
            if all(value.shape[: len(s)] == s for value, s in zip(values, shapes, strict=True)):
                count = len(self.leaves[0])
                rest = first.shape[len(shapes[0]) :]
                return torch.cat([v.reshape(count, n, *rest) for v, n in zip(values, self.sizes, strict=True)], 1)
            return first
        if isinstance(first, list | tuple | deque):
            made = [self.join_values(items) for items in zip(*values, strict=True)]
            return deque(made, maxlen=first.maxlen) if isinstance(first, deque) else type(first)(made)
        if isinstance(first, dict):
            return {key: self.join_values([value[key] for value in values]) for key in first}
        return first


class ColumnState(ParamState):
    """What a link keeps for one parameter of a population: columns of what it keeps for the whole matrix."""

    __slots__ = ()

    def __init__(self, row: ParamState, block: Block, place: int) -> None:
        super().__init__(row._changes, {key: block.column(value, place) for key, value in row.items()})

    def __setitem__(self, key: str, value: Any) -> None:
        held = self.get(key)
        if not isinstance(held, Tensor) or not isinstance(value, Tensor) or held.shape != value.shape:
            raise TypeError(
                f"{key!r} of one parameter of a population is a column of what is kept for all of them; write a tensor of "
                f"the same shape, or set it for all with link.state[objective.params[0]]"
            )
        held.copy_(value)


def describe_row(row: Any) -> Any:
    """What states have to have in common to be columns of one."""
    if isinstance(row, Tensor):
        return ("tensor", row.dtype)
    if isinstance(row, dict):
        return tuple((key, describe_row(value)) for key, value in sorted(row.items()))
    if isinstance(row, list | tuple | deque):
        return (type(row).__name__, *[describe_row(item) for item in row])
    return row if isinstance(row, int | float | str | bool | None) else id(row)
