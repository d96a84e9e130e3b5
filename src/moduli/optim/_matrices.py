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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._closure import Evaluator
from ._members import takes_matrices
from ._needs import keeps_graph
from ._processes import OverProcesses
from ._state import ParamState

if TYPE_CHECKING:
    from .module import Module
    from .objective import Objective
    from .optimizer import Optimizer

__all__ = ["MemberEvaluator", "MemberMatrices", "OtherPresenceError"]


class OtherPresenceError(Exception):
    """Other parameters have gradients than at the last step, so that the step begins again with other blocks."""

    def __init__(self, loss: Any, present: list[bool]) -> None:
        super().__init__("other parameters have gradients than at the step before")
        self.loss = loss
        self.present = present


class Block:
    """Parameters that move as one matrix.

    Attributes:
        tensor: The matrix, N x P.
        leaves: The population's leaves that its columns belong to, in order.
        sizes: How many columns each has.
        group: Which matrix of the population they are in.
        whole: Whether it is that matrix itself.
        shown: Its gradient, and the columns of it that the leaves show as theirs.
    """

    __slots__ = ("group", "leaves", "shown", "sizes", "tensor", "whole")

    def __init__(self, leaves: list[Tensor], group: int) -> None:
        self.leaves = leaves
        self.sizes = [leaf[0].numel() if len(leaf) else leaf.shape[1:].numel() for leaf in leaves]
        self.group = group
        self.whole = False
        self.shown: tuple[Tensor, list[Tensor]] | None = None
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

    def column(self, value: Any, i: int) -> Any:
        """What a value of a link's state says about one leaf."""
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == sum(self.sizes):
            part = value.narrow(1, sum(self.sizes[:i]), self.sizes[i])
            return part.view(*self.leaves[i].shape, *value.shape[2:])
        return _mapped(value, lambda item: self.column(item, i))

    def find(self, store: Any, i: int) -> ParamState | None:
        """What a link keeps for the whole block as that of one leaf; what is written goes to the block."""
        return ColumnState(store[self.tensor], self, i) if self.tensor in store else None

    def joined(self, values: Sequence[Any]) -> Any:
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
            made = [self.joined(items) for items in zip(*values, strict=True)]
            return deque(made, maxlen=first.maxlen) if isinstance(first, deque) else type(first)(made)
        return first


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
            self.gather(arrived=False)
        return self._tensors

    def begin_again(self, leaves: list[Tensor], present: list[bool]) -> list[Tensor]:
        """The parameters for a step whose evaluation has found gradients for these leaves."""
        self.compose(leaves, None if all(present) else present)
        self.pull()
        self.gather(arrived=False)
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
            block.whole = sum(block.sizes) == matrix.shape[1] and matrix.is_contiguous() and _in_order(block)
            if block.whole and block.tensor.data_ptr() != matrix.data_ptr():
                block.tensor.data = matrix

    def _leaves(self) -> list[Tensor]:
        return list(self.population.parameters())

    def _regroup(self, leaves: list[Tensor], keys: Sequence[tuple[int, int]]) -> None:
        self.dissolve()
        found: dict[Any, list[Tensor]] = {}
        for leaf, key in zip(leaves, keys, strict=True):
            # Leaves that were trained for other numbers of steps can't share a matrix.
            traits = tuple(_traits(link._state.get(leaf) or None) for link in self.links)
            found.setdefault((key, traits), []).append(leaf)
        for (key, _), members in found.items():
            block = Block(members, key[0])
            self.blocks.append(block)
            self.binding.sources[block.tensor] = members[0]
            for link in self.links:
                rows = [link._state.pop(leaf, None) for leaf in members]
                if rows[0]:
                    link._state[block.tensor] = {name: block.joined([row[name] for row in rows]) for name in rows[0]}
        self._tensors = [block.tensor for block in self.blocks]

    def dissolve(self) -> None:
        """Give every leaf its own state again."""
        for block in self.blocks:
            self.binding.sources.pop(block.tensor, None)
            for link in self.links:
                link._settle()
                row = link._state.pop(block.tensor, None)
                for i, leaf in enumerate(block.leaves) if row else ():
                    link._state[leaf] = {name: _copied(block.column(value, i)) for name, value in row.items()}
        self.blocks, self._tensors, self._known, self._keys = [], [], None, []

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
        self.population._changed()

    def gather(self, arrived: bool = True) -> None:
        """The gradients of the blocks: what arrived at them, unless it is old, and what arrived at the leaves."""
        for block in self.blocks:
            found = [leaf.grad for leaf in block.leaves]
            shown = block.shown
            whole = block.tensor.grad if arrived else None
            if shown is not None and all(a is b for a, b in zip(found, shown[1], strict=True)):
                if whole is None or whole is shown[0]:
                    block.tensor.grad = shown[0]
                    continue
                whole = shown[0] + whole  # what was there, zeroed in place or not, and what arrived since
            elif any(grad is not None for grad in found):
                dense = [
                    torch.zeros_like(leaf)
                    if grad is None
                    else grad
                    if grad.layout is torch.strided
                    else grad.to_dense()
                    for leaf, grad in zip(block.leaves, found, strict=True)
                ]
                whole = block.join(dense) if whole is None else whole + block.join(dense)
            if whole is not None and self.reduce is not None:
                whole = self.reduce(whole)  # all processes train the same members, each on its own data
            block.shown, block.tensor.grad = None, whole
            if whole is not None:
                views = block.split(whole)
                for leaf, grad in zip(block.leaves, views, strict=True):
                    leaf.grad = grad
                block.shown = (whole, views)

    def find_other_presence(self, leaves: Sequence[Tensor], reached: Sequence[bool]) -> list[bool] | None:
        """Which leaves have gradients, where it is not those in blocks."""
        inside = [leaf for block in self.blocks for leaf in block.leaves]
        passed = {id(leaf) for leaf, here in zip(inside, reached, strict=True) if here}
        here = [leaf.grad is not None or id(leaf) in passed for leaf in leaves]
        known = {id(leaf) for leaf in inside}
        return None if not any(here) or here == [id(leaf) in known for leaf in leaves] else here

    @contextmanager
    def recording(self) -> Iterator[list[bool]]:
        """Inside the block, calls of the population differentiate with respect to its matrices.

        Their gradients then arrive in one piece. The list says, afterwards, which leaves had one.
        """
        tape = Tape(self)
        for block in self.blocks:
            block.tensor.grad = None
        self.population._tape = tape.stacked
        try:
            yield tape.reached
        finally:
            self.population._tape = None

    # ------------------------------------------------------------------ links that need shapes

    def to_leaves(self, objective: Objective) -> None:
        """Show an objective's tensors in the shapes of the parameters; `to_matrices` undoes it."""
        self.push()
        objective.blocks, objective.matrices = None, None
        objective.params = [leaf for block in self.blocks for leaf in block.leaves]
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
                setattr(objective, key, self._joined(held, *self._shown.get(key, ([], []))))
        if objective.present is not None:
            parts = iter(objective.present)
            present = [any(list(itertools.islice(parts, len(block.leaves)))) for block in self.blocks]
            objective.present = None if all(present) else present
        evaluator = objective.evaluator
        if evaluator is not None and not isinstance(evaluator, MemberEvaluator):
            objective.evaluator = MemberEvaluator(evaluator, self)

    def _joined(self, held: Sequence[Tensor], matrices: Sequence[Tensor], shown: Sequence[Tensor]) -> list[Tensor]:
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
                yield leaf, {name: _copied(block.column(value, i)) for name, value in row.items()}


