"""The link: one step of an optimizer, with its settings, its state for each parameter, and named children."""

from __future__ import annotations

import copy
import warnings
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from ..layout import Guard
from ._needs import Across, ChainError, Need
from ._settings import LinkType, Settings, check_defaults
from ._writes import CountedSettings, RowWrites
from .declared import DeclaredArguments
from .state import LinkState, ProjectedBuffer, StandIns
from .state_encoding import encode_row, encode_value

if TYPE_CHECKING:
    from ..linalg import LinearOperator
    from . import Objective, Optimizer
    from ._label_order import Follows

__all__ = ["Chainable", "Module", "ProjectedBuffer"]

# What decides how a link is run; an object may say otherwise than its class, and later than before.
_DECLARED = frozenset(
    {
        *("elementwise", "concat_params", "update_freq", "uses_loss", "uses_grad", "measures", "counts", "static"),
        *("defaults", "children", "across", "members", "impure"),
    }
)


class Module(DeclaredArguments, LinkState, metaclass=LinkType):
    """A link: one step of an optimizer.

    `update` learns from the current point and changes nothing else, `apply` transforms the update, `step` does both.
    A link owns no parameters; its state for each of them is in `state`, its state for all of them in
    `global_state`. Everything in those two is saved, copied and restored with the optimizer.

    Args:
        defaults: The settings, for parameters whose groups do not say otherwise.

    Attributes:
        needs: What the link has to know of the objective (see `Need`); a chain that cannot give it is refused.
        members: Whether the link works on all members of a population at once: True on parameters stacked over members,
            (N, *shape); "matrix" on all of them as one (N, P) matrix; "batched" for each member by itself, in one call
            vectorised by `torch.vmap`; False for each member by itself, one after the other. Pointwise hooks always work
            on the matrix.
        over_processes: Whether a link that compares members can, where they are spread over processes.
        replicated: Whether every process keeps what it knows of all members, where they are spread over processes.
        vector_state: Whether its state is over all parameters concatenated, so that it follows their order.
        across: What it needs where each process holds a piece of the parameters (see `Across`): nothing for pointwise links,
            sums for those that reduce lists by `moduli.kernels`, whole tensors for those that treat each tensor by itself.
            Without a word all parameters are gathered whole, which is right for every link.
        decides_on_host: Whether it reads numbers back from the parameters' device by its nature, because Python decides what
            comes next (a line search compares losses, a termination stops). Every other link leaves them where they are.
        follows: How states with other shapes than their parameter follow it into another order of labels (see `Follows`); those
            with its shape do so by themselves.
        points: States that are points of parameter space, such as slow weights: where a model gets more units they get what
            the parameter gets. Those of other states start as the link starts them, or at zero.
        reads_axes: Whether it finds settings of parameters in the axes of the model when it is attached, so that it is attached
            again for new ones.
        keeps_outside: Whether it learns something that is neither in `state` nor in `global_state` (a foreign optimizer),
            so that it can't be run for each member of a population in turn.
        clips: Whether it makes updates smaller that are too large, which watches count.
        is_last: Whether it has to be the last link of an optimizer.
        differentiable: Whether gradients flow through it, from the update, the parameters and its settings.
        capturable: Whether a captured graph of one step repeats every step: it neither counts nor decides in Python. Pointwise
            links count on the device (`Optimizer(..., capturable=True)`) and need not say so.
        shared_settings: Settings of which there is one value for all parameters that it sees (True: all of them, as for links with
            `vector_state`); groups that give it two are refused.
        fixed_settings: Settings that can't be changed once it is made: groups that do are refused.
        divides_params: Whether its children see some of the parameters each.
        aliases: Names in parameter groups that stand for several settings, such as "betas".

    Example:
        >>> import torch, moduli as mo
        >>> class Reverse(mo.optim.Module):
        ...     def apply(self, objective):
        ...         objective.updates = [-u for u in objective.get_updates()]
        ...         return objective
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> _ = mo.Optimizer([w], Reverse()).step(mo.closure(lambda: w.sum()))
        >>> w.data
        tensor([2.])
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.GRADIENT})
    members: ClassVar[bool | Literal["matrix", "batched"]] = False
    over_processes: bool = False
    replicated: ClassVar[bool] = False
    across: Across = Across.EVERYTHING
    decides_on_host: bool = False
    follows: ClassVar[Mapping[str, Follows]] = {}
    points: ClassVar[tuple[str, ...]] = ()
    reads_axes: ClassVar[bool] = False
    keeps_outside: ClassVar[bool] = False
    is_last: ClassVar[bool] = False
    clips: ClassVar[bool] = False
    differentiable: bool = False
    capturable: bool = False

    def __init__(self, defaults: dict[str, Any] | None = None) -> None:
        counted = CountedSettings(defaults or {})
        check_defaults(type(self).__name__, counted)
        self.defaults: dict[str, Any] = counted
        self.settings = Settings(counted)
        self.global_state: dict[str, Any] = {}
        self.children: dict[str, Module] = {}
        self.rows = {}
        self.row_writes = RowWrites()
        self._projected: dict[str, list[str]] = {}
        self._stand_ins: dict[str, StandIns] = {}
        self._owner: weakref.ref[Any] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in _DECLARED:
            self._note_change()

    def _note_change(self) -> None:
        """Have the next step of the optimizer make its plan again."""
        settings = self.__dict__.get("settings")
        if settings is not None:
            settings.binding.writes.add()

    # ------------------------------------------------------------------ looking

    def __repr__(self) -> str:
        parts = [f"{key}={value!r}" for key, value in self.defaults.items() if not key.startswith("_")]
        parts += [f"{key}={child!r}" for key, child in self.children.items()]
        return f"{type(self).__name__}({', '.join(parts)})"

    def links(self) -> Iterator[tuple[str, Module]]:
        """This link and all inside it, with their paths."""
        yield "", self
        for key, child in self.children.items():
            for path, link in child.links():
                here = f"{key}.{type(child).__name__}"
                yield (f"{here}/{path}" if path else here), link

    def all_needs(self) -> frozenset[Need]:
        """What this link and the links inside it need."""
        return frozenset().union(self.needs, *(child.all_needs() for child in self.children.values()))

    def check(self) -> None:
        """Refuse a construction that can never work; called when the optimizer is built."""

    def attached(self, optimizer: Optimizer) -> None:
        """Called when an optimizer with this link is complete: refuse what can't work with it, or prepare it."""

    def replace_params(self, replaced: Mapping[Tensor, Tensor]) -> None:
        """Called when an edit of the module has replaced parameters: use the new tensor wherever the link refers to the old one."""
        local = self.settings.local
        for before, after in replaced.items():
            if before in local:
                local[after] = local.pop(before)

    # ------------------------------------------------------------------ children

    def set_child(self, key: str, module: Chainable | None) -> None:
        """Give this link a child: a link, a sequence of links (a chain), or None to have none."""
        from .chain import maybe_chain

        made = None if module is None else maybe_chain(module)
        if made is not None and key in self.children:
            warnings.warn(f"{type(self).__name__}: the child {key!r} is replaced", stacklevel=2)
        owner = self._owner() if self._owner is not None else None
        with Guard(deferred=True) as guard:
            if owner is not None:
                guard.add(owner.relink)
            guard.mappings(self.children)
            if made is None:
                self.children.pop(key, None)
            else:
                self.children[key] = made
                for _, link in made.links():
                    if link._owner is None or link._owner() is None:  # an optimizer shares its own with its links
                        link.use_binding(self.settings.binding)
            self.settings.binding.writes.add()
            if owner is not None:
                owner.relink()

    def set_children_sequence(self, modules: Iterable[Chainable], prefix: str = "module_") -> None:
        """Give this link children numbered from 0."""
        for i, module in enumerate(modules):
            self.set_child(f"{prefix}{i}", module)

    def get_children_sequence(self, prefix: str = "module_") -> list[Module]:
        """The numbered children, in order."""
        out: list[Module] = []
        while (child := self.children.get(f"{prefix}{len(out)}")) is not None:
            out.append(child)
        return out

    def inner_step(self, key: str, objective: Objective, must_exist: bool = True) -> Objective:
        """Pass the objective to a child and return it."""
        return self._child(key).step(objective) if must_exist or key in self.children else objective

    def _child(self, key: str) -> Module:
        if key not in self.children:
            raise KeyError(f"{type(self).__name__} has no child {key!r}; it has {', '.join(self.children) or 'none'}")
        return self.children[key]

    def inner_step_tensors(
        self,
        key: str,
        tensors: list[Tensor],
        clone: bool,
        params: Iterable[Tensor] | None = None,
        grads: Sequence[Tensor] | None = None,
        loss: Tensor | None = None,
        closure: Callable[..., Any] | None = None,
        objective: Objective | None = None,
        must_exist: bool = True,
    ) -> list[Tensor]:
        """Run a child on any tensors as if they were the update.

        Args:
            key: The child.
            tensors: What to transform.
            clone: Whether to keep `tensors` as they are.
            params: The parameters that the tensors belong to; None where they have other shapes: the child's state is
                then kept for stand-ins, which inherit the settings of `objective.params` or of this link's.
            grads: The gradient to show to the child.
            loss: The loss to show to the child.
            closure: A closure to show to the child.
            objective: Instead of the three above.
            must_exist: False: without that child the tensors come back.

        Returns:
            The transformed tensors.
        """
        from .functional import step_tensors

        if not must_exist and key not in self.children:
            return tensors
        child = self._child(key)
        if objective is not None and len(tensors) < len(objective.params):
            child.check_shared(objective.params, every=True)
        if params is not None:
            return step_tensors(child, tensors, params, grads, loss, closure, objective, clone=clone)
        given = [tensor.clone() for tensor in tensors] if clone else tensors
        stand_ins = self._stand_ins.setdefault(key, StandIns())
        with stand_ins.point_at(given, self.settings.binding, None if objective is None else objective.params) as fakes:
            return step_tensors(child, given, fakes, grads, loss, closure, objective, clone=False)

    def find_follows(self, row: Mapping[str, Any]) -> Mapping[str, Follows]:
        """Return how states of a row follow their parameter into another order of labels: `follows`, or by what is in it."""
        return self.follows

    def get_child_projected_buffers(
        self, key: str, buff: ProjectedBuffer | Sequence[ProjectedBuffer], params: Sequence[Tensor] | None = None
    ) -> list[list[Tensor]]:
        """The buffers of a child (and of its children) that must follow a change of basis, one list per parameter."""
        kinds = [buff] if isinstance(buff, str) else list(buff)
        if params is None:
            params = self._stand_ins[key].tensors if key in self._stand_ins else []
        out: list[list[Tensor]] = []
        for _, link in self._child(key).links():
            link.on_get_projected_buffers()
            for name in (name for kind in kinds for name in link._projected.get(kind, ())):
                rows: list[Any] = [row.get(name) for row in link.find_rows(params)]
                if any(row is None for row in rows):
                    continue
                lists = all(isinstance(row, deque | list) for row in rows)
                out += [list(parts) for parts in zip(*rows, strict=False)] if lists else [rows]
        return out

    def on_get_projected_buffers(self) -> None:
        """Called before projected buffers are read."""

    # ------------------------------------------------------------------ the step

    def update(self, objective: Objective) -> None:
        """Learn from the current point. Must not change the update."""

    @abstractmethod
    def apply(self, objective: Objective) -> Objective:
        """Transform the update; should not change what was learnt, so that it may be called again."""

    def step(self, objective: Objective) -> Objective:
        """`update`, then `apply`."""
        if self.vector_state:
            self.follow(objective.params)
        self.update(objective)
        return self.apply(objective)

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """The Hessian, or this link's approximation of it, over all parameters concatenated; None where it has none."""
        found = [H for child in self.children.values() if (H := child.get_H(objective)) is not None]
        if len(found) > 1:
            raise ChainError(f"{type(self).__name__} has {len(found)} children with a Hessian; it can use one")
        return found[0] if found else None

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """What the link has learnt, by position of its parameters. `Optimizer.state_dict` saves all links by name."""
        where = type(self).__name__
        return {
            "state": {str(i): encode_row(row, where) for i, row in enumerate(self.rows.values())},
            "global": encode_row(self.global_state, where),
            "extra": encode_value(self._extra_pack(), where),
            "children": {key: child.state_dict() for key, child in self.children.items()},
        }

    def _extra_pack(self) -> dict[str, Any]:
        """More to save: tensors, numbers, strings, and lists and dictionaries of those."""
        return {}

    def _extra_unpack(self, extra: dict[str, Any]) -> None:
        """Takes what `_extra_pack` gave."""

    def protect(self, guard: Guard, unwritten: Sequence[Tensor] = ()) -> None:
        """Register the state with a guard, which puts it back if the step fails.

        Args:
            guard: The guard.
            unwritten: Tensors of the state of which no copy is needed.
        """
        guard.add(self.row_writes.add)
        if type(self)._extra_unpack is not Module._extra_unpack:
            guard.add(partial(self._extra_unpack, copy.deepcopy(self._extra_pack())))
        guard.states(self.rows, self.global_state, unwritten=unwritten)
        guard.mappings(self.__dict__)

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to no optimizer yet; that of a whole optimizer says so itself.
        return {**self.__dict__, "_owner": None}


Chainable = Module | Sequence[Module]
"""A link, or a sequence of links."""
