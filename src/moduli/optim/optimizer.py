"""The optimizer: a chain of links over parameters, as a `torch.optim.Optimizer`."""

from __future__ import annotations

import inspect
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .._torch import is_observed, keep_from_tracing
from ..population import Population
from . import _differentiable, _explain, _groups, _members, _saved
from ._ascent import NegatedEvaluator
from ._binding import Binding
from ._closure import Evaluator
from ._matrices import MemberEvaluator, MemberMatrices, OtherPresenceError
from ._needs import ChainError, ClosureError, Need, join
from ._portable import make_portable, wants_portable
from ._processes import are_several, choose_reduction
from ._settings import check_members
from ._shards import ShardedParams, ShardEvaluator, are_in_pieces
from ._shown_state import OptimizerState
from .chain import Chain, flatten
from .functional import run as run_links
from .module import Chainable, Module
from .objective import Objective

__all__ = ["Optimizer"]

# As torch defines them, without the decorator that imports the compiler at the first call.
_add_param_group: Any = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_zero_grad: Any = inspect.unwrap(torch.optim.Optimizer.zero_grad)

_requires_grad = operator.attrgetter("requires_grad")

Reduce = Callable[[Tensor], Tensor] | Literal["mean", "sum"] | None


class Optimizer(torch.optim.Optimizer):
    """An optimizer made of links, for parameters, a module, or a population.

    One step makes an `Objective`, threads it through the links, and moves the parameters by minus the update.

    Args:
        params: Parameters, (name, parameter) pairs, group dictionaries, an `nn.Module`, or a `Population`.
        *modules: The links, in order.
        groups: Settings by name: `{"*.bias": {"weight_decay": 0}, "head.*": {"lr": 1e-4}}`. Where several patterns match
            a parameter, later ones win; what no pattern matches has the settings that the links were made with.
        fuse: "auto" runs neighbouring pointwise links as one pass over all parameters, False one by one.
        reduce: How several processes make one loss of theirs, so that links which decide on it (line searches) decide
            alike: "mean" (what DistributedDataParallel does to gradients; the default for such a module), "sum", a
            function of the loss, or None for processes that work on their own.
        differentiable: Whether autograd sees through the steps: parameters become functions of where they began and of
            settings given as tensors that require a gradient, `m.LR(rate)`. Steps then need a closure, and memory grows
            with them; `detach_` begins anew.
        maximize: Ascend: every link sees the loss and its gradient with the other sign.
        capturable: Whether steps can be captured in a graph of an accelerator. Links count in Python, so that chains which
            count or decide are refused.
        foreach: A hint of torch's optimizers that changes nothing here: the form of a pass is chosen by what is fastest.
        fused: Another.

    Attributes:
        modules: The links.
        current_step: How many steps were made.
        num_evaluations: How often the closure was called (steps without one count as one).
        should_terminate: Whether a termination link asked to stop.
        reasons: Why, in sentences.
        attrs: What links published.
        model: The module, where one was given.

    Example:
        >>> import torch, moduli as mo
        >>> from moduli import m
        >>> net = torch.nn.Linear(2, 1)
        >>> opt = mo.Optimizer(net, m.ClipNorm(1.0), m.Adam(), m.WeightDecay(0.01), m.LR(1e-2))
        >>> x, y = torch.ones(4, 2), torch.ones(4, 1)
        >>> first = opt.step(mo.closure(lambda: ((net(x) - y) ** 2).mean()))
        >>> for _ in range(50):
        ...     last = opt.step(mo.closure(lambda: ((net(x) - y) ** 2).mean()))
        >>> bool(last < first)
        True
    """

    moves_parameters = True

    def __init__(
        self,
        params: Any,
        *modules: Chainable,
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        fuse: Literal["auto", False] = "auto",
        reduce: Reduce | Literal["auto"] = "auto",
        differentiable: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        self.modules: list[Module] = list(flatten(modules))
        if not self.modules:
            raise ChainError(
                "an Optimizer needs at least one link; for plain descent write Optimizer(params, m.LR(1e-2))"
            )
        if fuse not in ("auto", False):
            raise ValueError(f"fuse is {fuse!r}; it is 'auto' or False")
        for key, hint in (("foreach", foreach), ("fused", fused)):
            if hint not in (None, True, False):
                raise ValueError(f"{key} is {hint!r}; it is a hint: True, False or None")
        self.maximize = maximize
        self._ascent: NegatedEvaluator | None = None
        self.binding = Binding()
        self.binding.fuse = fuse == "auto"
        self.model: torch.nn.Module | None = None
        self.population: Population | None = None
        #: The population's parameters as the links see them; None for one model.
        self.rows: MemberMatrices | None = None
        #: The parameters of which processes hold pieces, as the links see them; None where each is whole.
        self.shards: ShardedParams | None = None
        given = self._parameters(params)
        if groups:
            given = _groups.make_groups(given, groups)
        self._links = self._claim()
        self._segments: Any = None
        self.current_step = 0
        self.num_evaluations = 0
        self.should_terminate = False
        self.reasons: list[str] = []
        self.attrs: dict[str, Any] = {}
        self._needs = join(link.all_needs() for link in self.modules)
        self._evaluated = [need for need in self._needs if need.evaluates]
        self._check_chain()
        self.binding.draws_alike = reduce is not None and are_several()
        self.differentiable = differentiable
        if capturable:
            _check_capturable([link for _, link in self._links])
        if differentiable and maximize:
            raise ValueError("a differentiable step descends; negate the loss in the closure instead of maximize=True")
        if differentiable:
            _differentiable.check(self.modules)
            if self.population is not None:
                raise ChainError("a population's members share one storage, which can't be differentiated through")
        self._options: list[dict[str, Any]] = []
        self._shown = _groups.exported(link for _, link in self._links)
        self._take_shares()
        self._list: list[Tensor] = []
        self._every: tuple[list[Tensor], list[bool]] = ([], [])
        self._matrices: list[int] = []
        self._carried: tuple[list[Tensor], Tensor, list[Tensor]] | None = None
        self._built = False
        # Torch takes parameters that are no leaves where it reads this.
        super().__init__(given, {**self._shown, **({"differentiable": True} if differentiable else {})})
        self._built = True
        self._name()
        in_pieces = self.population is None and are_in_pieces(self.param_groups)
        self._reduce = choose_reduction(
            reduce, self.model, self.population, [link for _, link in self._links], in_pieces
        )
        for _, link in self._links:
            link.settings.binding = self.binding
            link._owner = weakref.ref(self)
        self._find_shards()
        self._sync()
        for _, link in self._links:
            link.attached(self)
        self.rows = None if self.population is None else MemberMatrices(self)

    # ------------------------------------------------------------------ building

    def _parameters(self, params: Any) -> Any:
        if isinstance(params, torch.nn.Module):
            self.model = params
            named = _groups.named_parameters(params)
            if not named:
                raise ValueError(f"{type(params).__name__} has no parameters to optimize")
            return named
        if isinstance(params, Population):
            self.population = params
            self.binding.members = len(params)
            return list(params.named_parameters())
        if isinstance(params, Tensor):
            raise TypeError("params is one tensor; give a list of parameters: Optimizer([w], ...)")
        return params

    def _claim(self) -> list[tuple[str, Module]]:
        """All links with their paths; each may be used once."""
        out: list[tuple[str, Module]] = []
        seen: dict[int, str] = {}
        for i, top in enumerate(self.modules):
            for path, link in top.links():
                here = f"{i}.{type(top).__name__}" + (f"/{path}" if path else "")
                name = type(link).__name__
                if id(link) in seen:
                    raise ChainError(
                        f"the same {name} is used twice, at {seen[id(link)]} and {here}: its state would be shared. "
                        f"Make two: {name}(...), {name}(...)"
                    )
                owner = None if link._owner is None else link._owner()
                if owner is not None and owner is not self:
                    raise ChainError(
                        f"{name} at {here} already belongs to another optimizer, and its state would be shared; "
                        f"make a new {name}(...), or copy.deepcopy the link before its first use"
                    )
                seen[id(link)] = here
                out.append((here, link))
        return out

    def _check_chain(self) -> None:
        for _, link in self._links:
            link.check()
        if Need.MEMBERS in self._needs and self.population is None:
            name = next(type(link).__name__ for _, link in self._links if Need.MEMBERS in link.needs)
            raise ChainError(
                f"{name} moves the members of a population relative to each other; give the optimizer a population: "
                f"Optimizer(mo.Population.of(net, 64), ...)"
            )
        if self.population is not None:
            for link in self.modules:
                _members.check(link)
            for path, link in self._links:
                _members.check_link(path, link, len(self.population), self.population.sharding)

    def _find_shards(self) -> None:
        """Take notice of parameters that are in pieces."""
        if self.population is not None or not are_in_pieces(self.param_groups):
            return
        if self.differentiable:
            raise ChainError("parameters in pieces (DTensor, FSDP) can't be differentiated through")
        shards = ShardedParams(self, self.shards)
        shards.check()
        self.shards = shards
        self.binding.in_pieces = True

    def _take_shares(self) -> None:
        shard = None if self.population is None else self.population.sharding
        for _, link in self._links if shard is not None else ():
            _members.take_share(link, shard)

    def relink(self) -> None:
        """Take notice of links that were put into or taken out of other links; called by `Module.set_child`."""
        links = self._claim()
        needs = join(link.all_needs() for link in self.modules)
        before = self._links, self._needs
        self._links, self._needs = links, needs
        try:
            self._check_chain()
        except BaseException:
            self._links, self._needs = before
            raise
        self._evaluated = [need for need in needs if need.evaluates]
        for _, link in links:
            link.settings.binding = self.binding
            link._owner = weakref.ref(self)
            link.settings.forget()
        self._take_shares()
        self._options = []
        if self.rows is not None:
            self.rows.dissolve()
            self.rows.relink(self)
        self._find_shards()
        self._sync()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with settings of their own. State of what is there already stays.

        Args:
            param_group: "params" (parameters, or the pattern of names of parameters of the optimizer's module that it
                does not have yet) and settings.
        """
        group = _groups.ParamGroup(param_group)
        links = [link for _, link in self._links]
        group.missing = _groups.explain_missing(links)
        _groups.check_keys(group, links)
        if isinstance(group.get("params"), str):
            group["params"] = self._new_parameters(group["params"])
        group["params"] = _groups.listed(group.get("params", ()))
        tensors = _groups.tensors_of(group["params"])
        if len({id(tensor) for tensor in tensors}) != len(tensors):
            raise ValueError("a parameter appears twice in a group; it would be moved twice. Give each once")
        taken = {name: None for old in self.param_groups for name in old.get("param_names", ())}
        for name in _groups.names_of(group["params"]):
            if name in taken:
                raise ValueError(
                    f"two parameters are named {name!r}; names address the saved state, so give each its own"
                )
            taken[name] = None
        for key, names in ((key, names) for _, link in self._links for key, names in link.aliases.items()):
            if key not in group and any(name in group for name in names) and key in self._shown:
                shown = self._shown[key]
                group[key] = tuple(group.get(name, old) for name, old in zip(names, shown, strict=True))
        _add_param_group(self, group)
        group.pop("differentiable", None)  # one of the optimizer, not of its groups
        if not self._built:
            return
        try:
            self._name()
            self._sync()
            self._find_shards()
        except ValueError:
            self.param_groups.pop()
            self._name()
            raise

    def _new_parameters(self, pattern: str) -> list[tuple[str, Tensor]]:
        if self.model is None:
            raise ValueError(
                f"parameters are called for by name ({pattern!r}), so the optimizer has to be given the module"
            )
        found = _groups.select(_groups.named_parameters(self.model), pattern)
        new = [(name, param) for name, param in found if param not in self.binding.group_of]
        if not new:
            raise ValueError(f"all parameters called {pattern!r} are in a group already; change its settings there")
        return new

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients: to None, or to zeros in the tensors that are there."""
        _zero_grad(self, set_to_none)

    def _name(self) -> None:
        binding = self.binding
        binding.group_of.clear()
        position = 0
        for i, group in enumerate(self.param_groups):
            given = group.get("param_names") or [None] * len(group["params"])
            for param, name in zip(group["params"], given, strict=True):
                binding.group_of[param] = i
                chosen = str(position) if name is None else name
                binding.names[param] = chosen
                position += 1
        self._list, self._every = [], ([], [])
        for _, link in self._links:
            link.settings.forget()
        self._options = []

    def _sync(self) -> None:
        """Notice what users and schedulers wrote into the groups."""
        groups = self.param_groups
        if len(self._options) == len(groups):
            changed = [
                i for i, group in enumerate(groups) if not _groups.same(_groups.options(group), self._options[i])
            ]
        else:
            changed = list(range(len(groups)))
        if not changed:
            return
        links = [link for _, link in self._links]
        for i in changed:
            _groups.check_keys(groups[i], links)
            check_members("a parameter group", groups[i], self.binding.members)
        self._options = [_groups.options(group) for group in groups]
        for link in links:
            old = link.settings.overrides
            link.settings.overrides = [
                _groups.overrides(link, options, self._shown) if i in changed or i >= len(old) else old[i]
                for i, options in enumerate(self._options)
            ]
            link.settings.refresh()
        try:
            params = [param for group in groups for param in group["params"]]
            for link in self.modules:
                link.check_shared(params)
        except ValueError:
            self._options = []  # to be looked at again
            raise

    # ------------------------------------------------------------------ stepping

    def _active(self) -> list[Tensor]:
        """Parameters that require a gradient now; the same list object while nothing changes."""
        groups = self.param_groups
        every: list[Tensor] = (
            groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]
        )
        wanted = list(map(_requires_grad, every))
        known, flags = self._every
        # Every step looks at every parameter, so this is written to run in C.
        if wanted == flags and len(every) == len(known) and all(map(operator.is_, every, known)):
            return self._list
        self._every = (list(every), wanted)
        self._list = [param for param, want in zip(every, wanted, strict=True) if want]
        self._matrices = [i for i, param in enumerate(self._list) if param.dim() > 1]
        return self._list

    def step(  # type: ignore[override]
        self, closure: Callable[..., Any] | None = None, loss: Tensor | None = None, **kwargs: Any
    ) -> Tensor | None:
        """Make one step.

        Args:
            closure: Evaluates the loss: `mo.closure(fn)`, a function `closure(backward=True)`, or torch's ordinary
                `closure()` that calls backward itself. None to use the gradients in `.grad`.
            loss: The loss at the parameters, where no closure is given and a link wants it.
            **kwargs: Extra arguments for links, in `objective.storage`.

        Returns:
            The loss before the step (one per member for a population), detached; None where it was not evaluated.

        Raises:
            ClosureError: A link needs more than `.grad` and there is no closure, or the closure can't give it.
        """
        # Torch wraps `step` to call hooks and to be seen by its profiler, which costs as much as a small step. The
        # wrapper is only gone through where there is a hook or a profiler.
        if self.maximize:
            return self._ascend(closure, loss, kwargs)
        if is_observed(self):
            given = (closure, loss) if loss is not None else (closure,) if closure is not None else ()
            return self._hooked_step(*given, **kwargs)  # type: ignore[no-any-return]
        with torch.set_grad_enabled(self.differentiable):
            return self._step(closure, loss, kwargs)

    step.hooked = True  # type: ignore[attr-defined]

    def _ascend(self, closure: Any, loss: Tensor | None, kwargs: dict[str, Any]) -> Tensor | None:
        """A step of descent on the negated loss; the loss and the gradients that users see are theirs."""
        given = (closure, loss) if loss is not None else (closure,) if closure is not None else ()
        try:
            found = self._hooked_step(*given, **kwargs)
        finally:
            evaluator, self._ascent = self._ascent, None
            if evaluator is not None:
                evaluator.restore(param for group in self.param_groups for param in group["params"])
        return None if found is None else -found

    def _seen_step(
        self, closure: Callable[..., Any] | None = None, loss: Tensor | None = None, **kwargs: Any
    ) -> Tensor | None:
        with torch.set_grad_enabled(self.differentiable):
            return self._step(closure, loss, kwargs)

    _hooked_step: Any = torch.optim.Optimizer.profile_hook_step(_seen_step)

    def _step(self, closure: Callable[..., Any] | None, loss: Tensor | None, storage: dict[str, Any]) -> Tensor | None:
        binding = self.binding
        binding.step = self.current_step
        self._sync()
        params = self._active()
        if not params:
            self.current_step += 1
            self.num_evaluations += 1
            return None if closure is None else torch.as_tensor(Evaluator(closure).value()).detach()
        if self.rows is not None and self.rows.used:
            return self._step_members(params, closure, loss, storage)
        if self.shards is not None:
            return self._step_shards(self.shards, params, closure, loss, storage)
        evaluator = None if closure is None else self._evaluator(closure)
        return self._step_objective(self._objective(params, evaluator, loss, storage), loss)

    def _evaluator(self, closure: Callable[..., Any]) -> Evaluator:
        if not self.maximize:
            return Evaluator(closure)
        self._ascent = NegatedEvaluator(closure)
        return self._ascent

    def _step_members(
        self, leaves: list[Tensor], closure: Callable[..., Any] | None, loss: Tensor | None, storage: dict[str, Any]
    ) -> Tensor | None:
        """A step on the matrices of a population."""
        rows = self.rows
        if rows is None:
            raise ChainError("only a population is stepped as matrices")
        params = rows.begin(leaves, closure)
        evaluator = None if closure is None else MemberEvaluator(self._evaluator(closure), rows, leaves)
        objective = self._objective(params, evaluator, loss, storage)
        objective.blocks = rows
        try:
            return self._step_objective(objective, loss)
        except OtherPresenceError as found:
            again = self._objective(rows.begin_again(leaves, found.present), evaluator, loss, storage)
            again.blocks = rows
            again.loss = again.loss_approx = again._value(found.loss)
            again.set_gradients(again._gradients())
            return self._step_objective(again, loss)

    def _step_shards(
        self,
        shards: ShardedParams,
        leaves: list[Tensor],
        closure: Callable[..., Any] | None,
        loss: Tensor | None,
        storage: dict[str, Any],
    ) -> Tensor | None:
        """A step on the pieces that this process holds."""
        params = shards.begin(leaves, gradients=closure is None)
        evaluator = None if closure is None else ShardEvaluator(self._evaluator(closure), shards, leaves)
        objective = self._objective(params, evaluator, loss, storage)
        objective.shards, objective.matrices = shards, None
        return self._step_objective(objective, loss)

    def _objective(self, params: list[Tensor], closure: Any, loss: Tensor | None, storage: dict[str, Any]) -> Objective:
        objective = Objective(
            params,
            closure,
            loss,
            self.model if self.population is None else self.population,
            self.current_step,
            modular=self,
            storage=storage,
            needs=self._needs,
            members=self.binding.members,
            reduce=self._reduce,
        )
        objective.matrices = self._matrices if params is self._list else None
        objective.tail = self.modules[-1]
        return objective

    def _step_objective(self, objective: Objective, loss: Tensor | None) -> Tensor | None:
        evaluator = objective.evaluator
        device = objective.params[0].device.type
        if torch.is_autocast_enabled(device):  # for the closure, not for what links compute
            if evaluator is not None:
                inner = evaluator.inner if isinstance(evaluator, MemberEvaluator | ShardEvaluator) else evaluator
                inner.autocast = (device, torch.get_autocast_dtype(device))
            with torch.autocast(device, enabled=False):
                return self._step_objective(objective, loss)
        if self.differentiable:
            if evaluator is None:
                raise ClosureError(
                    "a differentiable step computes the gradient itself, with its graph; pass the loss: "
                    "opt.step(mo.closure(lambda: loss(net(x), y)))"
                )
            objective.differentiable = True
            _differentiable.begin(objective.params)
        elif evaluator is None:
            self._without_closure(objective, loss)
            if objective.present is not None and not any(objective.present):
                self.current_step += 1
                self.num_evaluations += 1
                return objective.loss
        elif evaluator.fixed:
            self._take_over(objective)
        try:
            last = run_links(objective, self.modules, self)
            last.update_parameters()
        except BaseException:
            objective.restore_start()
            if self.rows is not None:
                self.rows.push()
            raise
        if self.rows is not None:
            self.rows.push()
        # What was accepted under another objective (a reformulation) says nothing about this one.
        same = evaluator is not None and evaluator.fixed and last.evaluator is evaluator
        self._carried = last.accepted if same else None
        self.attrs.update(last.attrs)
        self.reasons = last.attrs.get("reasons", self.reasons)
        if last.should_terminate is not None:
            self.should_terminate = last.should_terminate
        self.current_step += 1
        self.num_evaluations += 1 if evaluator is None else evaluator.count
        last.apply_post_step_hooks(tuple(self.modules))
        if objective.loss is not None or last.evaluator is not evaluator:
            return objective.loss
        return last.loss_approx if last.loss is None else last.loss

    def detach_(self) -> None:
        """Forget how the parameters and what links remember came about; the values stay (see `differentiable`)."""
        _differentiable.cut((param for group in self.param_groups for param in group["params"]), self.modules)

    def _without_closure(self, objective: Objective, loss: Tensor | None) -> None:
        for need in self._evaluated:
            if not (need is Need.LOSS and loss is not None):
                name = next(type(link).__name__ for _, link in self._links if need in link.all_needs())
                known = " (or step(loss=loss))" if need is Need.LOSS else ""
                raise ClosureError(
                    f"{name} needs {need.value}, so step needs a closure{known}: "
                    "opt.step(mo.closure(lambda: loss(net(x), y)))"
                )
        found = objective._gradients()
        if self.maximize:
            found = [None if grad is None else -grad for grad in found]
            objective.loss = objective.loss_approx = None if objective.loss is None else -objective.loss
        objective.set_gradients(found)

    def _take_over(self, objective: Objective) -> None:
        """Use the loss and gradient that the last step found where it ended, if the parameters are still there."""
        if self._carried is None:
            return
        point, loss, grads = self._carried
        if len(point) == len(objective.params) and all(
            value.shape == param.shape and torch.equal(value, param)
            for value, param in zip(point, objective.params, strict=True)
        ):
            objective.loss = objective.loss_approx = loss
            objective.grads = grads

    # ------------------------------------------------------------------ looking and saving

    @property  # type: ignore[override]
    def state(self) -> OptimizerState:
        """For each parameter what the links keep of it, by their paths: `opt.state[p]["1.Adam/exp_avg"]`."""
        return OptimizerState(self, self._own_state)

    @state.setter
    def state(self, value: dict[Tensor, dict[str, Any]]) -> None:
        self._own_state = value

    def __repr__(self) -> str:
        return f"Optimizer({', '.join(map(repr, self.modules))})"

    def explain(self) -> str:
        """The chain as text: what each link needs, which links run as one pass, and why the others do not.

        Example:
            >>> import torch, moduli as mo
            >>> from moduli import m
            >>> opt = mo.Optimizer([torch.nn.Parameter(torch.ones(3))], m.Adam(), m.LR(1e-2))
            >>> print(opt.explain())
            1 parameter, 3 numbers
            one pass, which also moves the parameters:
              Adam  needs the gradient
              LR    needs the gradient
        """
        return _explain.explain(self)

    def link(self, name: str) -> Module:
        """The link with this class name or path ("1.Adam"); a ValueError where there is none or several."""
        found = [link for path, link in self._links if name == path or name.lower() == type(link).__name__.lower()]
        if len(found) != 1:
            paths = ", ".join(path for path, _ in self._links)
            raise ValueError(f"{len(found)} links are called {name!r}; the chain has {paths}")
        return found[0]

    def reset(self) -> None:
        """Forget everything learnt; parameters and settings stay."""
        for link in self.modules:
            link.reset()
        self._carried = None
        self.should_terminate, self.reasons = False, []

    def state_dict(self) -> dict[str, Any]:
        """Everything that was learnt, by link path and parameter name: plain data, no parameters, no code.

        It goes through `torch.save` and `torch.load(weights_only=True)`. In a process group, or where
        `torch.distributed.checkpoint` was imported, it has the shape that torch's tools take apart: by position, with what
        can't be resharded as bytes. Both load everywhere.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        packed = self.named_state_dict()
        if wants_portable(self):
            packed = make_portable(self, packed)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, packed)
            packed = packed if changed is None else changed
        return packed

    def named_state_dict(self) -> dict[str, Any]:
        """What `state_dict` gives where there is one process: by name, also where tools of torch want positions."""
        packed = _saved.pack(self)
        shard = None if self.population is None else self.population.sharding
        return packed if shard is None else _members.join_shards(self, shard, packed)

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Take over a saved state, by name. Nothing changes unless all of it fits.

        Args:
            state_dict: From `state_dict`, of an optimizer with the same links.
            strict: False to leave out links that are not in both chains, and state of parameters that are not here.

        Raises:
            ValueError: The chains differ, a tensor has another shape, or something would be left out.
        """
        given = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, given)
            given = given if changed is None else changed
        shard = None if self.population is None else self.population.sharding
        if shard is not None:
            given = _members.part_shards(self, shard, given)
        _saved.unpack(self, given, strict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        if self.shards is not None:
            raise TypeError(
                "an optimizer of parameters that several processes hold in pieces can't be copied or pickled; make another "
                "one and give it this one's state: other.load_state_dict(opt.state_dict())"
            )
        if self.rows is not None:
            self.rows.dissolve()
        kept = {**self.__dict__, "_segments": None, "_carried": None, "_links": None, "rows": None}
        kept.pop("step", None)  # schedulers put a wrapper there, which would step the original
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not self.differentiable:
            self.defaults.pop("differentiable", None)  # torch adds it, and would write it into every new group
        self._links = []
        self._links = self._claim()
        for _, link in self._links:
            link._owner = weakref.ref(self)
        if self.population is not None:
            _members.adopt(self.population, {name: param for param, name in self.binding.names.items()})
            self.rows = MemberMatrices(self)


def _check_capturable(links: Sequence[Module]) -> None:
    """Refuse what a captured graph would repeat with the numbers of the step at which it was captured."""
    for link in links:
        changes = getattr(link, "counts", False) or any(callable(value) for value in link.defaults.values())
        if changes or not getattr(link, "elementwise", isinstance(link, Chain)):
            raise ChainError(
                f"{type(link).__name__} counts or decides in Python, so that a captured graph would repeat one step of it; "
                "leave capturable=False, or capture the evaluation of the model alone"
            )


keep_from_tracing(Optimizer._step, Optimizer.zero_grad, Optimizer.add_param_group)
