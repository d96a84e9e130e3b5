"""The arguments of the hooks of a `TensorTransform`, and the calls of hooks: per tensor or stacked, and in which precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ._checks import HALVES, explain_error, name_param
from ._settings import is_per_member, same
from ._vectors import as_real, to_vector
from .alike import map_alike

if TYPE_CHECKING:
    from .objective import Objective
    from .transform import TensorTransform

Tensors = list[Tensor]
"""The tensors that are passed to a hook, one for each parameter."""
States = list[dict[str, Any]]
"""The states of the parameters, in the same order."""
SettingValues = Mapping[str, Any]
"""The settings of one parameter."""
SettingsList = Sequence[SettingValues]
"""The settings of the parameters, in the same order."""


class HookArguments(NamedTuple):
    """The arguments of the `multi_tensor_*` hooks, in their order."""

    tensors: list[Tensor]
    params: list[Tensor]
    grads: list[Tensor] | None
    loss: Tensor | None
    states: States
    settings: SettingsList

    def pick(self, places: Sequence[int]) -> HookArguments:
        """Return the arguments of the tensors at some positions."""
        lists = (self.tensors, self.params, self.grads or [], self.states, self.settings)
        tensors, params, grads, states, settings = ([column[i] for i in places] if column else [] for column in lists)
        return HookArguments(tensors, params, None if self.grads is None else grads, self.loss, states, settings)  # type: ignore[arg-type]


def gather_arguments(
    link: TensorTransform, objective: Objective, states: States, settings: SettingsList, owned: bool
) -> tuple[list[int], HookArguments]:
    """Return the positions of the parameters that are passed to hooks (those with a gradient), and the arguments.

    Args:
        link: The link.
        objective: The objective.
        states: Its states, one for each parameter.
        settings: Its settings, one for each parameter.
        owned: Whether the hooks may write into the update.
    """
    loss = objective.get_loss(backward=True) if link.uses_loss else None
    updates = objective.get_updates() if owned else objective.peek_updates()
    params, grads = objective.params, objective.get_grads() if link.uses_grad else None
    convert: Callable[[Tensors], Tensors]
    if link.concat_params:
        link.check_shared(params)
        params, convert = list(map(Tensor.detach, params)), _concatenate
        states, settings, positions = states[:1], settings[:1], [0]
    else:
        positions = objective.list_present()
        states, settings = [states[i] for i in positions], [settings[i] for i in positions]
        if objective.differentiable:
            params = list(map(Tensor.clone, params))
        convert = partial(_pick, positions=positions, real=link.elementwise)
    updates, params, grads = convert(updates), convert(params), None if grads is None else convert(grads)
    if link.finds_numbers():
        measured = measure(link, objective, settings, [[i] for i in range(len(positions))], [updates, params, grads])
        settings = [{**own, **numbers} if numbers else own for own, numbers in zip(settings, measured, strict=True)]
    settings = _fit_settings(settings, updates, per_member=objective.members is not None and not link.concat_params)
    return positions, HookArguments(updates, params, grads, loss, states, settings)


def _concatenate(tensors: Tensors) -> Tensors:
    """Return tensors as one vector, complex numbers as pairs of reals."""
    return [to_vector(list(map(as_real, tensors)))]


def _pick(tensors: Tensors, positions: Sequence[int], real: bool) -> Tensors:
    """Return the tensors at some positions.

    Args:
        tensors: The tensors.
        positions: The positions.
        real: Whether complex numbers are converted to pairs of reals.
    """
    picked = [tensors[i] for i in positions]
    return list(map(as_real, picked)) if real else picked


def show_arguments(
    link: TensorTransform, objective: Objective, arguments: HookArguments
) -> AbstractContextManager[None]:
    """Return a context in which link.state and link.settings accept the tensors that hooks get in place of parameters.

    Hooks get the parameters themselves unless they work on one vector of all, on complex numbers as pairs of reals, or on the
    copies of a differentiable step.

    Args:
        link: The link.
        objective: The objective.
        arguments: The arguments of its hooks.
    """
    pairs = link.elementwise and any(map(torch.is_complex, objective.params))
    copied = pairs or link.concat_params or objective.differentiable
    return link.shown(arguments.params, arguments.states, arguments.settings) if copied else nullcontext()


def call_each(link: TensorTransform, hook: str, arguments: HookArguments) -> list[Any]:
    """Return the results of a `single_tensor_*` hook for each tensor.

    Pointwise hooks get tensors of half precision in single precision, as in a fused pass, since 1e-8 underflows to 0 in
    float16. Their results stay in single precision.

    Args:
        link: The link.
        hook: The name of the hook.
        arguments: Its arguments.
    """
    run = getattr(link, hook)

    def call(i: int, item: Sequence[Any], state: dict[str, Any]) -> Any:
        tensor, param, grad = item
        setting = link.add_dtype(arguments.settings[i], arguments.params[i])
        try:
            if link.elementwise and arguments.params[i].dtype in HALVES:
                return _call_wide(link, run, (tensor, param, grad, arguments.loss, state, setting))
            return run(tensor, param, grad, arguments.loss, state, setting)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            explained = explain_error(error, link, hook, name_param(link, arguments, i), state, setting)
            if explained is None:
                raise
            raise explained from error

    grads: Sequence[Tensor | None] = arguments.grads or [None] * len(arguments.tensors)
    items = list(zip(arguments.tensors, arguments.params, grads, strict=True))
    if not link.stacks_alike(hook):
        return [call(i, item, state) for i, (item, state) in enumerate(zip(items, arguments.states, strict=True))]
    return _call_alike(link, call, items, arguments, writes=hook == "single_tensor_apply")


def _call_alike(
    link: TensorTransform,
    call: Callable[..., Any],
    items: Sequence[Sequence[Any]],
    arguments: HookArguments,
    writes: bool,
) -> list[Any]:
    """Call a hook for all tensors; those of one shape with equal settings and one structure of state are stacked for one call.

    Args:
        link: The link.
        call: Its hook, as a function of a position, the tensors there and the state.
        items: The tensors.
        arguments: The arguments of the hook.
        writes: Whether the hook may write into its tensor, so that it needs a copy.
    """
    slots = link.settings.binding.slots

    def call_with_slot(i: int, item: Sequence[Any], state: dict[str, Any]) -> Any:
        if item[0] is arguments.tensors[i]:
            return call(i, (item[0].clone() if writes else item[0], arguments.params[i], item[2]), state)
        param = item[1] if link.uses_params else item[0]
        slot = slots.find(arguments.params[i])
        # Hooks look up the matrix view of a parameter by its slot; it is the same for the whole stack.
        with nullcontext() if slot is None else slots.show([param], [slot]):
            return call(i, (item[0], param, item[2]), state)

    if not link.uses_params:
        items = [(tensor, None, grad) for tensor, _, grad in items]
    kinds = [link.find_kind(param) for param in arguments.params]
    return map_alike(call_with_slot, items, arguments.states, arguments.settings, kinds)


def _call_wide(link: TensorTransform, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return the result of a hook called with half-precision tensors as float32; write changes of the state back."""
    tensor, param, grad, loss, state, setting = arguments
    wide_param, wide = param.float(), {key: widen(value) for key, value in state.items()}
    with link.shown([wide_param], [wide], [setting]):
        result = run(tensor.float(), wide_param, widen(grad), loss, wide, setting)
    for key, value in wide.items():
        stored = state.get(key)
        if isinstance(stored, Tensor) and stored.dtype in HALVES and isinstance(value, Tensor):
            stored.copy_(value)
        elif stored is not value:
            state[key] = value
    return result


