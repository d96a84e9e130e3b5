"""The link: one step of an optimizer, with its settings, its state for each parameter, and named children."""

from __future__ import annotations

import copy
import re
import warnings
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from .._search_ranges import SearchRange
from ..layout import Guard
from ._link_type import LinkType, check_defaults
from ._needs import Across, ChainError, Need
from ._settings import Settings
from ._writes import CountedSettings, RowWrites
from .declared import DeclaredArguments
from .state import LinkState, ProjectedBuffer, StandIns
from .state_encoding import encode_row, encode_value

if TYPE_CHECKING:
    from ..linalg import LinearOperator
    from . import Objective, Optimizer
    from ._label_order import Follows

__all__ = ["Chainable", "Module", "ProjectedBuffer"]

# Attributes that decide how a link is run. Setting one on a link, at any time, invalidates the plan.
_DECLARED = frozenset(
    {
        *("elementwise", "concat_params", "update_freq", "uses_loss", "uses_grad", "measures", "counts", "static"),
        *("defaults", "children", "across", "members", "impure"),
    }
)


class Module(DeclaredArguments, LinkState, metaclass=LinkType):
    """A link: one step of an optimizer.

    `update` learns from the current point and changes nothing else, `apply` transforms the update, `step` does both.
    A link owns no parameters; its state for each of them is in `state`, its state for all of them together in
    `global_state`. Everything in those two is saved, copied and restored with the optimizer.

    Args:
        defaults: The settings, for parameters whose groups do not set them.

    Attributes:
        needs: The requirements on the objective (see `Need`); a chain that can't meet them raises ChainError.
        members: Whether the link works on all members of a population at once: True on parameters stacked over members,
            (N, *shape); "matrix" on all of them as one (N, P) matrix; "batched" on each member separately, in one call
            vectorised by `torch.vmap`; False on each member separately, one after the other. Pointwise hooks always work
            on the matrix.
        member_settings: For "batched" links, the settings that may differ between members: they are 0-d tensors in the call.
            If others differ, members are run one after the other.
        over_processes: Whether a link that compares members can compare members that are spread over processes.
        replicated: Whether every process stores the link's state of all members, if these are spread over processes.
        vector_state: Whether its state is over all parameters concatenated, so that it follows their order.
        across: The requirement on sharded parameters (see `Across`): nothing for pointwise links,
            sums for those that reduce lists by `moduli.kernels`, whole tensors for those that treat each tensor separately.
            By default all parameters are gathered, which is correct for every link.
        decides_on_host: Whether it copies values from the parameters' device to the host, because Python decides what
            comes next (a line search compares losses, a termination stops). Other links never do.
        follows: How states with other shapes than their parameter are reordered with its labels (see `Follows`); states
            with its shape are reordered like it.
        points: States that are points of parameter space, such as slow weights: if a model gets more units they get the values
            of the parameter. Other states get the link's initial state there, or zeros.
        reads_axes: Whether it derives settings of parameters from the axes of the model in `attached`, which is then called
            again when the model has new axes.
        keeps_outside: Whether it stores state that is neither in `state` nor in `global_state` (a foreign optimizer),
            so that it can't be run for each member of a population in turn.
        clips: Whether it reduces updates that are too large; watches count how many.
        is_last: Whether it has to be the last link of an optimizer.
        differentiable: Whether autograd differentiates through it, for the update, the parameters and its settings.
        capturable: Whether replaying a captured graph of one step is correct: it neither counts nor decides in Python. Pointwise
            links count on the device (`Optimizer(..., capturable=True)`) and need not set this.
        shared_settings: Settings with one value for all of its parameters (True: every setting, as for links with
            `vector_state`); groups that set two values raise ValueError.
        fixed_settings: Settings that can't be changed after construction: groups that do raise ValueError.
        divides_params: Whether each of its children gets some of the parameters only.
        aliases: Names in parameter groups for several settings, such as "betas".
        search_ranges: Ranges in which arguments are tuned, by name, where they differ from those of `find_search_ranges`; "lr"
            says which step sizes suit the updates of this link.

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
    member_settings: ClassVar[tuple[str, ...]] = ()
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
    search_ranges: ClassVar[Mapping[str, SearchRange]] = {}
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
        """Invalidate the plan of the optimizer."""
        settings = self.__dict__.get("settings")
        if settings is not None:
            settings.binding.writes.add()

    # ------------------------------------------------------------------ looking

    def __repr__(self) -> str:
        parts = [f"{key}={_format_setting(value)}" for key, value in self.defaults.items() if not key.startswith("_")]
        parts += [f"{key}={child!r}" for key, child in self.children.items()]
        return f"{type(self).__name__}({', '.join(parts)})"

    def links(self) -> Iterator[tuple[str, Module]]:
        """Yield this link and all links inside it, with their paths."""
        yield "", self
        for key, child in self.children.items():
            for path, link in child.links():
                here = f"{key}.{type(child).__name__}"
                yield (f"{here}/{path}" if path else here), link

    def all_needs(self) -> frozenset[Need]:
        """Return the requirements of this link and of the links inside it."""
        return frozenset().union(self.needs, *(child.all_needs() for child in self.children.values()))

    def check(self) -> None:
        """Raise an error for settings that can never work; called when the optimizer is built."""

    def attached(self, optimizer: Optimizer) -> None:
        """Prepare for an optimizer with this link, or raise an error if the link can't work in it; called once it is built."""

    def replace_params(self, replaced: Mapping[Tensor, Tensor]) -> None:
        """Replace references to parameters; called when an edit of the module has replaced some."""
        local = self.settings.local
        for before, after in replaced.items():
            if before in local:
                local[after] = local.pop(before)

    # ------------------------------------------------------------------ children

    def set_child(self, key: str, module: Chainable | None) -> None:
        """Set a child: a link, a sequence of links (a chain), or None to remove it."""
        from .chain import maybe_chain

        child = None if module is None else maybe_chain(module)
        if child is not None and key in self.children:
            warnings.warn(f"{type(self).__name__}: the child {key!r} is replaced", stacklevel=2)
        owner = self._owner() if self._owner is not None else None
        with Guard(deferred=True) as guard:
            if owner is not None:
                guard.add(owner.relink)
            guard.mappings(self.children)
            if child is None:
                self.children.pop(key, None)
            else:
                self.children[key] = child
                for _, link in child.links():
                    if (
                        link._owner is None or link._owner() is None
                    ):  # links of an optimizer use the optimizer's binding
                        link.use_binding(self.settings.binding)
            self.settings.binding.writes.add()
            if owner is not None:
                owner.relink()

    def set_children_sequence(self, modules: Iterable[Chainable], prefix: str = "module_") -> None:
        """Set children with names numbered from 0."""
        for i, module in enumerate(modules):
            self.set_child(f"{prefix}{i}", module)

    def get_children_sequence(self, prefix: str = "module_") -> list[Module]:
        """Return the numbered children, in order."""
        out: list[Module] = []
        while (child := self.children.get(f"{prefix}{len(out)}")) is not None:
            out.append(child)
        return out

    def inner_step(self, key: str, objective: Objective, must_exist: bool = True) -> Objective:
        """Return the objective after the step of a child.

        Args:
            key: The name of the child.
            objective: The objective.
            must_exist: False to return the objective unmodified if there is no such child.
        """
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
        """Return any tensors transformed by a child as if they were the update.

        Args:
            key: The name of the child.
            tensors: The tensors to transform.
            clone: False if `tensors` may be written to.
            params: The parameters that the tensors belong to. If the tensors have other shapes, None: the child's state then
                belongs to placeholders, which inherit the settings of `objective.params`.
            grads: The gradient for the child.
            loss: The loss for the child.
            closure: A closure for the child.
            objective: An objective, instead of the three above.
            must_exist: False to return the tensors unmodified if there is no such child.

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
        values = [tensor.clone() for tensor in tensors] if clone else tensors
        stand_ins = self._stand_ins.setdefault(key, StandIns())
        with stand_ins.point_at(
            values, self.settings.binding, None if objective is None else objective.params
        ) as fakes:
            return step_tensors(child, values, fakes, grads, loss, closure, objective, clone=False)

    def find_follows(self, row: Mapping[str, Any]) -> Mapping[str, Follows]:
        """Return the rules by which states of a row are reordered with labels: `follows`, or rules that depend on the row."""
        return self.follows

    def get_child_projected_buffers(
        self, key: str, buff: ProjectedBuffer | Sequence[ProjectedBuffer], params: Sequence[Tensor] | None = None
    ) -> list[list[Tensor]]:
        """Return the buffers of a child (and of its children) that must follow a change of basis, one list per parameter.

        Args:
            key: The name of the child.
            buff: The kinds of buffers, by how they transform.
            params: The parameters of the child; None for its placeholders.
        """
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
        """Prepare buffers to be read by a link that changes their basis."""

    # ------------------------------------------------------------------ the step

    def update(self, objective: Objective) -> None:
        """Learn from the current point. Must not change the update."""

    @abstractmethod
    def apply(self, objective: Objective) -> Objective:
        """Transform the update and return the objective; should not change state, so that it may be called again."""

    def step(self, objective: Objective) -> Objective:
        """Run `update`, then `apply`, and return the objective."""
        if self.vector_state:
            self.follow(objective.params)
        self.update(objective)
        return self.apply(objective)

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """Return the Hessian, or this link's approximation of it, over all parameters concatenated; None if it has none."""
        hessians = [H for child in self.children.values() if (H := child.get_H(objective)) is not None]
        if len(hessians) > 1:
            raise ChainError(f"{type(self).__name__} has {len(hessians)} children with a Hessian; it can use one")
        return hessians[0] if hessians else None

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the link, by position of its parameters. `Optimizer.state_dict` saves all links by name."""
        where = type(self).__name__
        return {
            "state": {str(i): encode_row(row, where) for i, row in enumerate(self.rows.values())},
            "global": encode_row(self.global_state, where),
            "extra": encode_value(self._extra_pack(), where),
            "children": {key: child.state_dict() for key, child in self.children.items()},
        }

    def _extra_pack(self) -> dict[str, Any]:
        """Return further state to save: tensors, numbers, strings, and lists and dictionaries of those."""
        return {}

    def _extra_unpack(self, extra: dict[str, Any]) -> None:
        """Restore the state that `_extra_pack` returned."""

    def protect(self, guard: Guard, unwritten: Sequence[Tensor] = ()) -> None:
        """Register the state with a guard, which restores it if the step fails.

        Args:
            guard: The guard.
            unwritten: Tensors of the state that need no copy.
        """
        guard.add(self.row_writes.add)
        if type(self)._extra_unpack is not Module._extra_unpack:
            guard.add(partial(self._extra_unpack, copy.deepcopy(self._extra_pack())))
        guard.states(self.rows, self.global_state, unwritten=unwritten)
        guard.mappings(self.__dict__)

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to no optimizer; a copied optimizer sets itself as the owner.
        return {**self.__dict__, "_owner": None}


Chainable = Module | Sequence[Module]
"""A link, or a sequence of links."""


def _format_setting(value: Any) -> str:
    """Return a setting as text: functions by their names, since addresses differ from run to run, and tensors by their sizes."""
    if isinstance(value, Tensor) and value.numel() > 8:
        return f"<{value.numel()} numbers>"
    return re.sub(r" at 0x[0-9a-f]+", "", re.sub(r"<function (\S+) at 0x[0-9a-f]+>", r"\1", repr(value)))
