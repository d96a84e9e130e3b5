"""Links with a stricter template: states and settings come as lists, and hooks work on tensors alone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ._groups import same
from ._needs import Across, Need
from ._settings import is_per_member
from ._vectors import as_real, from_vector, restore_complex, to_vector
from .module import Chainable, Module

if TYPE_CHECKING:
    from .objective import Objective

__all__ = ["TensorTransform", "Transform"]

States = list[dict[str, Any]]
Setting = Mapping[str, Any]


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
            raise ValueError(
                f"{type(self).__name__}: update_freq is {update_freq!r}; give a number of steps, at least 1"
            )
        self.update_freq = update_freq
        self.set_child("inner", inner)

    def update_states(self, objective: Objective, states: States, settings: Sequence[Setting]) -> None:
        """Learn: change `states`, not the update."""

    @abstractmethod
    def apply_states(self, objective: Objective, states: States, settings: Sequence[Setting]) -> Objective:
        """Transform the update with what is in `states`."""

    def _lists(self, objective: Objective) -> tuple[States, list[Setting]]:
        state, settings = self.state, self.settings
        return [state[param] for param in objective.params], [settings[param] for param in objective.params]

    def update(self, objective: Objective) -> None:
        """Learn, when it is this link's turn."""
        if self.vector_state:
            self.follow(objective.params)
        if self.update_freq == 1 or self.increment_counter("update_calls", 0) % self.update_freq == 0:
            self.update_states(objective, *self._lists(objective))

    def step(self, objective: Objective) -> Objective:
        """`update`, then `apply`."""
        own = type(self)
        plain = own.update is Transform.update and own.apply is Transform.apply
        if not plain or self.children or self.update_freq != 1 or objective.members is not None:
            return super().step(objective)
        if self.vector_state:
            self.follow(objective.params)
        states, settings = self._lists(objective)
        self.update_states(objective, states, settings)
        # A link that begins anew while it learns has new states.
        if states and self._state.get(objective.params[0]) is not states[0]:
            states, settings = self._lists(objective)
        return self.apply_states(objective, states, settings)

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
        measures: False where `measure` has nothing to find with these settings, so that it need not part a fused run.
        counts: Whether `state["step"]` counts the updates of a parameter, from 1.
        uses_params: False where the hooks look at the shapes of parameters only, so that `across` whole tensors theirs need not
            be gathered.
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
    measures: bool = True
    uses_params: ClassVar[bool] = True
    counts: ClassVar[bool] = False
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
        self.concat_params = self.vector_state = concat_params
        self.uses_grad = uses_grad
        self.uses_loss = uses_loss

    @property
    def differentiable(self) -> bool:  # type: ignore[override]
        """Pointwise hooks are, by being pointwise; any other link has to say so."""
        from . import _fusion

        return self.elementwise and not _fusion.overrides(self) and not _fusion.measures(self)

    @property
    def across(self) -> Across:  # type: ignore[override]
        """Nothing for pointwise hooks; a link that measures, or treats whole tensors, has to say what it needs."""
        from . import _fusion

        pointwise = self.elementwise and not self.concat_params and not _fusion.overrides(self)
        return Across.NOTHING if pointwise and not _fusion.measures(self) else Across.EVERYTHING

    def all_needs(self) -> frozenset[Need]:
        """As for every link; `uses_loss` adds the loss."""
        return super().all_needs() | (frozenset({Need.LOSS}) if self.uses_loss else frozenset())

    # ------------------------------------------------------------------ hooks

    def measure(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor] | None,
        settings: Sequence[Setting],
        members: int | None,
    ) -> dict[str, Any] | None:
        """Numbers over all tensors with equal settings (a norm) that the hooks then find in `setting`.

        One per member for a population.
        """
        return None

    def single_tensor_initialize(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        """Fill the state of one parameter."""

    def single_tensor_update(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> None:
        """Learn from one tensor; change `state`, not `tensor`."""

    def single_tensor_apply(
        self, tensor: Tensor, param: Tensor, grad: Tensor | None, loss: Tensor | None, state: Any, setting: Any
    ) -> Tensor:
        """Transform one tensor (in place or not) and return it."""
        raise TypeError(
            f"{type(self).__name__} has neither single_tensor_apply nor multi_tensor_apply; override one of them"
        )

    def multi_tensor_initialize(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor] | None,
        loss: Tensor | None,
        states: States,
        settings: Sequence[Setting],
    ) -> None:
        """Fill the states of parameters seen for the first time."""
        for i, tensor in enumerate(tensors):
            self.single_tensor_initialize(tensor, params[i], _at(grads, i), loss, states[i], settings[i])

    def multi_tensor_update(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor] | None,
        loss: Tensor | None,
        states: States,
        settings: Sequence[Setting],
    ) -> None:
        """Learn from all tensors; change `states`, not `tensors`."""
        for i, tensor in enumerate(tensors):
            if self.elementwise and tensor.dtype in _HALVES:
                with self._widened(params[i], states[i], settings[i]) as (param, state):
                    self.single_tensor_update(tensor.float(), param, _wide(_at(grads, i)), loss, state, settings[i])
                continue
            self.single_tensor_update(tensor, params[i], _at(grads, i), loss, states[i], settings[i])

    def multi_tensor_apply(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor] | None,
        loss: Tensor | None,
        states: States,
        settings: Sequence[Setting],
    ) -> Sequence[Tensor]:
        """Transform all tensors and return them."""
        out = []
        for i, tensor in enumerate(tensors):
            if self.elementwise and tensor.dtype in _HALVES:
                with self._widened(params[i], states[i], settings[i]) as (param, state):
                    found = self.single_tensor_apply(
                        tensor.float(), param, _wide(_at(grads, i)), loss, state, settings[i]
                    )
                out.append(found.to(tensor.dtype))
                continue
            out.append(self.single_tensor_apply(tensor, params[i], _at(grads, i), loss, states[i], settings[i]))
        return out

    @contextmanager
    def _widened(self, param: Tensor, state: dict[str, Any], setting: Setting) -> Iterator[tuple[Tensor, Any]]:
        """A parameter and its state in single precision; what the hooks make of the state is rounded back."""
        wide = {key: _wide(value) if isinstance(value, Tensor) else value for key, value in state.items()}
        seen = param.float()
        with self.shown([seen], [wide], [setting]):
            yield seen, wide
        for key, value in wide.items():
            held = state.get(key)
            if isinstance(held, Tensor) and held.dtype in _HALVES and isinstance(value, Tensor):
                held.copy_(value)
            elif held is not value:
                state[key] = value

    # ------------------------------------------------------------------ running them

    def _fill_states(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor] | None,
        loss: Tensor | None,
        states: States,
        settings: Sequence[Setting],
    ) -> None:
        """Fill the states that are still empty."""
        new = [i for i, state in enumerate(states) if not state]
        if not new:
            return
        self.multi_tensor_initialize(
            [tensors[i] for i in new],
            [params[i] for i in new],
            None if grads is None else [grads[i] for i in new],
            loss,
            [states[i] for i in new],
            [settings[i] for i in new],
        )
        if self.counts:
            for i in new:
                states[i].setdefault("step", 0)

    def _gather(
        self, objective: Objective, states: States, settings: Sequence[Setting], owned: bool
    ) -> tuple[list[int], list[Tensor], list[Tensor], list[Tensor] | None, Tensor | None, States, list[Setting]]:
        loss = objective.get_loss(backward=True) if self.uses_loss else None
        tensors = objective.get_updates() if owned else objective.peek_updates()
        grads = objective.get_grads() if self.uses_grad else None
        params = objective.params
        if self.concat_params:
            self.check_shared(params)
            return (
                [0],
                [to_vector([as_real(tensor) for tensor in tensors])],
                [to_vector([as_real(param) for param in params]).detach()],
                None if grads is None else [to_vector([as_real(grad) for grad in grads])],
                loss,
                [states[0]],
                [settings[0]],
            )
        kept = [i for i in range(len(params)) if objective.present is None or objective.present[i]]
        chosen = [settings[i] for i in kept]
        if objective.members is not None:
            chosen = [
                _per_member(setting, tensors[i], self.elementwise) for i, setting in zip(kept, chosen, strict=True)
            ]
        real = as_real if self.elementwise else _as_it_is
        return (
            kept,
            [real(tensors[i]) for i in kept],
            [real(params[i].clone() if objective.differentiable else params[i]) for i in kept],
            None if grads is None else [real(grads[i]) for i in kept],
            loss,
            [states[i] for i in kept],
            chosen,
        )

    def update_states(self, objective: Objective, states: States, settings: Sequence[Setting]) -> None:
        """Gathers the tensors and calls the hooks that learn."""
        kept, tensors, params, grads, loss, rows, chosen = self._gather(objective, states, settings, owned=False)
        if not tensors:
            return
        chosen = self._measured(objective, tensors, params, grads, chosen, kept)
        with self._as_shown(objective, params, rows, chosen):
            self._fill_states(tensors, params, grads, loss, rows, chosen)
            if self.counts:
                for row in rows:
                    row["step"] = row["step"] + 1
            self.multi_tensor_update(tensors, params, grads, loss, rows, chosen)

    def apply_states(self, objective: Objective, states: States, settings: Sequence[Setting]) -> Objective:
        """Gathers the tensors, calls the hooks that transform, and puts the results back."""
        kept, tensors, params, grads, loss, rows, chosen = self._gather(objective, states, settings, owned=True)
        if not tensors:
            return objective
        chosen = self._measured(objective, tensors, params, grads, chosen, kept)
        with self._as_shown(objective, params, rows, chosen):
            out = list(self.multi_tensor_apply(tensors, params, grads, loss, rows, chosen))
        if self.concat_params:
            parts = from_vector(out[0], [as_real(param) for param in objective.params])
            objective.updates = [
                restore_complex(part, param) for part, param in zip(parts, objective.params, strict=True)
            ]
        else:
            updates = list(objective.get_updates())
            for i, tensor in zip(kept, out, strict=True):
                updates[i] = restore_complex(tensor, objective.params[i]) if self.elementwise else tensor
            objective.updates = updates
        return objective

    def _as_shown(
        self, objective: Objective, params: list[Tensor], states: States, settings: list[Setting]
    ) -> AbstractContextManager[None]:
        """Hooks are given the parameters themselves, but for a vector of them and for complex numbers as pairs."""
        pairs = self.elementwise and any(map(torch.is_complex, objective.params))
        copied = pairs or self.concat_params or objective.differentiable
        return self.shown(params, states, settings) if copied else nullcontext()

    def _measured(
        self,
        objective: Objective,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor] | None,
        settings: list[Setting],
        kept: list[int],
    ) -> list[Setting]:
        if not self.measures:
            return settings
        out = list(settings)
        # Parameters for which the link has other settings are measured by themselves.
        left = list(range(len(settings)))
        while left:
            first = settings[left[0]]
            alike = [i for i in left if settings[i] is first or same(settings[i], first)]
            left = [] if len(alike) == len(left) else [i for i in left if i not in set(alike)]
            given = None if grads is None else [grads[i] for i in alike]
            with objective.counting([kept[i] for i in alike]):
                found = self.measure(
                    [tensors[i] for i in alike],
                    [params[i] for i in alike],
                    given,
                    [first] * len(alike),
                    objective.members,
                )
            for i in alike if found else ():
                numbers = found if objective.members is None else _per_member(found or {}, tensors[i], False)
                out[i] = {**settings[i], **(numbers or {})}
        return out


# A fused pass computes these in single precision, so the hooks do too: 1e-8 is zero in half of it.
_HALVES = (torch.float16, torch.bfloat16)


def _wide(tensor: Tensor | None) -> Tensor | None:
    return tensor.float() if tensor is not None and tensor.dtype in _HALVES else tensor


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _at(tensors: list[Tensor] | None, i: int) -> Tensor | None:
    return None if tensors is None else tensors[i]


def _per_member(setting: Setting, tensor: Tensor, pairs: bool) -> Setting:
    """One number per member, to multiply a tensor whose first axis is the members (of pairs where it is complex)."""
    if not any(is_per_member(value) for value in setting.values()):
        return setting
    shape = (-1, *([1] * (tensor.dim() - 1 + (pairs and tensor.is_complex()))))
    wide = {torch.float32: torch.float32, torch.complex64: torch.float32}.get(tensor.dtype)
    wide = torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else wide
    return {
        # Settings take the precision of the tensor, but are not rounded to half of it.
        key: value.to(tensor.device, wide if value.is_floating_point() else None).reshape(shape)
        if is_per_member(value)
        else value
        for key, value in setting.items()
    }
