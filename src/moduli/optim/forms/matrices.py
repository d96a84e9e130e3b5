"""The parameters of a population as N x P matrices whose rows are members.

A **leaf** is one parameter of all members, stacked. A **block** is one of the matrices that the population stores its leaves in,
one for each dtype and device. Links work on blocks if all leaves are trained alike: in one group of the optimizer, with a
gradient, for the same number of steps. Otherwise they get the leaves.

Members are rows and not columns, since members are exchanged, copied, ranked and printed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._torch import pytree
from ...layout import map_tensors
from .._closure import Evaluator, FormEvaluator
from .._needs import keeps_graph
from .._vectors import fill_zeros
from .graph import copy_state
from .members import MembersForm, takes_matrices

if TYPE_CHECKING:
    from ...population import Population
    from .. import Module, Objective, Optimizer


class MemberMatrices(MembersForm):
    """The blocks of an optimizer over a population, and the links whose state belongs to them.

    Args:
        optimizer: The optimizer.
        population: Its population.

    Attributes:
        blocks: The matrices; empty if links get leaves.
        apart: Whether at some step not all leaves had a gradient, so that they are no longer trained alike.
    """

    enters = True

    def __init__(self, optimizer: Optimizer, population: Population) -> None:
        self.population = population
        #: Marks the leaves as changed, for autograd and for members.
        self.push = population._mark_changed
        self.binding, self.slots = optimizer.binding, optimizer.binding.slots
        self.blocks: list[Block] = []
        self.apart = False
        #: The leaves of the plan, and whether they are trained alike.
        self._planned: tuple[list[Tensor], bool] = ([], False)
        #: The leaves without a gradient in the current step, with their values, and their state by link and slot.
        self._aside: tuple[list[tuple[Tensor, Tensor]], list[tuple[Module, int, Any]]] | None = None
        self.relink(optimizer)

    def relink(self, optimizer: Optimizer) -> None:
        """Collect the links that take matrices, and make their state readable by leaf."""
        self.used = not keeps_graph(optimizer._needs) and not optimizer.differentiable
        tops = [top for top in optimizer.modules if self.used and takes_matrices(top)]
        self.links = [link for top in tops for _, link in top.links()]
        self.binding.read_row = self.read_row

    # ------------------------------------------------------------------ a step

    def enter(self, leaves: list[Tensor], evaluator: Evaluator | None) -> tuple[list[Tensor], Evaluator | None]:
        """Return blocks, or the leaves themselves, with their gradients if there is no evaluator."""
        evaluated, self._aside = evaluator is None, None
        if evaluated and not self.apart:
            self.apart = _has_some_gradients(leaves)
        if leaves is not self._planned[0]:  # the leaves of a new plan
            self._planned = (leaves, self._are_alike(leaves))
        matrices = self.population.matrices
        if self.apart or not self._planned[1] or False in map(Tensor.is_contiguous, matrices):
            self.dissolve()
        elif not self.blocks:
            self._join_leaves()
        for block in self.blocks:
            matrix = matrices[block.group]
            if block.tensor.shape != matrix.shape or block.tensor.data_ptr() != matrix.data_ptr():
                block.tensor.data = matrix
        if evaluated:
            self.gather()
        blocks: list[Tensor] = [block.tensor for block in self.blocks]
        return blocks or leaves, None if evaluator is None else self.wrap(evaluator, leaves)

    def _are_alike(self, leaves: Sequence[Tensor]) -> bool:
        """Return whether all leaves of the population are trained, with the same settings."""
        return (
            self.used
            and len(leaves) == len(self.population.layout)
            and len({self.slots.groups[self.slots.number(leaf)] for leaf in leaves}) == 1
            and not any(link.settings.local for link in self.links)
        )

    def _join_leaves(self) -> None:
        """Create blocks from the leaves, and concatenate the state of leaves to state of blocks."""
        leaves_by_group: dict[int, list[Tensor]] = {}
        for leaf, entry in zip(self.population.parameters(), self.population.layout, strict=True):
            leaves_by_group.setdefault(entry.group, []).append(leaf)
        blocks = [Block(leaves, group) for group, leaves in leaves_by_group.items()]
        rows = [(link, block, list(map(link.rows.get, self._number(block)))) for link in self.links for block in blocks]
        # Leaves that were trained for different numbers of steps can't share a matrix.
        self.apart = any(
            _describe_row(row) != _describe_row(of_leaves[0]) for _, _, of_leaves in rows for row in of_leaves
        )
        if self.apart:
            return
        self.blocks = blocks
        for block in blocks:
            self.slots.number(block.tensor, block.leaves[0])
        for link, block, of_leaves in rows:
            for slot in self._number(block):
                link.rows.pop(slot, None)
            if of_leaves[0]:
                link.rows[self.slots.number(block.tensor)] = link.make_row(block.join_rows(of_leaves))
            link.row_writes.add()

    def _number(self, block: Block) -> list[int]:
        """Return the slots of the leaves of a block."""
        return list(map(self.slots.number, block.leaves))

    def dissolve(self) -> None:
        """Split the state of blocks into state of leaves."""
        for link in self.links:
            rows = dict(self.list_rows(link))
            for block in self.blocks:
                link.rows.pop(self.slots.number(block.tensor), None)
            for slot, row in rows.items():
                if slot not in link.rows:
                    link.rows[slot] = link.make_row(row)
            link.row_writes.add()
        for block in self.blocks:
            self.slots.release(self.slots.number(block.tensor))
        self.blocks = []

    def list_rows(self, link: Module) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rows of a link by the slots of leaves, with copies of the columns of matrices."""
        blocks = {self.slots.number(block.tensor): block for block in self.blocks}
        for slot, row in link.rows.items():
            if slot not in blocks:
                yield slot, row
                continue
            for i, leaf in enumerate(self._number(blocks[slot])):
                columns = {name: blocks[slot].column(value, i) for name, value in row.items()}
                yield leaf, map_tensors(columns, Tensor.contiguous)

    def gather(self) -> None:
        """Concatenate the gradients of leaves to gradients of blocks, and make the gradients of the leaves views of these."""
        for block in self.blocks:
            grads: list[Any] = [leaf.grad for leaf in block.leaves]
            whole = block.tensor.grad
            missing = [grad is None for grad in grads]
            if whole is not None and True not in missing and all(grad._base is whole for grad in grads):
                continue  # they are views of it already
            block.tensor.grad = None
            if False in missing:
                dense = [grad.to_dense() for grad in (fill_zeros(grads, block.leaves) if True in missing else grads)]
                # `.data` makes the matrix a base tensor, so that `_base` of its columns is this matrix.
                whole = block.tensor.grad = block.join(dense).data
                for leaf, column in zip(block.leaves, block.split(whole), strict=True):
                    leaf.grad = column

    def wrap(self, evaluator: Evaluator, first: Sequence[Tensor] = ()) -> Evaluator:
        """Return an evaluator whose gradients are written to leaves and gathered to blocks.

        Args:
            evaluator: The closure's evaluator.
            first: The leaves that the first evaluation may leave without a gradient: all of them at the start of a step, none for
                a closure that a link has set.
        """
        if not self.blocks:
            return evaluator
        checked = first

        def gather() -> None:
            # A leaf without a gradient at the start of a step is not trained in it; at trial points its gradient is zero.
            nonlocal checked
            missing, count = [leaf for leaf in checked if leaf.grad is None], len(checked)
            checked = ()
            if 0 < len(missing) < count:
                self._set_aside(missing)
            self.gather()

        tensors = [tensor for block in self.blocks for tensor in (*block.leaves, block.tensor)]
        form = FormEvaluator(evaluator, tensors, self.push, gather)
        form.fixed = evaluator.fixed
        return form

    def _set_aside(self, leaves: list[Tensor]) -> None:
        """Store leaves without a gradient, and their state, to be restored by `finish`."""
        self.apart = True
        states: list[tuple[Module, int, Any]] = []
        for link in self.links:
            rows = dict(self.list_rows(link))
            states += [(link, slot, copy_state(rows.get(slot))) for slot in map(self.slots.number, leaves)]
        self._aside = ([(leaf, leaf.detach().clone()) for leaf in leaves], states)

    def finish(self) -> None:
        """End a step: restore the leaves without a gradient, and mark the others as changed."""
        if self._aside is not None:
            (values, states), self._aside = self._aside, None
            self.dissolve()
            for leaf, value in values:
                leaf.copy_(value)
                leaf.grad = None
            for link, slot, row in states:
                link.rows.pop(slot, None)
                if row is not None:
                    link.rows[slot] = link.make_row(row)
        self.push()

    # ------------------------------------------------------------------ links that need shapes

    def to_leaves(self, objective: Objective) -> None:
        """Convert an objective's tensors from matrices to leaves; `to_matrices` undoes it."""
        self.push()
        objective.blocks, objective.matrices = None, None
        objective.params = [leaf for block in self.blocks for leaf in block.leaves]
        if self._aside is not None:
            missing = {leaf for leaf, _ in self._aside[0]}
            objective.present = [leaf not in missing for leaf in objective.params]
        for key in ("updates", "grads"):
            tensors = getattr(objective, key)
            if tensors is not None:
                pairs = zip(self.blocks, tensors, strict=True)
                setattr(objective, key, [part for block, matrix in pairs for part in block.split(matrix)])

    def to_matrices(self, objective: Objective) -> None:
        """Undo `to_leaves` for the objective that a link returned."""
        objective.blocks = self
        objective.params = [block.tensor for block in self.blocks]
        for key in ("updates", "grads"):
            tensors = getattr(objective, key)
            if tensors is not None:
                parts = iter(tensors)
                counts = [(block, len(block.leaves)) for block in self.blocks]
                setattr(objective, key, [block.join(list(itertools.islice(parts, count))) for block, count in counts])
        objective.present = None
        evaluator = objective.evaluator
        if evaluator is not None and not isinstance(evaluator, FormEvaluator):  # a link has set its own closure
            objective.evaluator = self.wrap(evaluator)

    # ------------------------------------------------------------------ looking and saving

    def name_tensors(self) -> str:
        """Return a description of the tensors for links that take matrices."""
        leaves = [leaf for leaf in self.population.parameters() if leaf.requires_grad]
        matrices = self.population.matrices
        if self.apart or not self._are_alike(leaves) or False in map(Tensor.is_contiguous, matrices):
            return "parameters stacked over members"
        sizes = [f"{len(matrix)} x {matrix.shape[1]:,}" for matrix in matrices]
        return f"{len(sizes)} matri{'x' if len(sizes) == 1 else 'ces'} of {', '.join(sizes)}"

    def read_row(self, rows: Mapping[int, Any], slot: int) -> Any:
        """Return the row of a leaf, read-only: columns of the row of its block; None if there is none."""
        leaf = self.slots.params[slot]
        for block in self.blocks:
            row = rows.get(self.slots.number(block.tensor), {})
            for i, each in enumerate(block.leaves):
                if each is leaf and row:
                    return MappingProxyType({name: block.column(value, i) for name, value in row.items()})
        return None


