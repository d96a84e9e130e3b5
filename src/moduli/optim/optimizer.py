"""The optimizer, as a `torch.optim.Optimizer` (over 400 lines: half of it documents the public methods of one class)."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .._torch import is_observed, keep_from_tracing
from ..axes import ModelAxes
from ..layout import REMOVED, Guard
from ..population import Population, PopulationAround
from . import _chain_checks, _groups, _portable, _saved
from ._following import Following
from ._matrix_link import find_own_axes, take_axes
from ._needs import ChainError, Need
from ._pictures import draw_history, write_html
from ._processes import are_several, choose_reduction
from ._settings import Binding, is_per_member
from ._shown_state import KEEP_ELSEWHERE, ShownDict, ShownState
from ._torch_states import write_torch
from .chain import flatten
from .evaluation import show_averages, show_trained
from .explain import explain
from .forms import MemberMatrices, ShardedParams, members
from .forms.graph import detach_all
from .forms.shards import are_sharded
from .master_weights import MasterWeights
from .module import Chainable, Module
from .plan import StepPlan, find_early_links, make_first_state, make_step
from .watch import By, Watch

__all__ = ["Optimizer"]

# As torch defines them, without the decorator that imports the compiler at the first call.
_add_param_group: Any = inspect.unwrap(torch.optim.Optimizer.add_param_group)
_zero_grad: Any = inspect.unwrap(torch.optim.Optimizer.zero_grad)

Reduce = Callable[[Tensor], Tensor] | Literal["mean", "sum"] | None


class Optimizer(torch.optim.Optimizer):
    """An optimizer made of links, for parameters, a module, or a population.

    One step creates an `Objective`, passes it through the links, and subtracts the update from the parameters.

    Args:
        params: Parameters, (name, parameter) pairs, group dictionaries, an `nn.Module`, or a `Population`.
        *modules: The links, in order.
        groups: Settings by name: `{"*.bias": {"weight_decay": 0}, "head.*": {"lr": 1e-4}}`. Where several patterns match
            a parameter, later ones win; parameters that no pattern matches have the links' own settings.
        fuse: "auto" runs neighbouring pointwise links as one pass over all parameters, False one by one.
        reduce: The reduction of the losses of several processes to one, so that links which depend on it (line searches) make
            the same decision everywhere: "mean" (as DistributedDataParallel reduces gradients; the default for such a module),
            "sum", a function of the loss, or None for processes that train separate models.
        differentiable: Whether autograd differentiates through the steps: parameters become functions of their initial values
            and of settings that are tensors which require a gradient, `m.LR(rate)`. Steps then need a closure, and memory
            grows with their number; `detach_` drops the graph.
        maximize: Whether to ascend: links get the negated loss and gradient.
        capturable: Whether steps can be captured in a graph of an accelerator: counts of steps, and the step that schedules are
            functions of, are tensors on the device. Chains of pointwise links and norms can be; links that decide in Python
            raise ChainError.
        master: "float32" to store a copy of half-precision parameters in single precision, and to update the copy: the last link
            is then `m.MasterWeights()`. See `m.Kahan` and `m.StochasticRounding` for less memory.
        axes: The axes of the model (`mo.axes.trace`), for links that treat parameters as matrices, or by their role: such links
            can then use the names of axes, `m.Orthogonalize(batch="head")`. By default the labels of a module with labelled
            tensors.
        foreach: An argument of torch's optimizers, without effect here: the fastest form of a pass is chosen.
        fused: Another such argument.

    Attributes:
        modules: The links.
        current_step: The number of steps made.
        num_evaluations: The number of calls of the closure (steps without one count as one).
        should_terminate: Whether a termination link requested to stop.
        reasons: The reasons to stop, as sentences.
        attrs: The values that links published.
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
        master: Literal["float32"] | None = None,
        axes: ModelAxes | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        self.modules: list[Module] = [*flatten(modules), *_make_master(master)]
        if not modules or not self.modules:
            raise ChainError(
                "an Optimizer needs at least one link; for plain descent write Optimizer(params, m.LR(1e-2))"
            )
        self.maximize = maximize
        self.binding = Binding(fuse=fuse is not False)
        self.model: torch.nn.Module | None = None
        self.population: Population | None = None
        #: The population's parameters in the form for links; None for one model.
        self.rows: MemberMatrices | None = None
        #: Sharded parameters in the form for links; None if no parameter is sharded.
        self.shards: ShardedParams | None = None
        #: Whether links have the state of `make_first_state`, into whose tensors a torch checkpoint is read.
        self.rehearsed = False
        #: Whether the parameters are averages of the trained ones: between `eval` and `train`.
        self.evaluating = False
        #: Detects and follows edits of the module; None without a module.
        self._following: Following | None = None
        self._removals = REMOVED.count
        entries = params
        if isinstance(params, torch.nn.Module):
            self.model, entries = params, _groups.named_parameters(params)
        elif isinstance(params, Population):
            self.population, entries = params, list(params.named_parameters())
            self.binding.members = len(params)
        elif isinstance(params, PopulationAround):
            raise TypeError(
                "a population around a mean stores no members that an optimizer could step; move its mean by `update`, search by "
                "`mo.search(net, fitness, rank=)`, or give the optimizer the mean or a `Population` of members"
            )
        if groups:
            entries = _groups.make_groups(entries, groups)
        self._plan: StepPlan | None = None
        self.current_step = self.num_evaluations = 0
        self.should_terminate = False
        self.reasons: list[str] = []
        self.attrs: dict[str, Any] = {}
        self._take_links()
        links = [link for _, link in self._links]
        self.binding.draws_alike = reduce is not None and are_several()
        self.differentiable = differentiable
        _chain_checks.check_options(self, capturable)
        #: Settings written into every group for schedulers to read.
        self._exported = _groups.export_settings(links)
        #: The point that the last step ended at, with its loss and gradient, if the next step can reuse them.
        self._carried: tuple[list[Tensor], Tensor, list[Tensor]] | None = None
        self._built = False
        # Torch accepts parameters that are not leaves only if the defaults have this entry.
        super().__init__(entries, {**self._exported, **({"differentiable": True} if differentiable else {})})
        self._built = True
        if isinstance(params, torch.nn.Module | Population):
            self._following = Following(params, groups or {}, self.param_groups[0])
        self.binding.slots.name_params(self.param_groups)
        self.binding.axes = take_axes(self, axes)
        #: Whether the axes were passed to the optimizer or a link; otherwise they come from labels.
        self._axes_given = axes is not None or find_own_axes(links) is not None
        _chain_checks.check_shares(links)
        self._find_shards()
        self._reduce = choose_reduction(reduce, self, self.shards is not None)
        self._own_links()
        _groups.apply_groups(self)
        for link in links:
            link.attached(self)
        self.rows = None if self.population is None else MemberMatrices(self, self.population)

    def _find_shards(self) -> None:
        """Detect sharded parameters (DTensor, FSDP)."""
        if self.population is not None or not are_sharded(self.param_groups):
            return
        if self.differentiable:
            raise ChainError("parameters in pieces (DTensor, FSDP) can't be differentiated through")
        shards = ShardedParams(self, self.shards)
        shards.check()
        self.shards = shards
        self.binding.sharded = True

    def _take_links(self) -> None:
        """Collect the links and check that each is used once and that its needs are met."""
        self._links = _chain_checks.claim_links(self)
        self._needs: frozenset[Need] = frozenset().union(*(link.all_needs() for link in self.modules))
        self._evaluated = [need for need in self._needs if need.evaluates]
        self._early = find_early_links(self.modules)
        _chain_checks.check_chain(self)

    def _own_links(self) -> None:
        """Bind the links to this optimizer and slice per-member settings to the local shard."""
        shard = None if self.population is None else self.population.sharding
        for _, link in self._links:
            link.use_binding(self.binding)
            link._owner = weakref.ref(self)
            for key, value in link.defaults.items():
                if shard is not None and is_per_member(value) and len(value) == shard.total:
                    link.defaults[key] = shard.own(value)

    def relink(self) -> None:
        """Update the optimizer after links were added to or removed from other links; called by `Module.set_child`."""
        self._take_links()
        self._own_links()
        self.binding.writes.add()
        if self.rows is not None:
            self.rows.dissolve()
            self.rows.relink(self)
        self._find_shards()
        _groups.apply_groups(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with their own settings. The state of other parameters stays.

        Args:
            param_group: "params" (parameters, or the pattern of names of parameters of the optimizer's module that it
                does not have yet) and settings.
        """
        following = self._following
        if following is None or following.busy:
            self._add_group(param_group)
            return
        group = following.release(self, param_group)
        with (
            following.wait()
        ):  # the group may have new parameters of the module, which would otherwise be added to another
            self._add_group(group)

    def _add_group(self, param_group: dict[str, Any]) -> None:
        group = _groups.prepare_group(self, param_group)
        _add_param_group(self, group)
        REMOVED.discard(group["params"])  # removed from their module, but added here by the program
        group.pop("differentiable", None)  # an option of the optimizer, not of its groups
        if not self._built:
            return
        try:
            self.binding.slots.name_params(self.param_groups)
            self.binding.axes = take_axes(self, self.binding.axes if self._axes_given else None)
            for _, link in self._links:
                if link.reads_axes:
                    link.attached(self)
            _groups.apply_groups(self)
            self._find_shards()
        except ValueError:
            self.param_groups.pop()
            self.binding.slots.name_params(self.param_groups)
            raise

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, with the parameters that the module has now.

        Code that reads gradients before a step (`GradScaler.unscale_`, clipping by groups) then includes new parameters.
        """
        following = self._following
        if following is not None and not following.busy:
            following.follow_quietly(self)
        return self._group_list

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._group_list = groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to None, or to zeros in place."""
        if set_to_none and not is_observed(self):
            # Torch's version records a profiler range, which takes longer than this loop.
            for group in self.param_groups:
                for param in group["params"]:
                    param.grad = None
        elif not set_to_none and self.population is not None:
            # Gradients of a population are views of one matrix; torch's version needs dense tensors.
            self.population.zero_grad(set_to_none=False)
        else:
            _zero_grad(self, set_to_none)

    # ------------------------------------------------------------------ stepping

    def step(  # type: ignore[override]
        self, closure: Callable[..., Any] | None = None, loss: Tensor | None = None, **kwargs: Any
    ) -> Tensor | None:
        """Make one step.

        Args:
            closure: Evaluates the loss: `mo.closure(fn)`, a function `closure(backward=True)`, or torch's ordinary
                `closure()` that calls backward itself. None to use the gradients in `.grad`.
            loss: The loss at the parameters, if no closure is given and a link needs it.
            **kwargs: Extra arguments for links, in `objective.storage`.

        Returns:
            The loss before the step (one per member for a population), detached; the mean over samples for links that evaluate
            samples only; None if nothing was evaluated.

        Raises:
            ClosureError: A link needs more than `.grad` and there is no closure, or the closure can't give it.
        """
        # Torch's wrapper of `step` calls hooks and records profiler ranges, which takes as long as a small step. So it is used
        # only if there is a hook or a profiler.
        if is_observed(self):
            arguments = (closure, loss) if loss is not None else (closure,) if closure is not None else ()
            return Optimizer._hooked_step(self, *arguments, **kwargs)  # type: ignore[no-any-return]
        return make_step(self, closure, loss, kwargs)

    step.hooked = True  # type: ignore[attr-defined]

    def _run_step(self, closure: Any = None, loss: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        return make_step(self, closure, loss, kwargs)

    _hooked_step: Any = torch.optim.Optimizer.profile_hook_step(_run_step)

    def eval(self) -> None:
        """Replace the parameters by their average, to evaluate or save the average.

        The average is that of `m.ScheduleFree` or `m.PolyakAveraging`; nothing changes in a chain without such a link. Trainers of
        transformers and Accelerate call it and `train` automatically.

        Example:
            >>> import torch, moduli as mo
            >>> from moduli import m
            >>> w = torch.nn.Parameter(torch.tensor([4.0]))
            >>> opt = mo.Optimizer([w], m.LR(1.0), m.PolyakAveraging())
            >>> for _ in range(2):
            ...     _ = opt.step(mo.closure(lambda: w.sum()))
            >>> opt.eval()
            >>> w.item()
            2.5
            >>> opt.train()
            >>> w.item()
            2.0
        """
        if not self.evaluating:
            show_averages(self)

    def train(self) -> None:
        """Restore the trained parameters after `eval`; a step in between raises RuntimeError."""
        if self.evaluating:
            show_trained(self)

    def detach_(self) -> None:
        """Detach the parameters and the state of links from their graphs (see `differentiable`); the values stay."""
        detach_all(self.list_params(), self.modules)

    # ------------------------------------------------------------------ looking and saving

    @property  # type: ignore[override]
    def state(self) -> ShownState:
        """The state of the links for each parameter, by their paths: `opt.state[p]["1.Adam/exp_avg"]`.

        It is read-only: writing another value raises TypeError. Links store it in `link.state`.
        """
        rows: dict[Tensor, dict[str, Any]] = {param: {} for param in self.list_params()}
        for path, link in self._links:
            store = link.state
            for param, row in rows.items():
                row.update((f"{path}/{key}", value) for key, value in store.get(param, {}).items())
        if _portable.TOOL not in sys.modules:  # torch's tool makes a step if a parameter has no entry
            rows = {param: row for param, row in rows.items() if row}
        return ShownState((param, ShownDict(row)) for param, row in rows.items())

    @state.setter
    def state(self, value: Any) -> None:
        """Ignore the empty state that torch's constructor sets; links have their own."""
        if value:
            raise TypeError(KEEP_ELSEWHERE)

    def list_params(self) -> list[Tensor]:
        """Return all parameters, in the order of the groups."""
        return [param for group in self.param_groups for param in group["params"]]

    def __repr__(self) -> str:
        return f"Optimizer({', '.join(map(repr, self.modules))})"

    def explain(self) -> str:
        """Return the chain as text: the needs of each link, the fused passes, and why other links are not fused.

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
        return explain(self)

    def _repr_html_(self) -> str:
        return write_html(self)

    def plot_history(self, names: Sequence[str] | None = None) -> Any:
        """Plot the numbers that `watch(history=True)` has recorded, by step; needs matplotlib (extra `plot`).

        Args:
            names: The numbers to plot; by default the loss, the norms of gradient and update, and the learning rate.

        Returns:
            The figure, which is not shown.

        Raises:
            ImportError: Without matplotlib.
            ValueError: Nothing was recorded, or not these numbers.
        """
        return draw_history(self, names)

    def watch(self, by: By = None, *, history: bool = False) -> Watch:
        """Record the numbers of every step (norms, rates, the loss), and return an object that is called to read them.

        Norms are computed inside the fused pass, and values stay on their device until they are read. A second call replaces the
        first; `with opt.watch() as log` or `log.close()` ends it.

        Args:
            by: The parts whose norms are computed besides those of all parameters: "group" for each parameter group, "parameter"
                for each parameter, patterns of names (`["encoder.*", "head.*"]`), or a mapping from labels to patterns.
            history: Whether the dictionary of every step is stored, in `Watch.history`. It is read after each step, which waits
                for the device.

        Returns:
            A `Watch`: `log()` is one flat dictionary of numbers; `Watch.__call__` lists them.

        Example:
            >>> import torch, moduli as mo
            >>> from moduli import m
            >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
            >>> opt = mo.Optimizer(net, m.ClipNorm(1.0), m.Adam(), m.LR(1e-3))
            >>> log = opt.watch(by=["0.*", "1.*"])
            >>> _ = opt.step(mo.closure(lambda: net(torch.ones(4, 2)).square().mean()))
            >>> [name for name in log() if name.startswith("grad_norm")]
            ['grad_norm', 'grad_norm/0.*', 'grad_norm/1.*']
        """
        self.binding.watch = Watch(self, by, history)
        return self.binding.watch

    def link(self, name: str) -> Module:
        """Return the link with this class name or path ("1.Adam"); raise ValueError if there is none, or several."""
        matching = [link for path, link in self._links if name == path or name.lower() == type(link).__name__.lower()]
        if len(matching) != 1:
            paths = ", ".join(path for path, _ in self._links)
            raise ValueError(f"{len(matching)} links are called {name!r}; the chain has {paths}")
        return matching[0]

    def reset(self) -> None:
        """Clear the state of all links; parameters and settings stay."""
        for link in self.modules:
            link.reset()
        self._carried = None
        self.should_terminate, self.reasons = False, []

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all links, by link path and parameter name: plain data, no parameters, no code.

        It goes through `torch.save` and `torch.load(weights_only=True)`. In a process group, or where
        `torch.distributed.checkpoint` was imported, it has the layout that torch's tools read: by position, with values that
        can't be resharded as bytes. Both layouts load everywhere.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        portable = _portable.wants_portable(self)
        if portable and _portable.TOOL in sys.modules:
            make_first_state(self)  # a checkpoint is read into its tensors
        packed = self.named_state_dict()
        if portable:
            packed = _portable.make_portable(self, packed)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, packed)
            packed = packed if changed is None else changed
        return packed

    def named_state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name, also where `state_dict` has the layout of torch's tools."""
        if self.binding.device_steps is not None:
            self.current_step = self.binding.device_steps.read(self.current_step)
        packed = _saved.pack(self)
        shard = None if self.population is None else self.population.sharding
        return packed if shard is None else members.map_saved(self, shard, packed, shard.join, shard.total)

    def to_torch_state_dict(self, *, strict: bool = True) -> dict[str, Any]:
        """Return the state in the format of torch's optimizer with the same algorithm, for its `load_state_dict`.

        Args:
            strict: False to leave out links that torch's optimizer does not have, such as a clip.

        Raises:
            ValueError: The chain is none of torch's Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, Adagrad, RMSprop, Rprop, SGD or
                Muon.

        Example:
            >>> import torch, moduli as mo
            >>> from moduli import presets
            >>> net = torch.nn.Linear(2, 1)
            >>> opt = mo.Optimizer(net, presets.adamw(lr=1e-2))
            >>> _ = opt.step(mo.closure(lambda: net(torch.ones(3, 2)).square().mean()))
            >>> theirs = torch.optim.AdamW(net.parameters())
            >>> theirs.load_state_dict(opt.to_torch_state_dict())
            >>> theirs.param_groups[0]["lr"], theirs.state[net.weight]["step"]
            (0.01, tensor(1.))
        """
        return write_torch(self, strict)

    def describe_state(self) -> dict[str, Any]:
        """Return the shapes by parameter name and the paths of the links in `named_state_dict`, without the state."""
        shapes: dict[str, Any] = _saved.list_shapes(self)
        shard = None if self.population is None else self.population.sharding
        if shard is not None:
            shapes = {name: (shard.total, *shape[1:]) for name, shape in shapes.items()}
        return {"shapes": shapes, "links": dict.fromkeys(path for path, _ in self._links)}

    def load_state_dict(
        self, state_dict: dict[str, Any], *, strict: bool = True, axes: ModelAxes | None = None
    ) -> None:
        """Load a saved state, by name. Nothing changes unless all of it fits.

        Args:
            state_dict: From `state_dict`, of an optimizer with the same links.
            strict: False to leave out links that are not in both chains, and state of parameters that are not here.
            axes: The axes of the model here, to load the state of a model with other numbers of units: state of units that
                both have is loaded, by label where there are labels, otherwise by position.

        Raises:
            ValueError: The chains differ, a tensor has another shape, or something would be left out.
        """
        loaded = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, loaded)
            loaded = loaded if changed is None else changed
        saved = _saved.read(self, loaded, strict)
        shard = None if self.population is None else self.population.sharding
        if shard is not None:
            saved = members.shard_saved(self, shard, saved)
        with Guard(deferred=True) as guard:
            _saved.unpack(self, saved, strict, guard, axes)
        if self.binding.device_steps is not None:
            self.binding.device_steps.clear()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        if self.shards is not None:
            raise TypeError(
                "an optimizer of parameters in pieces can't be copied; make another and load its state_dict()"
            )
        if self.rows is not None:
            self.rows.dissolve()
        state = {**self.__dict__, **dict.fromkeys(("_plan", "_carried", "_links", "rows"))}
        state.pop("step", None)  # schedulers set a wrapper here, which would step the original
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not self.differentiable:
            self.defaults.pop("differentiable", None)  # added by torch, which would write it into every new group
        self._links = _chain_checks.claim_links(self)
        self._own_links()
        if self.population is not None:
            members.adopt(self.population, self.binding.slots)
            self.rows = MemberMatrices(self, self.population)


def _make_master(dtype: str | None) -> list[Module]:
    """Return the link that stores master weights; none if `dtype` is None."""
    if dtype is None:
        return []
    if dtype != "float32":
        raise ValueError(f'master is {dtype!r}; it is "float32" or None')
    return [MasterWeights()]


keep_from_tracing(make_step, Optimizer.zero_grad, Optimizer.add_param_group)
