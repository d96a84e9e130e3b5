"""The arguments that the hooks of a `TensorTransform` are given, and how hooks are called: tensor by tensor, in what precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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

States = list[dict[str, Any]]
SettingValues = Mapping[str, Any]


class HookArguments(NamedTuple):
    """The arguments of the `multi_tensor_*` hooks, in their order."""

    tensors: list[Tensor]
    params: list[Tensor]
    grads: list[Tensor] | None
    loss: Tensor | None
    states: States
    settings: Sequence[SettingValues]

    def pick(self, places: Sequence[int]) -> HookArguments:
        """Those of some of the tensors."""
        lists = (self.tensors, self.params, self.grads or [], self.states, self.settings)
        tensors, params, grads, states, settings = ([held[i] for i in places] if held else [] for held in lists)
        return HookArguments(tensors, params, None if self.grads is None else grads, self.loss, states, settings)  # type: ignore[arg-type]


def gather_arguments(
    link: TensorTransform, objective: Objective, states: States, settings: Sequence[SettingValues], owned: bool
) -> tuple[list[int], HookArguments]:
    """Positions of the parameters that the hooks see (those with a gradient), and the arguments.

    Args:
        link: The link.
        objective: The objective.
        states: Its states, one for each parameter.
        settings: Its settings, one for each parameter.
        owned: Whether the hooks may write into the update.
    """
    loss = objective.get_loss(backward=True) if link.uses_loss else None
    tensors = objective.get_updates() if owned else objective.peek_updates()
    grads = objective.get_grads() if link.uses_grad else None
    params = objective.params
    if link.concat_params:
        link.check_shared(params)
        params = [param.detach() for param in params]
        lists = [None if held is None else [to_vector(list(map(as_real, held)))] for held in (tensors, params, grads)]
        states, settings, kept = states[:1], settings[:1], [0]
    else:
        kept = [i for i in range(len(params)) if objective.present is None or objective.present[i]]
        states, settings = [states[i] for i in kept], [settings[i] for i in kept]
        if objective.differentiable:
            params = [param.clone() for param in params]
        real: Callable[[Tensor], Tensor] = as_real if link.elementwise else lambda tensor: tensor
        lists = [None if held is None else [real(held[i]) for i in kept] for held in (tensors, params, grads)]
    if link.finds_numbers():
        found = measure(link, objective, settings, [[i] for i in range(len(kept))], lists)
        settings = [{**own, **numbers} if numbers else own for own, numbers in zip(settings, found, strict=True)]
    seen, shown, slopes = lists
    if objective.members is not None and not link.concat_params:
        settings = [_per_member(own, tensor) for own, tensor in zip(settings, seen or [], strict=True)]
    if any(tensor.dim() == 0 for tensor in seen or ()):
        settings = [_fit_numbers(own, tensor) for own, tensor in zip(settings, seen or [], strict=True)]
    return kept, HookArguments(seen or [], shown or [], slopes, loss, states, settings)


def show_arguments(link: TensorTransform, objective: Objective, given: HookArguments) -> AbstractContextManager[None]:
    """Hooks are given the parameters themselves, but for a vector of them and for complex numbers as pairs."""
    pairs = link.elementwise and any(map(torch.is_complex, objective.params))
    copied = pairs or link.concat_params or objective.differentiable
    return link.shown(given.params, given.states, given.settings) if copied else nullcontext()


def call_each(link: TensorTransform, hook: str, given: HookArguments) -> list[Any]:
    """Return what a `single_tensor_*` hook makes of each tensor.

    A fused pass computes those of half precision in single precision, so pointwise hooks see them so too: 1e-8 underflows to 0
    in float16. What such hooks return stays in single precision.
    """
    run = getattr(link, hook)

    def call(i: int, item: Sequence[Any], state: dict[str, Any]) -> Any:
        tensor, param, grad = item
        setting = link.add_dtype(given.settings[i], given.params[i])
        try:
            if link.elementwise and given.params[i].dtype in HALVES:
                return _call_wide(link, run, (tensor, param, grad, given.loss, state, setting))
            return run(tensor, param, grad, given.loss, state, setting)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            explained = explain_error(error, link, hook, name_param(link, given, i), state, setting)
            if explained is None:
                raise
            raise explained from error

    grads: Sequence[Tensor | None] = given.grads or [None] * len(given.tensors)
    items = list(zip(given.tensors, given.params, grads, strict=True))
    if not link.stacks_alike(hook):
        return [call(i, item, state) for i, (item, state) in enumerate(zip(items, given.states, strict=True))]
    return _call_alike(link, call, items, given, writes=hook == "single_tensor_apply")


def _call_alike(
    link: TensorTransform,
    call: Callable[..., Any],
    items: Sequence[Sequence[Any]],
    given: HookArguments,
    writes: bool,
) -> list[Any]:
    """Call a hook for all tensors, those of one shape with equal settings and one structure of state in one call.

    Args:
        link: The link.
        call: Its hook, as a function of a position, the tensors there and the state.
        items: The tensors.
        given: The arguments that they are from.
        writes: Whether the hook may write into its tensor, so that it needs a copy.
    """
    slots = link.settings.binding.slots

    def call_shown(i: int, item: Sequence[Any], state: dict[str, Any]) -> Any:
        if item[0] is given.tensors[i]:
            return call(i, (item[0].clone() if writes else item[0], given.params[i], item[2]), state)
        param = item[1] if link.uses_params else item[0]
        slot = slots.find(given.params[i])
        # Hooks find by the parameter how it is a matrix; that holds for all in the stack.
        with nullcontext() if slot is None else slots.show([param], [slot]):
            return call(i, (item[0], param, item[2]), state)

    if not link.uses_params:
        items = [(tensor, None, grad) for tensor, _, grad in items]
    kinds = [link.find_kind(param) for param in given.params]
    return map_alike(call_shown, items, given.states, given.settings, kinds)


def _call_wide(link: TensorTransform, run: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call a hook with tensors of half precision in single precision, and write what it changed back into the state."""
    tensor, param, grad, loss, state, setting = arguments
    seen, wide = param.float(), {key: widen(value) for key, value in state.items()}
    with link.shown([seen], [wide], [setting]):
        result = run(tensor.float(), seen, widen(grad), loss, wide, setting)
    for key, value in wide.items():
        held = state.get(key)
        if isinstance(held, Tensor) and held.dtype in HALVES and isinstance(value, Tensor):
            held.copy_(value)
        elif held is not value:
            state[key] = value
    return result