class Block:
    """Leaves of a population that move as one matrix.

    Args:
        leaves: The leaves.
        group: The index of the population's matrix that they are columns of.

    Attributes:
        tensor: The matrix, N x P; the gradients of leaves are columns of its `grad`.
        sizes: The number of columns of each leaf.
    """

    def __init__(self, leaves: list[Tensor], group: int) -> None:
        self.leaves = leaves
        self.sizes = [leaf.shape[1:].numel() for leaf in leaves]
        self.group = group
        self.tensor = torch.nn.Parameter(leaves[0].detach().new_empty(0), requires_grad=leaves[0].requires_grad)

    def split(self, matrix: Tensor) -> list[Tensor]:
        """Return the columns of each leaf, as a view in the leaf's shape."""
        parts = torch.split(matrix, self.sizes, 1)
        return [part.view(leaf.shape) for part, leaf in zip(parts, self.leaves, strict=True)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return tensors in the leaves' shapes concatenated to one matrix."""
        count = len(self.leaves[0])
        rows = [part.reshape(count, size) for part, size in zip(parts, self.sizes, strict=True)]
        return torch.cat(rows, 1) if len(rows) > 1 else rows[0].contiguous()

    # ------------------------------------------------------------------ state of links

    def column(self, value: Any, i: int) -> Any:
        """Return the part of a value of a link's state that belongs to one leaf."""
        start, size, shape = sum(self.sizes[:i]), self.sizes[i], self.leaves[i].shape

        def narrow(tensor: Tensor) -> Tensor:
            if tensor.dim() < 2 or tensor.shape[1] != sum(self.sizes):
                return tensor
            return tensor.narrow(1, start, size).view(*shape, *tensor.shape[2:])

        return map_tensors(value, narrow)

    def join_rows(self, rows: Sequence[Any]) -> Any:
        """Return the states of leaves concatenated to the state of the block."""
        flat = [pytree.tree_flatten(dict(row)) for row in rows]
        return pytree.tree_unflatten(list(map(self._join_leaf, *(leaves for leaves, _ in flat))), flat[0][1])

    def _join_leaf(self, *values: Any) -> Any:
        """Return one value of the block's state, from the values of its leaves."""
        first, dim = values[0], self.leaves[0].dim()
        pairs = zip(values, self.leaves, strict=True)
        if not isinstance(first, Tensor) or any(value.shape[: leaf.dim()] != leaf.shape for value, leaf in pairs):
            return first
        count, rest = len(self.leaves[0]), first.shape[dim:]
        return torch.cat([v.reshape(count, n, *rest) for v, n in zip(values, self.sizes, strict=True)], 1)


def _describe_row(row: Any) -> Any:
    """Return the structure and the numbers of a state, which must be equal for states to be concatenated."""
    leaves, spec = pytree.tree_flatten(dict(row or {}))
    return spec, [leaf.dtype if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _has_some_gradients(leaves: Sequence[Tensor]) -> bool:
    """Return whether some leaves have a gradient and others have none."""
    missing = [leaf.grad is None for leaf in leaves]
    return True in missing and False in missing
