"""The link: one step of an optimizer, with its settings, its state for each parameter, and named children."""

from __future__ import annotations

import warnings
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from ._arguments import LinkType, as_schedule
from ._groups import same
from ._needs import Across, ChainError, Need
from ._processes import COMMON_SEED
from ._settings import Settings, check_members, check_number
from ._stand_ins import StandIns
from ._state import StateStore
from ._vector_state import VECTOR, describe_params

if TYPE_CHECKING:
    from ..linalg import LinearOperator
    from .objective import Objective
    from .optimizer import Optimizer

__all__ = ["Chainable", "Module", "ProjectedBuffer"]

ProjectedBuffer = Literal["grad", "grad_sq", "grad_cu", "covariance", "inverse"]
"""How a buffer transforms when the basis changes."""


class Module(metaclass=LinkType):
    """A link: one step of an optimizer.

    `update` learns from the current point and changes nothing else, `apply` transforms the update, `step` does both.
    A link owns no parameters; what it keeps for each of them is in `state`, keyed by tensor, what it keeps for all in
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
        keeps_outside: Whether it learns something that is neither in `state` nor in `global_state` (a foreign optimizer),
            so that it can't be run for each member of a population in turn.
        differentiable: Whether gradients flow through it, from the update, the parameters and its settings.
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
    vector_state: bool = False
    across: Across = Across.EVERYTHING
    decides_on_host: bool = False
    keeps_outside: ClassVar[bool] = False
    differentiable: bool = False
    shared_settings: ClassVar[bool | tuple[str, ...]] = ()
    fixed_settings: ClassVar[tuple[str, ...]] = ()
    divides_params: ClassVar[bool] = False
    aliases: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __init__(self, defaults: dict[str, Any] | None = None) -> None:
        self.defaults: dict[str, Any] = dict(defaults or {})
        for key, value in self.defaults.items():
            if isinstance(value, Module):
                raise TypeError(f"{type(self).__name__}: {key} is a link; pass links to set_child, not as a setting")
            check_number(type(self).__name__, key, value)
        self.settings = Settings(self.defaults)
        self.global_state: dict[str, Any] = {}
        self.children: dict[str, Module] = {}
        self._state = StateStore()
        self._projected: dict[str, list[str]] = {}
        self._stand_ins: dict[str, StandIns] = {}
        # A weak reference: the run holds the link, and the two must not keep each other alive.
        self._pending: weakref.WeakMethod[Callable[[], None]] | None = None
        self._owner: weakref.ref[Any] | None = None
        self._segments: Any = None
        self._followed: tuple[Sequence[Tensor], list[str], list[int]] | None = None

    # ------------------------------------------------------------------ looking

    @property
    def state(self) -> StateStore:
        """Per-parameter state: `state[param][key]`."""
        self._settle()
        return self._state

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

    # ------------------------------------------------------------------ settings

    def set_param_groups(self, param_groups: Iterable[Mapping[str, Any]]) -> Self:
        """Settings of this link for some parameters; they come before the optimizer's groups.

        Args:
            param_groups: Dictionaries with "params" (a tensor, or tensors) and settings.

        Returns:
            This link.
        """
        groups = [dict(param_groups)] if isinstance(param_groups, Mapping) else [dict(group) for group in param_groups]
        known = {**self.defaults, **dict.fromkeys(self.aliases)}
        for group in groups:
            if "params" not in group:
                raise ValueError(f"{type(self).__name__}: a group needs 'params', the parameters it is for")
            for key, value in group.items():
                if key == "params":
                    continue
                if key not in known:
                    raise ValueError(
                        f"{type(self).__name__} has no setting {key!r}; it has {', '.join(self.defaults) or 'none'}"
                    )
                check_number(type(self).__name__, key, value)
            binding = self.settings.binding
            check_members(type(self).__name__, group, None if binding is None else binding.members)
        for group in groups:
            tensors = group.pop("params")
            for param in [tensors] if isinstance(tensors, Tensor) else list(tensors):
                found = param[1] if isinstance(param, tuple) else param
                self.settings.local[found] = {**self.settings.local.get(found, {}), **self.resolve_aliases(group)}
        self.settings.forget()
        owner = self._owner() if self._owner is not None else None
        if owner is not None:
            owner.relink()
        return self

    def check_shared(self, params: Sequence[Tensor], every: bool = False) -> None:
        """Refuse groups that give this link or one inside it two values of a setting that has one for all parameters.

        Args:
            params: The parameters that it sees.
            every: Whether it sees them as one tensor, so that there is one value of every setting.
        """
        if not self.divides_params:
            for child in self.children.values():
                child.check_shared(params, every)
        if not (every or self.shared_settings or self.vector_state or self.fixed_settings) or not params:
            return
        raws = list({id(raw): raw for raw in self.settings.raw_of_all(params)}.values())
        for raw in raws if self.fixed_settings else ():
            for key in self.fixed_settings:
                if not same({key: raw[key]}, {key: self.defaults[key]}):
                    raise ValueError(
                        f"a group sets {key}={raw[key]!r}, but {type(self).__name__} was made with {self.defaults[key]!r}, "
                        f"which can't be changed; say {type(self).__name__}({key}={raw[key]!r})"
                    )
        whole = every or self.vector_state or self.shared_settings is True
        keys = tuple(self.defaults) if whole else self.shared_settings
        for key in keys or ():  # type: ignore[union-attr]
            for other in raws[1:]:
                first = raws[0]
                if key in first and not same({key: first[key]}, {key: other[key]}):
                    raise ValueError(
                        f"{type(self).__name__} has one value of {key} for all parameters that it sees, but groups give it "
                        f"{first[key]!r} and {other[key]!r}; give one, or use m.Split to let it see some of them"
                    )

    def resolve_aliases(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Settings under their own names (`betas=(0.9, 0.99)` is beta1 and beta2)."""
        out: dict[str, Any] = {}
        for key, value in group.items():
            if key in self.aliases:
                names = self.aliases[key]
                out.update(zip(names, value if len(names) > 1 else (value,), strict=True))
            else:
                out[key] = as_schedule(value, self.defaults.get(key))
        return out

    def get_settings(self, params: Sequence[Tensor], key: Any, *more: str, cls: type = list) -> Any:
        """Values of one setting for each parameter; for several keys, one list for each."""
        rows = [self.settings[param] for param in params]
        if isinstance(key, str) and not more:
            return cls(row[key] for row in rows)
        keys = ([key] if isinstance(key, str) else list(key)) + list(more)
        return [cls(row[name] for row in rows) for name in keys]

    # ------------------------------------------------------------------ children

    def set_child(self, key: str, module: Chainable | None) -> None:
        """Give this link a child: a link, a sequence of links (a chain), or None to have none."""
        from .chain import maybe_chain

        made = None if module is None else maybe_chain(module)
        if made is not None and key in self.children:
            warnings.warn(f"{type(self).__name__}: the child {key!r} is replaced", stacklevel=2)
        before = dict(self.children)
        if made is None:
            self.children.pop(key, None)
        else:
            self.children[key] = made
        owner = self._owner() if self._owner is not None else None
        if owner is not None:
            try:
                owner.relink()
            except BaseException:
                self.children = before
                raise

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
        child = self._child(key, must_exist)
        return objective if child is None else child.step(objective)

    def _child(self, key: str, must_exist: bool) -> Module | None:
        child = self.children.get(key)
        if child is None and must_exist:
            raise KeyError(f"{type(self).__name__} has no child {key!r}; it has {', '.join(self.children) or 'none'}")
        return child

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
        from .functional import transform_tensors

        child = self._child(key, must_exist)
        if child is None:
            return tensors
        given = [tensor.clone() for tensor in tensors] if clone else list(tensors)
        if objective is not None and len(given) < len(objective.params):
            child.check_shared(objective.params, every=True)
        if params is not None:
            return transform_tensors(child, given, params, grads, loss, closure, objective)
        stand_ins = self._stand_ins.setdefault(self._stand_in_key(key), StandIns())
        with stand_ins.pointed_at(
            given, self.settings.binding, None if objective is None else objective.params
        ) as fakes:
            return transform_tensors(child, given, fakes, grads, loss, closure, objective)

    def _stand_in_key(self, key: str) -> str:
        """Members of a population that are run in turn have stand-ins of their own."""
        binding = self.settings.binding
        return key if binding is None or binding.member is None else f"{key}[{binding.member}]"

    # ------------------------------------------------------------------ state

    def get_state(
        self,
        params: Sequence[Tensor],
        key: str | list[str] | tuple[str, ...],
        key2: str | None = None,
        *keys: str,
        must_exist: bool = False,
        init: Any = torch.zeros_like,
        cls: type = list,
    ) -> Any:
        """State values for each parameter, made where they are missing.

        Args:
            params: The parameters.
            key: One key gives one list; several (or a list of keys) give a list of lists.
            key2: A second key.
            *keys: More keys.
            must_exist: Raise a KeyError where a value is missing.
            init: How to make a missing value: a function of the parameter, "param" or "grad" for a copy of those, a
                tensor (copied) or any other value; a list for each parameter (one key) or for each key (several keys).
            cls: The type of the lists.
        """
        names = [key] if isinstance(key, str) else list(key)
        names += [name for name in (key2, *keys) if name is not None]
        several = len(names) > 1 or not isinstance(key, str)
        columns = []
        for position, name in enumerate(names):
            start = init[position] if isinstance(init, list | tuple) and several else init
            column = cls()
            for i, param in enumerate(params):
                row = self.state[param]
                if name not in row:
                    if must_exist:
                        raise KeyError(f"{type(self).__name__} has no state {name!r} for parameter {i}")
                    each = start[i] if isinstance(start, list | tuple) else start
                    row[name] = _initial(each, param)
                column.append(row[name])
            columns.append(column)
        return columns if several else columns[0]

    @contextmanager
    def shown(self, params: Sequence[Any], states: Sequence[Any], settings: Sequence[Any]) -> Iterator[None]:
        """A block in which hooks see parameters in another form: it has the state and settings of the parameters."""
        rows, chosen = self._state.shown, self.settings.shown
        for param, state, setting in zip(params, states, settings, strict=True):
            rows[param], chosen[param] = state, setting
        try:
            yield
        finally:
            for param in params:
                del rows[param], chosen[param]

    def store(self, params: Sequence[Tensor], keys: str | Sequence[str], values: Any) -> None:
        """Write one value for each parameter (one key), or one list of values for each key."""
        if isinstance(keys, str):
            keys, values = [keys], [values]
        for key, column in zip(keys, values, strict=True):
            for param, value in zip(params, column, strict=True):
                self.state[param][key] = value

    def clear_state_keys(self, *keys: str) -> None:
        """Forget these entries for every parameter."""
        for row in self.state.values():
            for key in keys:
                row.pop(key, None)

    def increment_counter(self, key: str, start: int) -> int:
        """A number that grows by one at each call; the first is `start`."""
        value: int = self.global_state[key] + 1 if key in self.global_state else start
        self.global_state[key] = value
        return value

    def get_generator(self, device: torch.device | str | None, seed: int | None) -> torch.Generator | None:
        """The random generator for this seed and device, made at first use; None (torch's own) where seed is None.

        Where several processes train one model they have to draw alike, so that there None is one fixed seed.
        """
        if seed is None:
            binding = self.settings.binding
            if binding is None or not binding.draws_alike:
                return None
            seed = COMMON_SEED
        key = f"generator/{torch.device(device or 'cpu')}/{seed}"
        if key not in self.global_state:
            self.global_state[key] = torch.Generator(device or "cpu").manual_seed(seed)
        found: torch.Generator = self.global_state[key]
        return found

    def add_projected_keys(self, kind: ProjectedBuffer, *keys: str) -> None:
        """Declare that these buffers transform like a gradient, its square, its cube or a covariance."""
        self._projected.setdefault(kind, []).extend(keys)

    def get_child_projected_buffers(
        self, key: str, buff: ProjectedBuffer | Sequence[ProjectedBuffer], params: Sequence[Tensor] | None = None
    ) -> list[list[Tensor]]:
        """The buffers of a child (and of its children) that must follow a change of basis, one list per parameter."""
        child = self._child(key, must_exist=True)
        kinds = [buff] if isinstance(buff, str) else list(buff)
        if params is None:
            stand_ins = self._stand_ins.get(self._stand_in_key(key))
            params = stand_ins.tensors if stand_ins is not None else []
        out: list[list[Tensor]] = []
        if child is not None:
            for _, link in child.links():
                link.on_get_projected_buffers()
                for name in (name for kind in kinds for name in link._projected.get(kind, ())):
                    rows = [link.state[param].get(name) for param in params]
                    if any(row is None for row in rows):
                        continue
                    if all(isinstance(row, deque | list) for row in rows):
                        out += [list(parts) for parts in zip(*rows, strict=False)]
                    else:
                        out.append(rows)  # type: ignore[arg-type]
        return out

    def on_get_projected_buffers(self) -> None:
        """Called before projected buffers are read."""

    def reset(self) -> None:
        """Forget everything learnt, in children too; random generators go on from where they are."""
        self.state.clear()
        kept = {key: value for key, value in self.global_state.items() if isinstance(value, torch.Generator)}
        self.global_state.clear()
        self.global_state.update(kept)
        for child in self.children.values():
            child.reset()

    def reset_for_online(self) -> None:
        """Forget what belongs to the last evaluation (previous gradient, previous loss), in children too."""
        for child in self.children.values():
            child.reset_for_online()

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

    def follow(self, params: Sequence[Tensor]) -> None:
        """For links with `vector_state`: start afresh where the parameters are others than at the last step.

        Their state is over all parameters concatenated, so it means nothing once one is added, frozen or thawed.
        """
        held = self.global_state.get(VECTOR)
        sizes = [param.numel() for param in params]
        known = self._followed
        # An optimizer gives the same list while its parameters are the same ones.
        if held is not None and known is not None and known[0] is params and known[1] is held and known[2] == sizes:
            return
        binding = self.settings.binding
        here = describe_params(params, {} if binding is None else binding.names)
        if held != here:
            if held is not None:
                self.reset()
            self.global_state[VECTOR] = held = here
        self._followed = (params, held, sizes)

    def get_H(self, objective: Objective) -> LinearOperator | None:
        """The Hessian, or this link's approximation of it, over all parameters concatenated; None where it has none."""
        found = [H for child in self.children.values() if (H := child.get_H(objective)) is not None]
        if len(found) > 1:
            raise ChainError(f"{type(self).__name__} has {len(found)} children with a Hessian; it can use one")
        return found[0] if found else None

    # ------------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, Any]:
        """What the link has learnt, by position of its parameters. `Optimizer.state_dict` saves all links by name."""
        from ._saved import pack_link

        return pack_link(self, {param: str(i) for i, param in enumerate(self.state)})

    def _extra_pack(self) -> dict[str, Any]:
        """More to save: tensors, numbers, strings, and lists and dictionaries of those."""
        return {}

    def _extra_unpack(self, extra: dict[str, Any]) -> None:
        """Takes what `_extra_pack` gave."""

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        # A copy belongs to no optimizer yet; that of a whole optimizer says so itself.
        return {**self.__dict__, "_pending": None, "_owner": None, "_segments": None, "_followed": None}

    def _settle(self) -> None:
        """Have a fused run that this link is part of write down what it counted."""
        pending = self._pending() if self._pending is not None else None
        if pending is not None:
            pending()


def _initial(init: Any, param: Tensor) -> Any:
    if isinstance(init, str) and init == "param":
        return param.detach().clone()
    if isinstance(init, str) and init == "grad":
        return torch.zeros_like(param) if param.grad is None else param.grad.detach().clone()
    if isinstance(init, Tensor):
        return init.clone()
    return init(param) if callable(init) else init


Chainable = Module | Sequence[Module]
"""A link, or a sequence of links."""