def widen(value: Any) -> Any:
    """A tensor in at least single precision; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


def measure(
    link: TensorTransform,
    objective: Objective,
    settings: Sequence[SettingValues],
    places: Sequence[Sequence[int]],
    lists: Sequence[list[Tensor] | None],
) -> list[SettingValues]:
    """For each setting what the link's `measure` finds over all tensors for which it is the same.

    Args:
        link: The link.
        objective: The objective.
        settings: For some tensors each.
        places: The positions of those tensors.
        lists: Update, parameters and gradient by position.
    """
    out: list[SettingValues] = [{} for _ in settings]
    for alike in _find_alike(settings):
        order = places[alike[0]] if len(alike) == 1 else sorted(i for k in alike for i in places[k])
        chosen = [held if held is None or len(order) == len(held) else [held[i] for i in order] for held in lists]
        seen, params, grads = chosen
        with objective.counting(order):
            found = link.measure(seen or [], params or [], grads, [settings[alike[0]]] * len(order), objective.members)
        for k in alike:
            out[k] = found or {}
    return out


def _find_alike(settings: Sequence[SettingValues]) -> list[list[int]]:
    """The positions of settings, those of equal ones together."""
    out: list[list[int]] = []
    for i, setting in enumerate(settings):
        for alike in out:
            if same(setting, settings[alike[0]]):
                alike.append(i)
                break
        else:
            out.append([i])
    return out


def _per_member(setting: SettingValues, tensor: Tensor) -> SettingValues:
    """One number per member, to multiply a tensor whose first axis is the members."""
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
    """Return settings that are 0-d tensors in the precision of a 0-d tensor, which they would promote to theirs."""
    if tensor.dim() > 0 or not any(isinstance(value, Tensor) for value in setting.values()):
        return setting
    fits = _find_precision(tensor)
    return {
        key: value.to(fits) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in setting.items()
    }


def _find_precision(tensor: Tensor) -> torch.dtype:
    """Return the precision of settings for a tensor: its own, but at least single precision."""
    return torch.float32 if tensor.dtype in HALVES else tensor.dtype.to_real()
