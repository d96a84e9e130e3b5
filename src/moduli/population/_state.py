"""The methods of a population that modules have too: modes, devices and dtypes, copies and checkpoints."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn  # noqa: F401 - for the examples

from moduli.layout import Guard, select
from moduli.nn import align_state_dict
from moduli.particles import StructureError

from ._core import Values, allocate
from ._evaluator import PopulationEvaluator
from ._indexing import Indexing
from ._members import row_view
from ._shard import Shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class State(Indexing):
    """The methods of a population for modes, devices and dtypes, copies and checkpoints."""

    @property
    def sharding(self) -> Shard | None:
        """The range of members of this process, if the population is sharded over several (see `shard`); else None.

        Example:
            >>> from moduli.population import Population
            >>> print(Population.of(nn.Linear(3, 2), 5).sharding)
            None
        """
        return self._shard

    def shard(self, mesh: DeviceMesh) -> Self:
        """Shard the members over processes: each stores its rows, and results are equal to those of one process.

        Every process makes the same population (from the same seed) and calls this. Each process evaluates and differentiates
        only its members; links that compare members exchange one number for each, and then the rows they need. `len(pop)`,
        `pop[i]` and losses are those of this process; `pop.sharding.gather(losses)` returns those of all members.
        `state_dict` and `load_state_dict`, also of an optimizer, contain all members, whatever the number of processes.

        Args:
            mesh: One dimension of processes, from `torch.distributed.device_mesh.init_device_mesh`.

        Returns:
            A population of the members of this process.

        Raises:
            ValueError: The mesh has several dimensions, or more processes than there are members.
            StructureError: The population is spread already.

        Example:
            >>> from moduli.population import Population
            >>> import torch.distributed as dist
            >>> def main():  # under torchrun
            ...     mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
            ...     return Population.of(nn.Linear, 4096, 3, 2).shard(mesh)
        """
        if self._shard is not None:
            raise StructureError(f"this population is spread over processes already: {self._shard}")
        shard = Shard(mesh, self._count)
        part = self._take_members(torch.arange(shard.start, shard.stop))
        part._shard = shard
        return part

    @property
    def training(self) -> bool:
        """Whether members are called in training mode."""
        return self.template.training

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of all members.

        Example:
            >>> from moduli.population import Population
            >>> Population.of(nn.Dropout(), 2).train(False).training
            False
        """
        self.template.train(mode)
        for _, member, _ in self._members.visit():
            member.train(mode)
        return self

    def eval(self) -> Self:
        """Set all members to evaluation mode.

        Example:
            >>> from moduli.population import Population
            >>> Population.of(nn.Dropout(), 2).eval().training
            False
        """
        return self.train(False)

    def requires_grad_(self, requires_grad: bool = True, *patterns: str) -> Self:
        """Freeze or thaw parameters by name, for all members.

        Args:
            requires_grad: Whether they are trained.
            *patterns: Names, or patterns such as `"encoder.*"`; all by default.

        Raises:
            ValueError: If no parameter matches a pattern.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear(3, 2), 5).requires_grad_(False, "bias")
            >>> [leaf.requires_grad for leaf in pop.parameters()]
            [True, False]
        """
        hit = self._match_names(patterns or ("*",))
        self._flags = tuple(requires_grad if h else f for h, f in zip(hit, self._flags, strict=True))
        for place, flag in enumerate(self._flags):
            if self._leaves is not None:
                self._leaves[place].requires_grad_(flag)
        for (_, place), leaf in list(self._members.leaves.items()):
            leaf.requires_grad_(self._flags[place])
        return self

    def only(self, *patterns: str) -> Self:
        """Return a view of the population whose operations change only the parameters with matching names.

        Args:
            *patterns: Names, or patterns such as `"encoder.*"`.

        Returns:
            A population with the same members and storage. Arithmetic with it, also in place, and variation do not change the
            other parameters; results are whole populations.

        Raises:
            ValueError: If no parameter matches a pattern.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear(3, 2), 5)
            >>> half = pop.only("bias") * 0.5
            >>> torch.equal(half[0].weight, pop[0].weight), torch.equal(half[0].bias, 0.5 * pop[0].bias)
            (True, True)
        """
        self._check_members()
        hit = self._match_names(patterns)
        view = self._part(slice(None))
        view._fixed = self._fixed | frozenset(place for place, chosen in enumerate(hit) if not chosen)
        return view

    def _match_names(self, patterns: tuple[str, ...]) -> list[bool]:
        """Return for each parameter whether one of the patterns matches its name."""
        chosen = set(select(patterns, [entry.names for entry in self.layout]))
        return [place in chosen for place in range(len(self.layout))]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the leaves.

        Example:
            >>> from moduli.population import Population
            >>> Population.of(nn.Linear(3, 2), 5).zero_grad()
        """
        for leaf in self._leaves or ():
            leaf.grad = None if set_to_none or leaf.grad is None else torch.zeros_like(leaf)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or convert the whole population in place, as `nn.Module.to` does; floating parameters change dtype.

        Live members and leaves stay valid: they become views of the new storage.

        Raises:
            StructureError: If this is a live part of another population.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear(3, 2), 5)
            >>> member = pop[0]
            >>> pop.to(torch.float64).matrix.dtype, member.weight.dtype
            (torch.float64, torch.float64)
        """
        self._check_members()
        if self._parent is not None:
            raise StructureError("this is a part of another population; convert that one, or a clone of this one")
        template = copy.deepcopy(self.template).to(*args, **kwargs)
        evaluator = PopulationEvaluator(template)
        layout = evaluator.layout
        with Guard(deferred=True, grad=False), torch.inference_mode(False):
            before = self.layout.views(self._values.matrices)
            values = allocate(layout, self._count)
            for new, old in zip(layout.views(values.matrices), before, strict=True):
                new.copy_(old)
            kinds = dict(template.named_buffers())
            buffers = {name: buffer.to(kinds[name]) for name, buffer in self._buffers.items()}
            leaves, members = self._leaves, list(self._members.visit())
            self.template, self.layout, self._values, self._buffers = template, layout, values, buffers
            self._evaluator = evaluator
            if leaves is not None:
                for leaf, view in zip(leaves, layout.views(values.matrices), strict=True):
                    gradient, leaf.grad = leaf.grad, None
                    leaf.data = view
                    leaf.grad = None if gradient is None else gradient.to(view)
            for (index, place), leaf in list(self._members.leaves.items()):
                entry = layout.entries[place]
                leaf.data = row_view(values.matrices[entry.group], index, entry.offset, entry.shape)
                leaf.grad = None if leaf.grad is None else leaf.grad.to(leaf)
            for index, member, tensors in members:
                for old, new in zip(tensors.buffers, buffers.values(), strict=True):
                    old.data = row_view(new.reshape(self._count, -1), index, 0, new.shape[1:])
                self._members.add(index, member, tensors.parameters, tensors.buffers)
        return self

    def clone(self) -> Self:
        """Return a population with copies of all values and buffers.

        Example:
            >>> from moduli.population import Population
            >>> pop = Population.of(nn.Linear(3, 2), 5)
            >>> twin = pop.clone()
            >>> torch.equal(twin.matrix, pop.matrix), twin.matrix is pop.matrix
            (True, False)
        """
        self._check_members()
        with torch.no_grad(), torch.inference_mode(False):
            values = allocate(self.layout, self._count)
            for out, matrix in zip(values.matrices, self._values.matrices, strict=True):
                out.copy_(matrix)
            buffers = self._copy_buffers()
        return self._make_alike(values, self._count, buffers)

    def __copy__(self) -> Self:
        return self.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = self.clone()
        copied._evaluator = PopulationEvaluator(copy.deepcopy(self.template, memo))
        copied.template = copied._evaluator.template
        memo[id(self)] = copied
        return copied

    def __getstate__(self) -> dict[str, Any]:
        def own(tensor: Tensor) -> Tensor:
            # A slice of another population is saved without the rest of the storage.
            whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            return tensor.detach() if whole else tensor.detach().clone()

        return {
            "template": self.template,
            "count": self._count,
            "matrices": [own(matrix) for matrix in self._values.matrices],
            "buffers": {name: own(buffer) for name, buffer in self._buffers.items()},
            "flags": self._flags,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(PopulationEvaluator(state["template"]))
        self._count, self._flags, self._buffers = state["count"], state["flags"], state["buffers"]
        self._values = Values(state["matrices"])

    def state_dict(self) -> dict[str, Tensor]:
        """Return the live stacked tensors of all members by the names of the template's `state_dict()`.

        For a sharded population these are gathered copies of all members' tensors; every process has to call this.

        Example:
            >>> from moduli.population import Population
            >>> {name: tuple(t.shape) for name, t in Population.of(nn.Linear(3, 2), 5).state_dict().items()}
            {'weight': (5, 2, 3), 'bias': (5, 2)}
        """
        self._check_members()
        gather = (lambda tensor: tensor) if self._shard is None else self._shard.gather
        state: OrderedDict[str, Tensor] = OrderedDict((n, gather(own.detach())) for n, own in self._state().items())
        # Labels, as in the state dict of one member.
        state._metadata = self.template.state_dict()._metadata  # type: ignore[attr-defined]
        return state

    def _state(self) -> dict[str, Tensor]:
        stacks: dict[int, Tensor] = {
            id(t): leaf for t, leaf in zip(self._evaluator.entries, self._read_leaves(), strict=True)
        }
        for name, buffer in self.template.named_buffers():
            stacks[id(buffer)] = self._buffers[name]
        return {
            name: stacks[id(value)]
            for name, value in self.template.state_dict(keep_vars=True).items()
            if isinstance(value, Tensor) and id(value) in stacks
        }

    def load_state_dict(self, state_dict: Mapping[str, Tensor], *, labels: str = "warn") -> None:
        """Copy a `state_dict()` of a population of the same size into this one; if it does not fit, change nothing.

        Args:
            state_dict: Stacked tensors by name.
            labels: How to treat labelled tensors whose labels the state dict lacks; see `Module.load_state_dict`.

        Raises:
            StructureError: If names, shapes, labels or the number of members differ; nothing is changed.

        Example:
            >>> from moduli.population import Population
            >>> a, b = Population.of(nn.Linear, 4, 3, 2), Population.of(nn.Linear, 4, 3, 2)
            >>> a.load_state_dict(b.state_dict())
            >>> torch.equal(a.matrix, b.matrix)
            True
        """
        self._check_members()
        own = self._state()
        shard = self._shard
        if self.layout.labelled:
            try:
                state_dict = align_state_dict(self.template, state_dict, 1, labels)
            except ValueError as error:
                raise StructureError(f"the state does not fit this population: {error}") from error
        if shard is not None:
            fits = {name: isinstance(t, Tensor) and t.shape[:1] == (shard.total,) for name, t in state_dict.items()}
            state_dict = {name: shard.own(t) if fits[name] else t for name, t in state_dict.items()}
        self._check_state(own, state_dict)
        with Guard(deferred=True, grad=False):
            for name, value in state_dict.items():
                own[name].copy_(value)
            self._mark_changed()

    def _check_state(self, own: Mapping[str, Tensor], state_dict: Mapping[str, Tensor]) -> None:
        """Raise StructureError if the names or shapes of a state differ from those of this population."""
        missing, extra = [n for n in own if n not in state_dict], [n for n in state_dict if n not in own]
        if missing or extra:
            raise StructureError(
                f"the state does not fit this population: missing {', '.join(missing) or 'nothing'}; not in the model: "
                f"{', '.join(extra) or 'nothing'}"
            )
        for name, value in state_dict.items():
            if not isinstance(value, Tensor) or value.shape != own[name].shape:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise StructureError(
                    f"{name!r} has shape {tuple(own[name].shape)} here ({self._count} members) and {got} in the state; "
                    "build a population of the same size first"
                )