def widen(value: Any) -> Any:
    """Return a tensor in at least single precision; other values unmodified."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


def measure(
    link: TensorTransform,
    objective: Objective,
    settings: SettingsList,
    places: Sequence[Sequence[int]],
    lists: Sequence[list[Tensor] | None],
) -> list[SettingValues]:
    """Return for each of several settings the result of the link's `measure` over all tensors with equal settings.

    Args:
        link: The link.
        objective: The objective.
        settings: The settings, each for some of the tensors.
        places: For each of the settings the positions of its tensors.
        lists: Update, parameters and gradient by position.
    """
    results: list[SettingValues] = [{} for _ in settings]
    for group in _group_equal(settings):
        first = group[0]
        order = places[first] if len(group) == 1 else sorted(i for k in group for i in places[k])
        updates, params, grads = [
            column if column is None or len(order) == len(column) else [column[i] for i in order] for column in lists
        ]
        with objective.counting(order):
            numbers = link.measure(
                updates or [], params or [], grads, [settings[first]] * len(order), objective.members
            )
        for k in group:
            results[k] = numbers or {}
    return results


def _group_equal(settings: SettingsList) -> list[list[int]]:
    """Return the positions of settings, grouped by equal settings."""
    groups: list[list[int]] = []
    for i, setting in enumerate(settings):
        for group in groups:
            if same(setting, settings[group[0]]):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def _fit_settings(settings: SettingsList, updates: Tensors, per_member: bool) -> SettingsList:
    """Return settings that broadcast with the updates and do not promote them.

    Args:
        settings: The settings of each parameter.
        updates: The updates.
        per_member: Whether the first axis of updates is the members of a population.
    """
    if per_member:
        settings = [_per_member(own, tensor) for own, tensor in zip(settings, updates, strict=True)]
    if any(tensor.dim() == 0 for tensor in updates):
        settings = [_fit_numbers(own, tensor) for own, tensor in zip(settings, updates, strict=True)]
    return settings


def _per_member(setting: SettingValues, tensor: Tensor) -> SettingValues:
    """Return settings with each number per member reshaped to broadcast with a tensor whose first axis is the members."""
    if not any(is_per_member(value) for value in setting.values()):
        return setting
    shape = (-1, *([1] * (tensor.dim() - 1)))
    return {
        key: value.to(tensor.device, _find_precision(tensor) if value.is_floating_point() else None).reshape(shape)
        if is_per_member(value)
        else value
        for key, value in setting.items()
    }


def _fit_numbers(setting: SettingValues, tensor: Tensor) -> SettingValues:
    """Return settings with 0-d tensors converted to the precision of a 0-d tensor, which they would otherwise promote."""
    if tensor.dim() > 0 or not any(isinstance(value, Tensor) for value in setting.values()):
        return setting
    precision = _find_precision(tensor)
    return {
        key: value.to(precision) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in setting.items()
    }


def _find_precision(tensor: Tensor) -> torch.dtype:
    """Return the precision of settings for a tensor: its own, but at least single precision."""
    return torch.float32 if tensor.dtype in HALVES else tensor.dtype.to_real()
