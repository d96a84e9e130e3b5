"""The parameters of a population as links see them: N x P matrices whose rows are members.

A **block** is all parameters that links treat alike: of one dtype and device, in one group of the optimizer, with equal
settings and equally far trained. Where that is everything the population has (the usual case), the block *is* the
population's storage. Otherwise it is a copy of some of its columns, written back before each evaluation and at the end of the
step: no kernel takes the columns where they are.

Members are rows and not columns, since members are what is exchanged, copied, ranked and looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._blocks import Block, copy_columns, describe_row
from ._member_evaluator import MemberEvaluator
from ._members import takes_matrices
from ._needs import keeps_graph
from ._processes import OverProcesses

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
        self._shown: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
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
            link._state.columns = self.columns

    # ------------------------------------------------------------------ a step

    def begin(self, leaves: list[Tensor], closure: Callable[..., Any] | None) -> list[Tensor]:
        """The parameters for one step. Without a closure, those that have a gradient."""
        present = None
        if closure is None:
            present = [leaf.grad is not None for leaf in leaves]
            present = None if all(present) or not any(present) else present
        elif self._known is not None and self._known[0] is leaves:
            present = self._known[1]
        self.compose(leaves, present)
        self.pull()
        if closure is None:
            self.gather()
        return self._tensors

    def begin_again(self, leaves: list[Tensor], present: list[bool]) -> list[Tensor]:
        """The parameters for a step whose evaluation has found gradients for these leaves."""
        self.compose(leaves, None if all(present) else present)
        self.pull()
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
        groups = {id(leaf): entry.group for leaf, entry in zip(self._leaves(), self.population.layout, strict=True)}
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
            block.whole = sum(block.sizes) == matrix.shape[1] and matrix.is_contiguous() and block.is_in_order()
            moved = block.tensor.shape != matrix.shape or block.tensor.data_ptr() != matrix.data_ptr()
            if block.whole and moved:
                block.tensor.data = matrix

    def _leaves(self) -> list[Tensor]:
        return list(self.population.parameters())

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
                link._settle()
                row = link._state.pop(block.tensor, None)
                for i, leaf in enumerate(block.leaves) if row else ():
                    link._state[leaf] = {name: copy_columns(block.column(value, i)) for name, value in row.items()}
        self.blocks, self.leaves, self._tensors, self._known, self._keys = [], [], [], None, []

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

    def find_other_presence(self, leaves: Sequence[Tensor]) -> list[bool] | None:
        """Which leaves have gradients, where it is not those in blocks."""
        here = [leaf.grad is not None for leaf in leaves]
        inside = {id(leaf) for leaf in self.leaves}
        return None if not any(here) or here == [id(leaf) in inside for leaf in leaves] else here

    # ------------------------------------------------------------------ links that need shapes

    def to_leaves(self, objective: Objective) -> None:
        """Show an objective's tensors in the shapes of the parameters; `to_matrices` undoes it."""
        self.push()
        objective.blocks, objective.matrices = None, None
        objective.params = list(self.leaves)
        shown = {key: held for key in ("updates", "grads") if (held := getattr(objective, key)) is not None}
        for key, held in shown.items():
            setattr(objective, key, [part for b, m in zip(self.blocks, held, strict=True) for part in b.split(m)])
        self._shown = {key: (held, list(getattr(objective, key))) for key, held in shown.items()}
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
                setattr(objective, key, self._join_members(held, *self._shown.get(key, ([], []))))
        if objective.present is not None:
            parts = iter(objective.present)
            present = [any(list(itertools.islice(parts, len(block.leaves)))) for block in self.blocks]
            objective.present = None if all(present) else present
        evaluator = objective.evaluator
        if evaluator is not None and not isinstance(evaluator, MemberEvaluator):
            objective.evaluator = MemberEvaluator(evaluator, self)

    def _join_members(
        self, held: Sequence[Tensor], matrices: Sequence[Tensor], shown: Sequence[Tensor]
    ) -> list[Tensor]:
        out, place = [], 0
        for i, block in enumerate(self.blocks):
            parts, place = held[place : place + len(block.leaves)], place + len(block.leaves)
            before = shown[place - len(block.leaves) : place]
            # Where a link has changed the columns in place, or not at all, they are in the matrix already.
            same = len(before) == len(parts) and all(a is b for a, b in zip(parts, before, strict=True))
            out.append(matrices[i] if same else block.join(parts))
        return out

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

    def columns(self, key: Any) -> tuple[Block, int] | None:
        """The block and place of a leaf, or of its name."""
        for block in self.blocks:
            for i, leaf in enumerate(block.leaves):
                if leaf is key or (isinstance(key, str) and self.binding.names.get(leaf) == key):
                    return block, i
        return None

    def rows(self, link: Module) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """The state of a link by leaf, as it is saved."""
        for param, row in link.state.items():
            block = next((block for block in self.blocks if block.tensor is param), None)
            if block is None:
                yield param, row
                continue
            for i, leaf in enumerate(block.leaves):
                yield leaf, {name: copy_columns(block.column(value, i)) for name, value in row.items()}


def _marks(settings: dict[str, Any] | None) -> Any:
    """What settings have to have in common to be those of one block."""
    plain = (int, float, str, type(None))
    return settings and frozenset((k, v if isinstance(v, plain) else id(v)) for k, v in settings.items())