class MemberEvaluator(Evaluator):
    """A closure whose gradients arrive at a population's leaves, and are wanted as those of its blocks.

    Args:
        inner: The closure's evaluator.
        matrices: The blocks.
        leaves: All leaves that are trained, where this is the evaluator that a step begins with; None where a link has put
            its own closure in the place of the user's, which leaves gradients at the leaves and nowhere else.
    """

    def __init__(self, inner: Evaluator, matrices: MemberMatrices, leaves: list[Tensor] | None = None) -> None:
        self.inner = inner
        self.matrices = matrices
        self.leaves = leaves
        self.records = leaves is not None
        self.source, self.closure, self.fn = inner.source, inner.closure, inner.fn
        self.fixed, self.kind = inner.fixed, inner.kind

    @property
    def count(self) -> int:  # type: ignore[override]
        """How often it was asked."""
        return self.inner.count

    def value(self) -> Any:
        """The loss, gradients not asked for."""
        self.matrices.push()
        leaves = [leaf for block in self.matrices.blocks for leaf in block.leaves]
        # A user's closure may zero gradients in place, and those of leaves are columns of what links hold.
        held = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            return self.inner.value()
        finally:
            for leaf, grad in zip(leaves, held, strict=True):
                leaf.grad = grad

    def gradient(self, params: Sequence[Tensor], scalar: Callable[[Any], Tensor]) -> Any:
        """The loss; gradients are left in `.grad`, of leaves and of blocks."""
        matrices = self.matrices
        matrices.push()
        first, self.leaves = self.leaves, None
        leaves = first or [leaf for block in matrices.blocks for leaf in block.leaves]
        if not self.records:
            loss = self.inner.gradient(leaves, scalar)
            matrices.gather(arrived=False)
            return loss
        with matrices.recording() as reached:
            loss = self.inner.gradient(leaves, scalar)
        # Only at the start of a step: at trial points a parameter without a gradient is one with the gradient zero.
        present = None if first is None else matrices.find_other_presence(first, reached)
        matrices.gather()
        if present is not None:
            raise OtherPresenceError(loss, present)
        return loss


