"""Links with a stricter template: states and settings come as lists, and hooks work on tensors alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from ._checks import HALVES, check_results
from ._hooks import HookArguments, SettingValues, States, call_each, gather_arguments, show_arguments, widen
from ._needs import Across, Need
from ._vectors import as_real, from_vector, restore_complex
from .module import Chainable, Module
from .offload import find_place, send_row

if TYPE_CHECKING:
    from .objective import Objective

__all__ = ["TensorTransform", "Transform"]

Tensors = list[Tensor]
Grads = list[Tensor] | None
Loss = Tensor | None

_HOOKS = ("update", "apply", "step", "update_states", "apply_states", "multi_tensor_update", "multi_tensor_apply")


class Transform(Module):
    """A link whose only children are optional, written as `update_states` and `apply_states`.

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

    def update_states(self, objective: Objective, states: States, settings: Sequence[SettingValues]) -> None:
        """Learn: change `states`, not the update."""

    @abstractmethod
    def apply_states(self, objective: Objective, states: States, settings: Sequence[SettingValues]) -> Objective:
        """Transform the update with what is in `states`."""

    def _lists(self, objective: Objective) -> tuple[States, list[SettingValues]]:
        settings = self.settings
        return self.find_rows(objective.params), [settings[param] for param in objective.params]

    def update(self, objective: Objective) -> None:
        """Learn, when it is this link's turn."""
        if self.vector_state:
            self.follow(objective.params)
        if self.update_freq == 1 or self.increment_counter("update_calls", 0) % self.update_freq == 0:
            self.update_states(objective, *self._lists(objective))

    def apply(self, objective: Objective) -> Objective:
        """Transform the update, after the inner links have."""
        if "inner" in self.children:
            objective = self.inner_step("inner", objective)
        return self.apply_states(objective, *self._lists(objective))


