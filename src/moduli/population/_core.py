"""The storage of a population: matrices, leaves, buffers, and what operations need of them.

`Values` owns the matrices. The last few unreferenced ones are reused, because a new one costs a page fault for every 4 KiB.
For the same reason the result of an operator overwrites an operand that exists only inside the expression, so
`0.7*v + 1.5*r1*(best - x)` makes no more passes over memory than code with `out=`.
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

# Unreferenced matrices for reuse, of _LEAST to _MOST bytes: malloc is as fast for smaller ones, and larger ones fill memory.
_spare: deque[Tensor] = deque(maxlen=3)
_LEAST, _MOST = 1 << 18, 1 << 26


class Core:
    """The attributes and storage that all mixins of `Population` use."""

    template: nn.Module
    layout: Layout
    _count: int
    _values: Values
    _buffers: dict[str, Tensor]
    _flags: tuple[bool, ...]
    _leaves: list[Tensor] | None
    _members: Members
    # Calls members; shared by the populations of one template.
    _evaluator: PopulationEvaluator
    # The range of members in this process, if several processes hold the population.
    _shard: Shard | None
    # The population of which this one is a slice with shared storage.
    _parent: Core | None
    # Parameters that operations on this population do not change, whatever their configurations (`only`).
    _fixed: frozenset[int]

    @classmethod
    def _like(cls, template: nn.Module, count: int) -> Self:
        """Return a population of copies of a module, which becomes its template."""
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
        """Set the attributes of a whole population with the structure of a template, except for its values."""
        self._evaluator, self.template, self.layout = evaluator, evaluator.template, evaluator.layout
        self._leaves = None
        self._members = Members()
        self._shard = None
        self._parent = None
        self._fixed = frozenset()

    def _make_alike(self, values: Values, count: int, buffers: dict[str, Tensor]) -> Self:
        """Return a population of the same structure with other values."""
        pop: Self = object.__new__(type(self))
        pop._begin(self._evaluator)
        pop._flags, pop._count, pop._values, pop._buffers = self._flags, count, values, buffers
        pop._shard = self._shard if count == self._count else None
        return pop

    if not TYPE_CHECKING:  # type checkers would accept any attribute

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
        matrices = self.matrices
        if len(matrices) != 1:
            kinds = ", ".join(f"{g.dtype} on {g.device}" for g in self.layout.groups) or "none"
            raise StructureError(f"this population has {len(matrices)} matrices ({kinds}), not one; use pop.matrices")
        return matrices[0]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the name of each parameter, and a leaf of shape (N, *shape) that is a view of the storage.

        The leaves are the same objects at every call. They have the `requires_grad` of the template's parameters, collect
        `.grad`, and can be passed to any optimizer, which then moves each member by its own gradient.

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
        """Iterate over the leaves of `named_parameters()`.

        Example:
            >>> from moduli.population import Population
            >>> len(list(Population.of(nn.Linear(3, 2), 5).parameters()))
            2
        """
        yield from self._read_leaves()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the name of each buffer, and the live stack of all members' buffers, of shape (N, *shape).

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
                # Leaves have separate version counters, unless cached derived tensors depend on the one of the storage.
                self._leaves = [
                    nn.Parameter(view if shared else view.data, requires_grad=flag)
                    for view, flag in zip(views, self._flags, strict=True)
                ]
        return self._leaves

    def _mark_changed(self) -> None:
        """Increment the version counters of leaves and members after an in-place change of the matrices."""
        pop: Core | None = self
        while pop is not None:
            if pop._leaves:
                torch.autograd.graph.increment_version(pop._leaves)
            pop._members.mark_touched()
            pop = pop._parent

    def _check_members(self) -> None:
        """Raise if a live member was edited or moved."""
        self._members.check()

    def _refuse_shard(self, what: str) -> None:
        """Raise StructureError if other processes hold some of the members, for operations that need all of them."""
        if self._shard is not None:
            raise StructureError(
                f"{what} is about all members, of which other processes hold some ({self._shard}); gather what is needed with "
                "pop.sharding.gather(...), choose with moduli.population.selection, and exchange rows with "
                "pop.sharding.copy(...)"
            )

    # -- used by operations ------------------------------------------------------------------------------------------

    def _inert(self) -> frozenset[int]:
        """Return the positions of parameters that operations do not change, by their configurations and by `only`."""
        return self._fixed | inert_parameters(self.template)

    def _restore(self, values: Values, places: frozenset[int]) -> None:
        """Copy the parameters at `places` from this population to the values of a result."""
        if places:
            ours, theirs = self.layout.views(self._values.matrices), self.layout.views(values.matrices)
            with torch.no_grad():
                for place in places:
                    theirs[place].copy_(ours[place])

    def _left_out(self, group: Group) -> bool:
        """Whether no parameter of a group takes part in operations."""
        inert = self._inert()
        return bool(inert) and all(place in inert for place in group.indices)

    def _copy_buffers(self) -> dict[str, Tensor]:
        """Return copies of the stacked buffers."""
        return {name: buffer.clone() for name, buffer in self._buffers.items()}

    def _keep_buffers(self, act: Callable[[str, Tensor], Tensor] | None) -> dict[str, Tensor]:
        """Return the buffers of a result, according to their policies."""
        policies = buffer_policies(self.template)
        buffers: dict[str, Tensor] = {}
        with torch.no_grad(), torch.inference_mode(False):
            for name, own in self._buffers.items():
                if policies[name] == "operate" and act is not None and (own.is_floating_point() or own.is_complex()):
                    buffers[name] = act(name, own).to(own.dtype)
                else:
                    buffers[name] = keep_buffer(name, own, policies[name])
        return buffers


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
        # An interrupt in `__init__` leaves an instance without matrices.
        if hasattr(self, "matrices") and self.is_spare() and self.matrices[0].nbytes <= _MOST:
            _spare.append(self.matrices.pop())

    def is_spare(self) -> bool:
        """Whether there is one matrix, large enough for reuse, that nothing else references."""
        return len(self.matrices) == 1 and self.matrices[0].nbytes >= _LEAST and is_alone(self.matrices)


def allocate(layout: Layout, count: int) -> Values:
    """Return uninitialised matrices for `count` members of a layout, reusing an unreferenced one if its shape fits."""
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
    """Return the use count of a storage that one tensor references; -1 if this build of torch does not report it.

    It is measured at first use, not on import: the package may be imported inside of a transform of torch.func, where every
    new tensor is a wrapper without a storage.
    """
    uses = count_storage_uses(torch.empty(1, device="cpu"))
    return -1 if uses == UNKNOWN else uses


def is_alone(matrices: list[Tensor]) -> bool:
    """Whether a list has the only reference to its one matrix and to its storage."""
    matrix = matrices[0]
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
    # A new object in a list has the reference count to compare with, whatever the interpreter counts.
    alone = [object()]
    few = count_references(matrices[0]) <= count_references(alone[0])
    return few and count_storage_uses(matrices[0]) <= _count_alone()
