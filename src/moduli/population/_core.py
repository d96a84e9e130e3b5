"""The storage of a population: matrices, leaves, buffers, and what operations ask of them.

`Values` owns the matrices. The last few that nothing refers to any more are used again: a fresh one costs a page fault for
every 4 KiB of it. For the same reason the result of an operator is written over an operand that exists only inside the
expression, so `0.7*v + 1.5*r1*(best - x)` makes the passes over memory that code with `out=` would make.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from moduli._torch import UNKNOWN, count_references, count_storage_uses, is_wrapped
from moduli.layout import Group, Layout
from moduli.particles import StructureError, buffer_policies, inert_parameters, keep_buffer

from ._evaluator import PopulationEvaluator
from ._members import Members, repeat_buffers, tracks_versions
from ._shard import Shard

# Matrices to use again: those of so many bytes, below which the C library does as well, and above which memory is dear.
_spare: deque[Tensor] = deque(maxlen=3)
_LEAST, _MOST = 1 << 18, 1 << 26


class Core:
    """What every part of `Population` is written in terms of."""

    template: nn.Module
    layout: Layout
    _count: int
    _values: Values
    _buffers: dict[str, Tensor]
    _flags: tuple[bool, ...]
    _leaves: list[Tensor] | None
    _members: Members
    # How members are called; of all populations that share a template.
    _evaluator: PopulationEvaluator
    # Which of the members of several processes these are.
    _shard: Shard | None
    # A population that this one is a part of: its storage, leaves and members see what happens here.
    _parent: Core | None
    # Parameters that operations on this population leave alone, whatever their configurations.
    _fixed: frozenset[int]

    @classmethod
    def _like(cls, template: nn.Module, count: int) -> Self:
        """A population of copies of a module, which becomes its template."""
        if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in template.modules()):
            raise StructureError(
                "DistributedDataParallel averages the gradients of one model, and would not see those of members; give the "
                "module inside it, and Optimizer(pop, ..., reduce='mean') where all processes train the same members"
            )
        pop: Self = object.__new__(cls)
        pop._count = count
        pop._begin(PopulationEvaluator(template))
        tensors = pop._evaluator.entries
        pop._flags = tuple(t.requires_grad for t in tensors)
        with torch.no_grad(), torch.inference_mode(False):
            pop._values = allocate(pop.layout, count)
            if count:
                vectors = pop.layout.pack([t.detach() for t in tensors])
                for matrix, vector in zip(pop._values.matrices, vectors, strict=True):
                    matrix.copy_(vector)
            pop._buffers = repeat_buffers(dict(template.named_buffers()), count)
        return pop

    def _begin(self, evaluator: PopulationEvaluator) -> None:
        """Begin as a whole population of the structure of a template, of which nothing has been asked yet."""
        self._evaluator, self.template, self.layout = evaluator, evaluator.template, evaluator.layout
        self._leaves = None
        self._members = Members()
        self._shard = None
        self._parent = None
        self._fixed = frozenset()

    def _make_alike(self, values: Values, count: int, buffers: dict[str, Tensor]) -> Self:
        """A population of the same structure with other values."""
        pop: Self = object.__new__(type(self))
        pop._begin(self._evaluator)
        pop._flags, pop._count, pop._values, pop._buffers = self._flags, count, values, buffers
        pop._shard = self._shard if count == self._count else None
        return pop

    if not TYPE_CHECKING:  # what has a type is found without it

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"a Population has no attribute {name!r}; it is no torch.nn.Module, which wrappers such as "
                "DistributedDataParallel take: pop.shard(mesh) spreads its members over processes"
            )

    # -- storage -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._count

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """The live storage: one (N, P) matrix for each group (dtype and device) of `layout.groups`.

        Writing into one changes the members. As with `Tensor.data`, autograd does not notice.

        Example:
            >>> from moduli.population import Population
            >>> [m.shape for m in Population.of(nn.Linear(3, 2), 5).matrices]
            [torch.Size([5, 8])]
        """
        return tuple(self._values.matrices)

    @property
    def matrix(self) -> Tensor:
        """The live storage of a population whose parameters have one dtype and device: an (N, P) matrix.

        Raises:
            StructureError: If there are several groups of parameters; `matrices` has one matrix for each.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear(3, 2), 5)
            >>> _ = pop.matrix.zero_()
            >>> pop[4].weight.abs().sum().item()
            0.0
        """
        found = self.matrices
        if len(found) != 1:
            kinds = ", ".join(f"{g.dtype} on {g.device}" for g in self.layout.groups) or "none"
            raise StructureError(f"this population has {len(found)} matrices ({kinds}), not one; use pop.matrices")
        return found[0]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The name of each parameter, and a leaf of shape (N, *shape) that is a view of the storage.

        The leaves are the same objects at every call. They carry `requires_grad` as the template's parameters do,
        collect `.grad`, and can be given to any optimizer: each member then moves by its own gradient.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear(3, 2), 5)
            >>> [(name, tuple(leaf.shape)) for name, leaf in pop.named_parameters()]
            [('weight', (5, 2, 3)), ('bias', (5, 2))]
            >>> pop.losses(lambda net: net(torch.ones(3)).sum()).sum().backward()
            >>> dict(pop.named_parameters())["bias"].grad.shape
            torch.Size([5, 2])
        """
        yield from zip(self.layout.names, self._read_leaves(), strict=True)

    def parameters(self) -> Iterator[Tensor]:
        """The leaves of `named_parameters()`.

        Example:
            >>> from moduli.population import Population
            >>> len(list(Population.of(nn.Linear(3, 2), 5).parameters()))
            2
        """
        yield from self._read_leaves()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The name of each buffer, and the live stack of all members' buffers, of shape (N, *shape).

        Example:
            >>> from moduli.population import Population
            >>> dict(Population.of(nn.BatchNorm1d(3), 5).named_buffers())["running_mean"].shape
            torch.Size([5, 3])
        """
        yield from self._buffers.items()

    def _read_leaves(self) -> list[Tensor]:
        if self._leaves is None:
            with torch.no_grad(), torch.inference_mode(False):
                views = self.layout.views(self._values.matrices)
                shared = tracks_versions(self.template)
                # Each leaf has a version counter of its own, unless derived tensors must hear of every change.
                self._leaves = [
                    nn.Parameter(view if shared else view.data, requires_grad=flag)
                    for view, flag in zip(views, self._flags, strict=True)
                ]
        return self._leaves

    def _mark_changed(self) -> None:
        """Let autograd know that the matrices were changed in place."""
        pop: Core | None = self
        while pop is not None:
            if pop._leaves:
                torch.autograd.graph.increment_version(pop._leaves)
            pop._members.mark_touched()
            pop = pop._parent

    def _check_members(self) -> None:
        """Check the members that a program holds before the population is used."""
        self._members.check()

    def _refuse_shard(self, what: str) -> None:
        """Refuse to compare members of which other processes hold some."""
        if self._shard is not None:
            raise StructureError(
                f"{what} is about all members, of which other processes hold some ({self._shard}); gather what is needed with "
                "pop.sharding.gather(...), choose with moduli.population.selection, and exchange rows with "
                "pop.sharding.copy(...)"
            )

    # -- what operations ask -----------------------------------------------------------------------------------------

    def _inert(self) -> frozenset[int]:
        """Which parameters take no part in operations, according to their configurations and to `only`."""
        return self._fixed | inert_parameters(self.template)

    def _restore(self, values: Values, places: frozenset[int]) -> None:
        """Give some parameters of a result the values that they have here."""
        if places:
            ours, made = self.layout.views(self._values.matrices), self.layout.views(values.matrices)
            with torch.no_grad():
                for place in places:
                    made[place].copy_(ours[place])

    def _left_out(self, group: Group) -> bool:
        """Whether no parameter of a group takes part in operations."""
        inert = self._inert()
        return bool(inert) and all(place in inert for place in group.indices)

    def _copy_buffers(self) -> dict[str, Tensor]:
        """Every buffer of all members, as a tensor of its own."""
        return {name: held.clone() for name, held in self._buffers.items()}

    def _keep_buffers(self, act: Callable[[str, Tensor], Tensor] | None) -> dict[str, Tensor]:
        """The buffers of a result, according to their policies."""
        policies = buffer_policies(self.template)
        made: dict[str, Tensor] = {}
        with torch.no_grad(), torch.inference_mode(False):
            for name, held in self._buffers.items():
                if policies[name] == "operate" and act is not None and (held.is_floating_point() or held.is_complex()):
                    made[name] = act(name, held).to(held.dtype)
                else:
                    made[name] = keep_buffer(name, held, policies[name])
        return made


# -- matrices ------------------------------------------------------------------------------------------------------------


class Values:
    """The matrices of a population.

    Attributes:
        matrices: One (N, P) matrix per group of the layout.
    """

    __slots__ = ("matrices",)

    def __init__(self, matrices: list[Tensor]) -> None:
        self.matrices = matrices

    def __del__(self) -> None:
        # An interrupt may have come before it had any.
        if hasattr(self, "matrices") and self.is_spare() and self.matrices[0].nbytes <= _MOST:
            _spare.append(self.matrices.pop())

    def is_spare(self) -> bool:
        """Whether there is one matrix, large enough to be used again, that nothing else refers to."""
        return len(self.matrices) == 1 and self.matrices[0].nbytes >= _LEAST and is_alone(self.matrices)


def allocate(layout: Layout, count: int) -> Values:
    """Uninitialised matrices for `count` members of a layout."""
    groups = layout.groups
    kind = (groups[0].dtype, groups[0].device) if groups else None
    for _ in range(len(_spare) if len(groups) == 1 else 0):
        try:
            matrix = _spare.popleft()
        except IndexError:
            break  # another thread took it
        if matrix.shape == (count, groups[0].numel) and (matrix.dtype, matrix.device) == kind:
            return Values([matrix])
        _spare.append(matrix)
    with torch.inference_mode(False):
        return Values([torch.empty(count, g.numel, dtype=g.dtype, device=g.device) for g in groups])


@cache
def _count_alone() -> int:
    """Return how often a storage is counted that one tensor holds; -1 where that is not known.

    It is measured at first use, not on import: a room may be imported inside of a transform of torch.func, where every new
    tensor is a wrapper without a storage.
    """
    uses = count_storage_uses(torch.empty(1, device="cpu"))
    return -1 if uses == UNKNOWN else uses


def is_alone(held: list[Tensor]) -> bool:
    """Whether a list has the only reference to its one matrix and every part of it."""
    matrix = held[0]
    if (
        type(matrix) is not Tensor
        or matrix.device.type != "cpu"
        or matrix.requires_grad
        or matrix.is_inference()
        or is_wrapped(matrix)
        or matrix.untyped_storage().is_shared()
    ):
        return False
    del matrix
    # What the count is for something that one list holds is seen on an object made here.
    alone = [object()]
    return count_references(held[0]) <= count_references(alone[0]) and count_storage_uses(held[0]) <= _count_alone()