class TensorTransform(Transform):
    """A link written as functions of tensors: for one tensor (`single_tensor_*`) or for lists (`multi_tensor_*`).

    Override one of `single_tensor_update` and `multi_tensor_update` to learn, and one of `single_tensor_apply` and
    `multi_tensor_apply` to transform; `*_initialize` fills the state of a parameter that is seen for the first time.
    Parameters without a gradient are left out, so that nothing decays or counts for them. Pointwise hooks and hooks on
    one vector see complex numbers as pairs of reals.

    Args:
        defaults: The settings.
        update_freq: Learn at every n-th step only.
        concat_params: Work on one vector of all parameters instead of on each.
        uses_grad: Whether the hooks want the gradient too.
        uses_loss: Whether the hooks want the loss too.
        inner: Links between this link's learning and its transformation.

    Attributes:
        elementwise: Whether the `single_tensor_*` hooks are pointwise: runs of such links are fused into one pass.
        measures: False where `measure` has nothing to find with these settings, so that it need not part a fused run; "norm"
            where it finds the Euclidean norm of all tensors and nothing else, as "norm": a pass finds it in the same call.
        counts: Whether `state["step"]` counts the updates of a parameter, from 1.
        numbers: Names of states that are Python numbers, which `advance` changes before the hooks learn.
        uses_params: False where the hooks look at the shapes of parameters only, so that `across` whole tensors theirs need not
            be gathered.
        uses_dtype: Whether pointwise hooks find the dtype of the parameter as `setting["dtype"]`: they see those of half precision
            in single precision.
        narrow_states: Names of states that stay in half precision, where pointwise hooks make them so.
        static: Settings that change what the hooks do, not only their numbers; each value is a kernel of its own.

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
    #: Why its pointwise hooks are not pure, once that was seen: then they run one by one.
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
        # What the class declares holds, also under a constructor that is written by hand.
        self.concat_params = self.vector_state = concat_params or self.concat_params
        self.uses_grad = uses_grad or self.uses_grad
        self.uses_loss = uses_loss or self.uses_loss

    @property
    def differentiable(self) -> bool:  # type: ignore[override]
        """Pointwise hooks are, by being pointwise; any other link has to say so."""
        return self.elementwise and not self.find_override() and not self.finds_numbers()

    @property
    def across(self) -> Across:  # type: ignore[override]
        """Nothing for pointwise hooks; a link that measures, or treats whole tensors, has to say what it needs."""
        pointwise = self.elementwise and not self.concat_params and not self.find_override()
        return Across.NOTHING if pointwise and not self.finds_numbers() else Across.EVERYTHING

    def has_own(self, *names: str) -> bool:
        """Whether the class overrides one of these methods."""
        return any(getattr(type(self), name) is not getattr(TensorTransform, name) for name in names)

    def find_override(self) -> str | None:
        """The first method that is run in place of the pointwise hooks, if there is one."""
        return next((name for name in _HOOKS if self.has_own(name)), None)

    def add_dtype(self, setting: Any, param: Tensor) -> Any:
        """Return the settings for hooks, with the dtype of the parameter where they use it."""
        return {**setting, "dtype": param.dtype} if self.uses_dtype else setting

    def list_numbers(self) -> tuple[str, ...]:
        """Return the names of the states that are numbers on the host."""
        return ("step", *self.numbers) if self.counts else self.numbers

    def advance_numbers(self, state: Any, setting: Any) -> None:
        """Count a step of a parameter, and change its other numbers."""
        if self.counts:
            state["step"] = state["step"] + 1
        if self.numbers:
            self.advance(state, setting)

    def stacks_alike(self, hook: str) -> bool:
        """Whether a hook is called once for all tensors that are alike, which it sees one of, under `torch.vmap`."""
        return False

    def find_kind(self, param: Tensor) -> Any:
        """Return what has to be equal for two parameters of one shape that hooks are called once for."""
        return None

    def finds_numbers(self) -> bool:
        """Whether it finds numbers over all tensors first."""
        return bool(self.measures) and self.has_own("measure")

    def all_needs(self) -> frozenset[Need]:
        """As for every link; `uses_loss` adds the loss."""
        return super().all_needs() | (frozenset({Need.LOSS}) if self.uses_loss else frozenset())

    # ------------------------------------------------------------------ hooks

    def measure(
        self, tensors: Tensors, params: Tensors, grads: Grads, settings: Sequence[SettingValues], members: int | None
    ) -> dict[str, Any] | None:
        """Numbers over all tensors with equal settings (a norm) that the hooks then find in `setting`.

        One per member for a population.
        """
        return None

    def advance(self, state: Any, setting: Any) -> None:
        """Change the states that `numbers` names, on the host; called before the hooks learn.

        A fused pass calls it once for all parameters with equal numbers and settings, with those numbers (and the count of
        steps) as `state`, and gives the results to the hooks.
        """

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Loss, state: Any, setting: Any
    ) -> None:
        """Fill the state of one parameter."""

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Loss, state: Any, setting: Any
    ) -> None:
        """Learn from one tensor; change `state`, not `tensor`."""

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Loss, state: Any, setting: Any
    ) -> Tensor:
        """Transform one tensor (in place or not) and return it."""
        raise TypeError(f"{type(self).__name__} has neither single_tensor_apply nor multi_tensor_apply")

    def multi_tensor_initialize(
        self,
        tensors: Tensors,
        params: Tensors,
        grads: Grads,
        loss: Loss,
        states: States,
        settings: Sequence[SettingValues],
    ) -> None:
        """Fill the states of parameters seen for the first time."""
        call_each(self, "single_tensor_initialize", HookArguments(tensors, params, grads, loss, states, settings))

    def multi_tensor_update(
        self,
        tensors: Tensors,
        params: Tensors,
        grads: Grads,
        loss: Loss,
        states: States,
        settings: Sequence[SettingValues],
    ) -> None:
        """Learn from all tensors; change `states`, not `tensors`."""
        call_each(self, "single_tensor_update", HookArguments(tensors, params, grads, loss, states, settings))

    def multi_tensor_apply(
        self,
        tensors: Tensors,
        params: Tensors,
        grads: Grads,
        loss: Loss,
        states: States,
        settings: Sequence[SettingValues],
    ) -> Sequence[Tensor]:
        """Transform all tensors and return them."""
        return call_each(self, "single_tensor_apply", HookArguments(tensors, params, grads, loss, states, settings))

    def get_applied_states(self, objective: Objective, kept: list[int], states: States) -> States:
        """The states that the `*_apply` hooks see, for the parameters at these positions; those that were learnt."""
        return states

    # ------------------------------------------------------------------ running them

    def _fill_states(self, given: HookArguments, streamed: bool = False) -> None:
        """Fill the states that are still empty.

        Args:
            given: The arguments of hooks.
            streamed: Whether a fused pass fetches state that is stored elsewhere, so that it can be put there.
        """
        empty = [i for i, state in enumerate(given.states) if not state]
        binding = self.settings.binding
        # State that is stored elsewhere leaves before the next is made: the device may not hold all of it.
        for places in [[i] for i in empty] if binding.offload else [empty]:
            fresh = given.pick(places)
            if fresh.states:
                self.multi_tensor_initialize(*fresh)
            for state in fresh.states if self.elementwise else ():
                # In the precision that hooks and fused passes compute in: between two steps nothing is rounded to half of it.
                state.update((key, widen(value)) for key, value in state.items() if key not in self.narrow_states)
            for state in fresh.states if self.counts else ():
                state.setdefault("step", 0)
            for state, param in zip(fresh.states, fresh.params, strict=True) if streamed else ():
                send_row(state, find_place(binding, param))

    def update_states(self, objective: Objective, states: States, settings: Sequence[SettingValues]) -> None:
        """Gathers the tensors and calls the hooks that learn."""
        _, given = gather_arguments(self, objective, states, settings, owned=False)
        if not given.tensors:
            return
        with show_arguments(self, objective, given):
            self._fill_states(given)
            for row, setting in zip(given.states, given.settings, strict=True):
                self.advance_numbers(row, setting)
            self.multi_tensor_update(*given)

    def apply_states(self, objective: Objective, states: States, settings: Sequence[SettingValues]) -> Objective:
        """Gathers the tensors, calls the hooks that transform, and puts the results back."""
        # Where tensors are stacked hooks are given copies, which need not be copied before.
        owned = not self.stacks_alike("single_tensor_apply")
        kept, given = gather_arguments(self, objective, states, settings, owned=owned)
        if not given.tensors:
            return objective
        given = given._replace(states=self.get_applied_states(objective, kept, given.states))
        with show_arguments(self, objective, given):
            results = self.multi_tensor_apply(*given)
        if objective.checking:
            check_results(self, results, given)
        out = list(results)
        if self.concat_params:
            kept, out = list(range(len(objective.params))), from_vector(out[0], list(map(as_real, objective.params)))
        updates = list(objective.peek_updates() if len(kept) == len(objective.params) else objective.get_updates())
        for i, tensor in zip(kept, out, strict=True):
            param, pairs = objective.params[i], self.concat_params or self.elementwise
            if self.elementwise and param.dtype in HALVES and not objective.wide:
                tensor = tensor.to(param.dtype)
            updates[i] = restore_complex(tensor, param) if pairs else tensor
        objective.updates = updates
        return objective