class Tape:
    """Parameters for one evaluation, as columns of the blocks' matrices.

    Attributes:
        reached: For each leaf of the blocks, in order, whether a gradient came through its columns.
    """

    def __init__(self, matrices: MemberMatrices) -> None:
        self.matrices = matrices
        self.reached = [False] * sum(len(block.leaves) for block in matrices.blocks)

    def stacked(self, leaves: list[Tensor]) -> list[Tensor]:
        """The leaves, those in blocks as columns."""
        columns: dict[int, Tensor] = {}
        start = 0
        for block in self.matrices.blocks:
            parts = _Columns.apply(  # type: ignore[no-untyped-call]
                block.tensor, block, self.reached, start
            )
            start += len(block.leaves)
            columns.update({id(leaf): part for leaf, part in zip(block.leaves, parts, strict=True)})
        return [columns.get(id(leaf), leaf) for leaf in leaves]


class _Columns(torch.autograd.Function):
    """A matrix as stacked parameters; the gradients of those are put side by side, in one pass."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, block: Block, reached: list[bool], start: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.block, ctx.reached, ctx.start = block, reached, start
        return tuple(block.split(matrix))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        for i, grad in enumerate(grads):
            ctx.reached[ctx.start + i] |= grad is not None
        if all(grad is None for grad in grads):
            return None, None, None, None
        parts = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, ctx.block.leaves, strict=True)]
        return ctx.block.join(parts), None, None, None


def _in_order(block: Block) -> bool:
    """Whether the columns are those of the storage, in its order."""
    places = [leaf.storage_offset() for leaf in block.leaves]
    return places == sorted(places)


def _marks(settings: dict[str, Any] | None) -> Any:
    """What settings have to have in common to be those of one block."""
    plain = (int, float, str, type(None))
    return settings and frozenset((k, v if isinstance(v, plain) else id(v)) for k, v in settings.items())


def _traits(row: Any) -> Any:
    """What states have to have in common to be columns of one."""
    if isinstance(row, Tensor):
        return ("tensor", row.dtype)
    if isinstance(row, dict):
        return tuple((key, _traits(value)) for key, value in sorted(row.items()))
    if isinstance(row, list | tuple | deque):
        return (type(row).__name__, *[_traits(item) for item in row])
    return row if isinstance(row, int | float | str | bool | None) else id(row)


def _mapped(value: Any, act: Callable[[Any], Any]) -> Any:
    if isinstance(value, deque):
        return deque(map(act, value), maxlen=value.maxlen)
    return type(value)(map(act, value)) if isinstance(value, list | tuple) else value


def _copied(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else _mapped(value, _copied)


class ColumnState(ParamState):
    """What a link keeps for one parameter of a population: columns of what it keeps for the whole matrix."""

    __slots__ = ("_block", "_place", "_row")

    def __init__(self, row: ParamState, block: Block, place: int) -> None:
        super().__init__(row._changes, {key: block.column(value, place) for key, value in row.items()})
        self._row, self._block, self._place = row, block, place

    def __setitem__(self, key: str, value: Any) -> None:
        held = self.get(key)
        if not isinstance(held, Tensor) or not isinstance(value, Tensor) or held.shape != value.shape:
            raise TypeError(
                f"{key!r} of one parameter of a population is a column of what is kept for all of them; write a tensor of "
                f"the same shape, or set it for all with link.state[objective.params[0]]"
            )
        held.copy_(value)
