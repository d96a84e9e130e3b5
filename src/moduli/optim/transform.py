"""Links written as hooks that get states and settings as lists, or tensors (over 400 lines: half of it documents the hooks)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from ._checks import HALVES, check_results
from ._hooks import (
    HookArguments,
    SettingsList,
    SettingValues,
    States,
    Tensors,
    call_each,
    gather_arguments,
    show_arguments,
    widen,
)
from ._needs import Across, Need
from ._vectors import as_real, from_vector, restore_complex
from .module import Chainable, Module
from .offload import find_place, send_row

if TYPE_CHECKING:
    from .objective import Objective

__all__ = ["TensorTransform", "Transform"]

Grads = Tensors | None
Loss = Tensor | None

_HOOKS = ("update", "apply", "step", "update_states", "apply_states", "multi_tensor_update", "multi_tensor_apply")


class Transform(Module):
    """A link written as `update_states` and `apply_states`, which get the states and settings of all parameters as lists.

    Args:
        defaults: The settings.
        update_freq: Learn at every n-th step only.
        inner: Links that transform the update between this link's learning and its own transformation.

    Example:
        >>> import torch, moduli as mo
        >>> class Halve(mo.optim.Transform):
        ...     def apply_states(self, objective, states, settings):
        ...         objective.updates = [u / 2 for u in objective.get_updates()]
        ...         return objective
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> _ = mo.Optimizer([w], Halve()).step(mo.closure(lambda: w.sum()))
        >>> w.data
        tensor([0.5000])
    """

    def __init__(
        self, defaults: dict[str, Any] | None = None, update_freq: int = 1, inner: Chainable | None = None
    ) -> None:
        super().__init__(defaults)
        if not isinstance(update_freq, int) or update_freq < 1:
            raise ValueError(f"{type(self).__name__}: update_freq is {update_freq!r}; give at least 1")
        self.update_freq = update_freq
        self.set_child("inner", inner)

    def update_states(self, objective: Objective, states: States, settings: SettingsList) -> None:
        """Learn: change `states`, not the update.

        Args:
            objective: The objective.
            states: The state of each parameter.
            settings: The settings of each parameter.
        """

    @abstractmethod
    def apply_states(self, objective: Objective, states: States, settings: SettingsList) -> Objective:
        """Transform the update and return the objective; do not change `states`.

        Args:
            objective: The objective.
            states: The state of each parameter.
            settings: The settings of each parameter.
        """

    def _lists(self, objective: Objective) -> tuple[States, list[SettingValues]]:
        settings = self.settings
        return self.find_rows(objective.params), [settings[param] for param in objective.params]

    def update(self, objective: Objective) -> None:
        """Learn, at every `update_freq`-th call."""
        if self.vector_state:
            self.follow(objective.params)
        if self.update_freq == 1 or self.increment_counter("update_calls", 0) % self.update_freq == 0:
            self.update_states(objective, *self._lists(objective))

    def apply(self, objective: Objective) -> Objective:
        """Run the inner links, then transform the update, and return the objective."""
        if "inner" in self.children:
            objective = self.inner_step("inner", objective)
        return self.apply_states(objective, *self._lists(objective))


class TensorTransform(Transform):
    """A link written as functions of tensors: for one tensor (`single_tensor_*`) or for lists (`multi_tensor_*`).

    Override one of `single_tensor_update` and `multi_tensor_update` to learn, and one of `single_tensor_apply` and
    `multi_tensor_apply` to transform; `*_initialize` fills the state of a new parameter.
    Parameters without a gradient are skipped, so that nothing decays or counts for them. Pointwise hooks and hooks on
    one vector get complex numbers as pairs of reals.

    Args:
        defaults: The settings.
        update_freq: Learn at every n-th step only.
        concat_params: Whether to work on one vector of all parameters instead of on each.
        uses_grad: Whether the hooks need the gradient too.
        uses_loss: Whether the hooks need the loss too.
        inner: Links between this link's learning and its transformation.

    Attributes:
        elementwise: Whether the `single_tensor_*` hooks are pointwise: runs of such links are fused into one pass.
        measures: False if `measure` has nothing to compute with these settings, so that it need not split a fused run; "norm"
            if it computes the Euclidean norm of all tensors only, as "norm": a pass computes it in the same call.
        counts: Whether `state["step"]` counts the updates of a parameter, from 1.
        numbers: Names of states that are Python numbers, which `advance` changes before the hooks learn.
        uses_params: False if the hooks read the shapes of parameters only, so that with `across` whole tensors parameters need
            not be gathered.
        uses_dtype: Whether pointwise hooks get the dtype of the parameter as `setting["dtype"]`: half precision is passed to them
            in single precision.
        narrow_states: Names of states that stay in half precision if pointwise hooks create them so.
        static: Settings that change the operations of hooks, not only their numbers; each value needs another kernel.

    Example:
        >>> import torch, moduli as mo
        >>> class Clamp(mo.optim.TensorTransform):
        ...     elementwise = True
        ...     def __init__(self, limit):
        ...         super().__init__({"limit": limit})
        ...     def single_tensor_apply(self, tensor, param, grad, loss, state, setting):
        ...         return tensor.clamp(-setting["limit"], setting["limit"])
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 0.1]))
        >>> _ = mo.Optimizer([w], Clamp(0.5)).step(mo.closure(lambda: (w**2).sum()))
        >>> w.data
        tensor([ 2.5000, -0.1000])
    """

    elementwise: bool = False
    #: Why its pointwise hooks are not pure, if a trace has detected it; they then run unfused.
    impure: str | None = None
    measures: bool | Literal["norm"] = True
    concat_params: bool = False
    uses_grad: bool = False
    uses_loss: bool = False
    uses_params: ClassVar[bool] = True
    uses_dtype: ClassVar[bool] = False
    narrow_states: ClassVar[tuple[str, ...]] = ()
    counts: ClassVar[bool] = False
    numbers: ClassVar[tuple[str, ...]] = ()
    static: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        defaults: dict[str, Any] | None = None,
        update_freq: int = 1,
        concat_params: bool = False,
        uses_grad: bool = False,
        uses_loss: bool = False,
        inner: Chainable | None = None,
    ) -> None:
        super().__init__(defaults, update_freq=update_freq, inner=inner)
        # A declaration of the class stays true if a handwritten constructor does not pass the argument.
        self.concat_params = self.vector_state = concat_params or self.concat_params
        self.uses_grad = uses_grad or self.uses_grad
        self.uses_loss = uses_loss or self.uses_loss

    @property
    def differentiable(self) -> bool:  # type: ignore[override]
        """True for pointwise hooks; any other link has to declare it."""
        return self.elementwise and not self.find_override() and not self.finds_numbers()

    @property
    def across(self) -> Across:  # type: ignore[override]
        """Nothing for pointwise hooks; a link that measures, or treats whole tensors, has to declare its requirement."""
        pointwise = self.elementwise and not self.concat_params and not self.find_override()
        return Across.NOTHING if pointwise and not self.finds_numbers() else Across.EVERYTHING

    def has_own(self, *names: str) -> bool:
        """Return whether the class overrides one of these methods."""
        return any(getattr(type(self), name) is not getattr(TensorTransform, name) for name in names)

    def find_override(self) -> str | None:
        """Return the first method that is run in place of the pointwise hooks; None if there is none."""
        return next((name for name in _HOOKS if self.has_own(name)), None)

    def add_dtype(self, setting: Any, param: Tensor) -> Any:
        """Return the settings for hooks, with the dtype of the parameter where they use it."""
        return {**setting, "dtype": param.dtype} if self.uses_dtype else setting

    def list_numbers(self) -> tuple[str, ...]:
        """Return the names of the states that are numbers on the host."""
        return ("step", *self.numbers) if self.counts else self.numbers

    def advance_numbers(self, state: Any, setting: Any) -> None:
        """Count a step of a parameter, and advance its other scalars."""
        if self.counts:
            state["step"] = state["step"] + 1
        if self.numbers:
            self.advance(state, setting)

    def stacks_alike(self, hook: str) -> bool:
        """Return whether a hook is called once for all tensors of a kind, stacked, under `torch.vmap`."""
        return False

    def find_kind(self, param: Tensor) -> Any:
        """Return a value that must be equal for parameters of one shape to be stacked."""
        return None

    def finds_numbers(self) -> bool:
        """Return whether it measures scalars over all tensors before its hooks run."""
        return bool(self.measures) and self.has_own("measure")

    def all_needs(self) -> frozenset[Need]:
        """Return the requirements of this link and its children; `uses_loss` adds the loss."""
        return super().all_needs() | (frozenset({Need.LOSS}) if self.uses_loss else frozenset())

    # ------------------------------------------------------------------ hooks

    def measure(
        self, tensors: Tensors, params: Tensors, grads: Grads, settings: SettingsList, members: int | None
    ) -> dict[str, Any] | None:
        """Return scalars over all tensors with equal settings (a norm), which hooks then get in `setting`.

        Args:
            tensors: The updates of these parameters.
            params: The parameters.
            grads: The gradients; None unless the link uses them.
            settings: The settings of each parameter.
            members: The number of members of a population, each with its own scalar; None for one model.
        """
        return None

    def advance(self, state: Any, setting: Any) -> None:
        """Advance the states named in `numbers`, on the host; called before the hooks learn.

        A fused pass calls it once for all parameters with equal numbers and settings, with those numbers (and the count of
        steps) as `state`, and passes the results to the hooks.
        """

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Loss, state: Any, setting: Any
    ) -> None:
        """Fill the state of one parameter.

        Args:
            tensor: The update.
            param: The parameter.
            grad: The gradient; None unless the link uses it.
            loss: The loss; None unless the link uses it.
            state: The state of the parameter, empty.
            setting: Its settings, and measured scalars.
        """

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Loss, state: Any, setting: Any
    ) -> None:
        """Learn from one tensor: change `state`, not `tensor`.

        Args:
            tensor: The update.
            param: The parameter.
            grad: The gradient; None unless the link uses it.
            loss: The loss; None unless the link uses it.
            state: The state of the parameter.
            setting: Its settings, and measured scalars.
        """

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Loss, state: Any, setting: Any
    ) -> Tensor:
        """Transform one tensor (in place or not) and return it.

        Args:
            tensor: The update.
            param: The parameter.
            grad: The gradient; None unless the link uses it.
            loss: The loss; None unless the link uses it.
            state: The state of the parameter.
            setting: Its settings, and measured scalars.

        Returns:
            The new update.
        """
        raise TypeError(f"{type(self).__name__} has neither single_tensor_apply nor multi_tensor_apply")

    def multi_tensor_initialize(
        self,
        tensors: Tensors,
        params: Tensors,
        grads: Grads,
        loss: Loss,
        states: States,
        settings: SettingsList,
    ) -> None:
        """Fill the states of new parameters.

        Args:
            tensors: The updates.
            params: The parameters.
            grads: The gradients; None unless the link uses them.
            loss: The loss; None unless the link uses it.
            states: The state of each parameter, empty.
            settings: The settings of each parameter, and measured scalars.
        """
        call_each(self, "single_tensor_initialize", HookArguments(tensors, params, grads, loss, states, settings))

    def multi_tensor_update(
        self,
        tensors: Tensors,
        params: Tensors,
        grads: Grads,
        loss: Loss,
        states: States,
        settings: SettingsList,
    ) -> None:
        """Learn from all tensors: change `states`, not `tensors`.

        Args:
            tensors: The updates.
            params: The parameters.
            grads: The gradients; None unless the link uses them.
            loss: The loss; None unless the link uses it.
            states: The state of each parameter.
            settings: The settings of each parameter, and measured scalars.
        """
        call_each(self, "single_tensor_update", HookArguments(tensors, params, grads, loss, states, settings))

    def multi_tensor_apply(
        self,
        tensors: Tensors,
        params: Tensors,
        grads: Grads,
        loss: Loss,
        states: States,
        settings: SettingsList,
    ) -> Sequence[Tensor]:
        """Transform all tensors and return them.

        Args:
            tensors: The updates.
            params: The parameters.
            grads: The gradients; None unless the link uses them.
            loss: The loss; None unless the link uses it.
            states: The state of each parameter.
            settings: The settings of each parameter, and measured scalars.

        Returns:
            The new updates, in the same order.
        """
        return call_each(self, "single_tensor_apply", HookArguments(tensors, params, grads, loss, states, settings))

    def get_applied_states(self, objective: Objective, positions: list[int], states: States) -> States:
        """Return the states for the `*_apply` hooks, by default unmodified.

        Args:
            objective: The objective.
            positions: The positions of the parameters in the objective.
            states: The state of each.
        """
        return states

    # ------------------------------------------------------------------ running them

    def _fill_states(self, arguments: HookArguments, streamed: bool = False) -> None:
        """Fill the states that are still empty.

        Args:
            arguments: The arguments of hooks.
            streamed: Whether a fused pass fetches offloaded state, so that state may be moved there at once.
        """
        empty = [i for i, state in enumerate(arguments.states) if not state]
        binding = self.settings.binding
        # Offloaded state is moved before the next is created: it may not fit on the device at once.
        for places in [[i] for i in empty] if binding.offload else [empty]:
            fresh = arguments.pick(places)
            if fresh.states:
                self.multi_tensor_initialize(*fresh)
            for state in fresh.states if self.elementwise else ():
                # State is stored in the precision in which hooks and fused passes compute, so that it is not rounded at every step.
                state.update((key, widen(value)) for key, value in state.items() if key not in self.narrow_states)
            for state in fresh.states if self.counts else ():
                state.setdefault("step", 0)
            for state, param in zip(fresh.states, fresh.params, strict=True) if streamed else ():
                send_row(state, find_place(binding, param))

    def update_states(self, objective: Objective, states: States, settings: SettingsList) -> None:
        """Gather the tensors and call the hooks that learn.

        Args:
            objective: The objective.
            states: The state of each parameter.
            settings: The settings of each parameter.
        """
        _, arguments = gather_arguments(self, objective, states, settings, owned=False)
        if not arguments.tensors:
            return
        with show_arguments(self, objective, arguments):
            self._fill_states(arguments)
            for row, setting in zip(arguments.states, arguments.settings, strict=True):
                self.advance_numbers(row, setting)
            self.multi_tensor_update(*arguments)

    def apply_states(self, objective: Objective, states: States, settings: SettingsList) -> Objective:
        """Gather the tensors, call the hooks that transform, and write the results to the update.

        Args:
            objective: The objective.
            states: The state of each parameter.
            settings: The settings of each parameter.

        Returns:
            The objective.
        """
        # Hooks that are called with stacks get copies already, so the update need not be copied for them.
        owned = not self.stacks_alike("single_tensor_apply")
        positions, arguments = gather_arguments(self, objective, states, settings, owned=owned)
        if not arguments.tensors:
            return objective
        arguments = arguments._replace(states=self.get_applied_states(objective, positions, arguments.states))
        with show_arguments(self, objective, arguments):
            results = self.multi_tensor_apply(*arguments)
        if objective.checking:
            check_results(self, results, arguments)
        out = list(results)
        if self.concat_params:
            positions, out = (
                list(range(len(objective.params))),
                from_vector(out[0], list(map(as_real, objective.params))),
            )
        updates = list(objective.peek_updates() if len(positions) == len(objective.params) else objective.get_updates())
        for i, tensor in zip(positions, out, strict=True):
            param, pairs = objective.params[i], self.concat_params or self.elementwise
            if self.elementwise and param.dtype in HALVES and not objective.wide:
                tensor = tensor.to(param.dtype)
            updates[i] = restore_complex(tensor, param) if pairs else tensor
        objective.updates = updates
        return objective
